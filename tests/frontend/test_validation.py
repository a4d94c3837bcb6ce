"""Every bad value gets an error that names its field and its limit."""

import math
import re
from typing import Any

import pytest

from octavo.frontend.errors import RequestError
from octavo.frontend.requests import GenerateCall, SamplingRequest
from octavo.frontend.validation import (
    Limits,
    check_call,
    check_ids,
    check_prefix,
    check_prefix_tokens,
    check_tokens,
    wire_sampling,
)

LIMITS = Limits(vocab_size=100, max_model_len=32, max_sequences=8, max_token_chars=5)
NAN, INF = math.nan, math.inf


def refused(call: GenerateCall, prompt: list[int] | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check_call(call, LIMITS)
        check_tokens(call, [1, 2, 3] if prompt is None else prompt, LIMITS)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("temperature", -0.1, r"\[0, 100\]"),
        ("temperature", NAN, "nan"),
        ("temperature", INF, "inf"),
        ("top_p", 0.0, r"\(0, 1\]"),
        ("top_p", 1.1, r"\(0, 1\]"),
        ("top_p", NAN, "nan"),
        ("min_p", -0.1, r"\[0, 1\]"),
        ("min_p", NAN, "nan"),
        ("repetition_penalty", 0.0, r"\(0, 100\]"),
        ("repetition_penalty", INF, "inf"),
        ("presence_penalty", 2.1, r"\[-2, 2\]"),
        ("frequency_penalty", NAN, r"\[-2, 2\]"),
        ("top_k", -2, "got -2"),
        ("n", 0, r"\[1, 8\]"),
        ("n", 9, r"\[1, 8\]"),
        ("seed", -1, "18446744073709551615"),
        ("seed", 1 << 64, "18446744073709551615"),
        ("max_tokens", -1, "at least 0"),
        ("max_tokens", 30, "room for 29"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 30, r"above max_tokens \(29\)"),
        ("logprobs", -1, r"\[0, 20\]"),
        ("logprobs", 21, r"\[0, 20\]"),
        ("prompt_logprobs", 21, r"\[0, 20\]"),
        ("stop", [""], "1 to 256"),
        ("stop", ["x" * 257], "1 to 256"),
        ("stop", ["x"] * 17, "at most 16"),
        ("stop_token_ids", [100], r"\[0, 100\)"),
        ("stop_token_ids", [-1], r"\[0, 100\)"),
        ("stop_token_ids", [1] * 65, "at most 64"),
        ("logit_bias", {100: 1.0}, r"\[0, 100\)"),
        ("logit_bias", {-1: 1.0}, r"\[0, 100\)"),
        ("logit_bias", {5: 101.0}, r"\[-100, 100\]"),
        ("logit_bias", {5: NAN}, r"\[-100, 100\]"),
        ("logit_bias", {5: -INF}, r"\[-100, 100\]"),
        ("best_of", 0, "at least n"),
        ("best_of", 9, "at most 8"),
        ("length_penalty", 2.0, "needs use_beam_search"),
        ("length_penalty", NAN, r"\[-10, 10\]"),
        ("early_stopping", "true", "needs use_beam_search"),
        ("early_stopping", "sometimes", "true, false, never"),
    ],
)
def test_bad_sampling(field: str, value: Any, limit: str) -> None:
    error = refused(GenerateCall([1, 2, 3], SamplingRequest(**{field: value})))
    assert error.code == "INVALID_ARGUMENT"
    assert error.field == field
    assert error.message.startswith(field)
    assert re.search(limit, error.message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.7),
        ("top_k", 5),
        ("top_p", 0.9),
        ("min_p", 0.1),
        ("logprobs", 0),
        ("prompt_logprobs", 0),
        ("stop", ("x",)),
        ("best_of", 5),
        ("max_tokens", 0),
        ("length_penalty", 10.5),
        ("length_penalty", -INF),
        ("length_penalty", NAN),
        ("early_stopping", "True"),
    ],
)
def test_what_beam_search_cannot_take(field: str, value: Any) -> None:
    error = refused(GenerateCall([1], SamplingRequest(use_beam_search=True, n=4, **{field: value})))
    assert error.code == "INVALID_ARGUMENT"
    assert error.field == field
    assert field in ("length_penalty", "early_stopping") or "use_beam_search" in error.message


def test_a_beam_search_is_no_wider_than_its_vocabulary_allows() -> None:
    sampling = SamplingRequest(use_beam_search=True, n=8, stop_token_ids=list(range(12)))
    error = refused(GenerateCall([1], sampling))  # 8 beams, 14 continuations of each, 100 tokens
    assert error.field == "n"
    assert "must be at most 7" in error.message


def test_beam_search_that_is_allowed() -> None:
    sampling = SamplingRequest(
        use_beam_search=True,
        n=8,
        best_of=8,
        temperature=0.0,
        top_k=-1,
        seed=3,
        length_penalty=-10.0,
        early_stopping="never",
        min_tokens=2,
        repetition_penalty=1.5,
        logit_bias={5: 1.0},
        stop_token_ids=[7],
    )
    check_call(GenerateCall([1, 2, 3], sampling), LIMITS)
    assert wire_sampling(sampling, [2], LIMITS.vocab_size).logprobs is None


def test_the_best_are_found_by_log_probabilities() -> None:
    call = SamplingRequest(n=2, best_of=4)
    check_call(GenerateCall([1], call), LIMITS)
    assert wire_sampling(call, [], 100).logprobs == 0
    assert wire_sampling(SamplingRequest(n=2, best_of=4, logprobs=3), [], 100).logprobs == 3
    assert wire_sampling(SamplingRequest(n=2, best_of=2), [], 100).logprobs is None


@pytest.mark.parametrize(
    ("name", "salt", "field"),
    [("", "", "name"), ("x" * 257, "", "name"), ("x", "s" * 257, "cache_salt")],
)
def test_bad_prefixes(name: str, salt: str, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_prefix(name, salt)
    assert caught.value.field == field
    assert "256" in caught.value.message


@pytest.mark.parametrize("tokens", [[], [100], [1] * 33])
def test_bad_prefix_tokens(tokens: list[int]) -> None:
    with pytest.raises(RequestError) as caught:
        check_prefix_tokens(tokens, LIMITS)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "at least 1 token"),
        ([0, 100], r"token id 100, which is not in \[0, 100\)"),
        ([-1], "token id -1"),
        ([1] * 32, "32 tokens, which leaves no room in the context of 32"),
    ],
)
def test_bad_prompt_tokens(prompt: list[int], message: str) -> None:
    error = refused(GenerateCall(prompt), prompt)
    assert error.field == "prompt"
    assert re.search(message, error.message)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    assert "more than a context of 32 tokens" in refused(GenerateCall("x" * 161)).message
    check_call(GenerateCall("x" * 160), LIMITS)


def test_a_lone_surrogate_is_refused() -> None:
    assert "surrogate" in refused(GenerateCall("a\ud800")).message


@pytest.mark.parametrize(("field", "value"), [("priority", 1 << 31), ("cache_salt", "x" * 257)])
def test_bad_call_fields(field: str, value: Any) -> None:
    assert refused(GenerateCall([1], **{field: value})).field == field


def test_default_max_tokens_is_the_room_or_less() -> None:
    prompt = [1] * 30
    assert check_tokens(GenerateCall(prompt), prompt, LIMITS) == 2
    assert check_tokens(GenerateCall(prompt, default_max_tokens=16), prompt, LIMITS) == 2
    assert check_tokens(GenerateCall([1], default_max_tokens=16), [1], LIMITS) == 16


def test_a_full_context_may_be_scored_without_generating() -> None:
    prompt = [1] * 32
    call = GenerateCall(prompt, SamplingRequest(max_tokens=0, prompt_logprobs=0))
    assert check_tokens(call, prompt, LIMITS) == 0


def test_edges_that_are_allowed() -> None:
    sampling = SamplingRequest(
        temperature=0.0,
        top_k=-1,
        top_p=1.0,
        min_p=1.0,
        logit_bias={0: -100.0, 99: 100.0},
        seed=(1 << 64) - 1,
        n=8,
        best_of=8,
        max_tokens=29,
        min_tokens=29,
        stop=["x" * 256] * 16,
        stop_token_ids=[0, 99],
        logprobs=20,
    )
    check_call(GenerateCall([1, 2, 3], sampling), LIMITS)
    wire = wire_sampling(sampling, [2], LIMITS.vocab_size)
    assert wire.top_k == 0
    assert wire.seed == (1 << 64) - 1
    assert wire.eos_token_ids.tolist() == [2]


def test_a_temperature_below_single_precision_is_greedy() -> None:
    assert wire_sampling(SamplingRequest(temperature=1e-300), [], 100).temperature == 0.0
    assert wire_sampling(SamplingRequest(temperature=1e-7), [], 100).temperature == 1e-7


def test_a_seed_is_drawn_where_none_is_given() -> None:
    seeds = {wire_sampling(SamplingRequest(), [], 100).seed for _ in range(8)}
    assert len(seeds) == 8


def test_ids_of_other_calls_are_bounded() -> None:
    with pytest.raises(RequestError, match="token_ids has 33 entries, above the limit of 32"):
        check_ids("token_ids", [1] * 33, LIMITS)
