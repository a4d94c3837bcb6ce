"""Checks a request against the limits of the service; every error names its field and limit."""

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.frontend.errors import invalid
from octavo.frontend.requests import GenerateCall, SamplingRequest
from octavo.proto.plan import EARLY_STOPPING, Sampling
from octavo.proto.session import FINISH_REASONS
from octavo.proto.wire import float32s, int32s

MAX_N = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
MAX_CACHE_SALT = 256
MAX_PREFIX_NAME = 256
MAX_LENGTH_PENALTY = 10
MAX_SEED = (1 << 64) - 1
_MAX_INT32 = (1 << 31) - 1

# A temperature that single precision cannot hold divides logits by zero; it means greedy.
_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)

# Inclusive ranges of the real-valued fields. The upper ends that no client needs keep single
# precision finite.
_RANGES = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
# What has no meaning in a beam search, and the values that do not ask for it.
_NOT_WITH_BEAMS: Mapping[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1.0),
    "top_k": (0, -1),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "stop": ((), []),
}
# What has a meaning in a beam search only.
_ONLY_WITH_BEAMS: Mapping[str, Any] = {"length_penalty": 1.0, "early_stopping": "false"}
# Ranges whose lower end is excluded.
_POSITIVE_RANGES = {"top_p": (0.0, 1.0), "repetition_penalty": (0.0, 100.0)}


@dataclass(frozen=True)
class Limits:
    """What this service can take."""

    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    max_sequences: int = MAX_N  # samples of one request
    max_token_chars: int = 1  # no token stands for more characters
    num_eos: int = 1  # EOS ids of the model


def check_call(call: GenerateCall, limits: Limits) -> None:
    """Everything that can be checked before the prompt is tokenized. Raises RequestError."""
    if isinstance(call.prompt, str):
        check_text("prompt", call.prompt, limits)
    if not -_MAX_INT32 - 1 <= call.priority <= _MAX_INT32:
        raise invalid("priority", f"must be in [{-_MAX_INT32 - 1}, {_MAX_INT32}]")
    _check_cache_salt(call.cache_salt)
    _check_sampling(call.sampling, limits)
    if call.resume:
        _check_resume(call, limits)


def _check_resume(call: GenerateCall, limits: Limits) -> None:
    sampling = call.sampling
    if sampling.use_beam_search or sampling.num_samples > sampling.n:
        raise invalid("resume", "is not for use_beam_search or best_of, which begin anew: leave it out")
    if sampling.seed is None:
        raise invalid("resume", "needs sampling.seed: that of the stream which is continued")
    if len(call.resume) != sampling.n:
        raise invalid(
            "resume", f"must have a sample for each of n ({sampling.n}), got {len(call.resume)}"
        )
    for i, sample in enumerate(call.resume):
        check_ids(f"resume.samples[{i}].token_ids", sample.tokens, limits)
        if sample.finish_reason not in ("", *FINISH_REASONS):
            reasons = ", ".join(FINISH_REASONS)
            raise invalid(f"resume.samples[{i}].finish_reason", f"must be empty or one of {reasons}")
    if all(sample.finish_reason for sample in call.resume):
        raise invalid("resume", "has finished samples only: nothing is left to generate")


def check_prefix_name(name: str) -> None:
    """Raises RequestError."""
    if not 1 <= len(name) <= MAX_PREFIX_NAME:
        raise invalid("name", f"must have 1 to {MAX_PREFIX_NAME} characters, got {len(name)}")


def check_prefix(name: str, cache_salt: str) -> None:
    """What is known of a prefix before it is tokenized. Raises RequestError."""
    check_prefix_name(name)
    _check_cache_salt(cache_salt)


def check_prefix_tokens(prompt: Sequence[int], limits: Limits) -> None:
    """Raises RequestError."""
    if not prompt:
        raise invalid("prompt", "must have at least 1 token")
    check_ids("prompt", prompt, limits)


def check_tokens(call: GenerateCall, prompt: Sequence[int], limits: Limits) -> int:
    """Checks the tokenized prompt and returns how many tokens each sample may have.

    Raises RequestError.
    """
    if not prompt:
        raise invalid("prompt", "must have at least 1 token")
    _check_ids("prompt", prompt, limits.vocab_size)
    room = limits.max_model_len - len(prompt)
    wanted = call.sampling.max_tokens
    if room < (0 if wanted == 0 else 1):
        raise invalid(
            "prompt",
            f"has {len(prompt)} tokens, which leaves no room in the context of "
            f"{limits.max_model_len} tokens",
        )
    if wanted is None:
        wanted = min(room, call.default_max_tokens or room)
    if wanted > room:
        raise invalid(
            "max_tokens",
            f"is {wanted}, but after {len(prompt)} prompt tokens the context of "
            f"{limits.max_model_len} tokens has room for {room}",
        )
    if call.sampling.min_tokens > wanted:
        raise invalid("min_tokens", f"is {call.sampling.min_tokens}, above max_tokens ({wanted})")
    longest = max((len(sample.tokens) for sample in call.resume), default=0)
    if longest > wanted:
        raise invalid("resume", f"has a sample of {longest} tokens, above max_tokens ({wanted})")
    return wanted


def wire_sampling(sampling: SamplingRequest, eos_token_ids: Iterable[int], vocab_size: int) -> Sampling:
    """A checked `sampling` as the workers get it, with a seed drawn if there is none."""
    greedy = sampling.temperature < _LEAST_TEMPERATURE
    seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
    return Sampling(
        temperature=0.0 if greedy else float(sampling.temperature),
        top_k=min(max(sampling.top_k, 0), vocab_size),
        top_p=float(sampling.top_p),
        min_p=float(sampling.min_p),
        repetition_penalty=float(sampling.repetition_penalty),
        presence_penalty=float(sampling.presence_penalty),
        frequency_penalty=float(sampling.frequency_penalty),
        seed=seed,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        logprobs=_wire_logprobs(sampling),
        prompt_logprobs=sampling.prompt_logprobs,
        bias_ids=int32s(list(sampling.logit_bias)),
        bias_values=float32s(list(sampling.logit_bias.values())),
        stop_token_ids=int32s(sorted(set(sampling.stop_token_ids))),
        eos_token_ids=int32s(list(eos_token_ids)),
    )


def _wire_logprobs(sampling: SamplingRequest) -> int | None:
    """The best of several samples is found by their log-probabilities, shown or not."""
    if sampling.num_samples > sampling.n:
        return sampling.logprobs or 0
    return sampling.logprobs


def check_ids(field: str, ids: Sequence[int], limits: Limits) -> None:
    """Token ids that a client sent outside a prompt. Raises RequestError."""
    if len(ids) > limits.max_model_len:
        raise invalid(field, f"has {len(ids)} entries, above the limit of {limits.max_model_len}")
    _check_ids(field, ids, limits.vocab_size)


def check_text(field: str, text: str, limits: Limits) -> None:
    """A text that is to be tokenized. Raises RequestError."""
    most = limits.max_model_len * limits.max_token_chars
    if len(text) > most:
        raise invalid(
            field,
            f"has {len(text)} characters, more than a context of {limits.max_model_len} tokens holds",
        )
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise invalid(field, "has a lone surrogate, which is not Unicode text")


def _check_sampling(sampling: SamplingRequest, limits: Limits) -> None:
    _check_reals(sampling)
    _check_counts(sampling)
    _check_samples(sampling, limits)
    _check_beams(sampling, limits)
    _check_bias(sampling, limits)
    _check_stops(sampling, limits)


def _check_reals(sampling: SamplingRequest) -> None:
    for name, (low, high) in _RANGES.items():
        if not low <= getattr(sampling, name) <= high:  # false for NaN too
            raise invalid(name, f"must be in [{low:g}, {high:g}], got {getattr(sampling, name)}")
    for name, (low, high) in _POSITIVE_RANGES.items():
        if not low < getattr(sampling, name) <= high:
            raise invalid(name, f"must be in ({low:g}, {high:g}], got {getattr(sampling, name)}")


def _check_counts(sampling: SamplingRequest) -> None:
    if not -1 <= sampling.top_k <= _MAX_INT32:
        raise invalid("top_k", f"must be -1 or 0 (all) or at least 1, got {sampling.top_k}")
    if sampling.seed is not None and not 0 <= sampling.seed <= MAX_SEED:
        raise invalid("seed", f"must be in [0, {MAX_SEED}], got {sampling.seed}")
    if sampling.max_tokens is not None and sampling.max_tokens < 0:
        raise invalid("max_tokens", f"must be at least 0, got {sampling.max_tokens}")
    if sampling.min_tokens < 0:
        raise invalid("min_tokens", f"must be at least 0, got {sampling.min_tokens}")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise invalid(name, f"must be in [0, {MAX_LOGPROBS}], got {value}")


def _check_samples(sampling: SamplingRequest, limits: Limits) -> None:
    most = min(MAX_N, limits.max_sequences)
    if not 1 <= sampling.n <= most:
        raise invalid("n", f"must be in [1, {most}], got {sampling.n}")
    if sampling.num_samples < sampling.n:
        raise invalid("best_of", f"must be at least n ({sampling.n}), got {sampling.best_of}")
    if sampling.num_samples > most:
        raise invalid("best_of", f"must be at most {most}, got {sampling.best_of}")


def _check_beams(sampling: SamplingRequest, limits: Limits) -> None:
    if not abs(sampling.length_penalty) <= MAX_LENGTH_PENALTY:  # false for NaN too
        limit = f"[-{MAX_LENGTH_PENALTY}, {MAX_LENGTH_PENALTY}]"
        raise invalid("length_penalty", f"must be in {limit}, got {sampling.length_penalty}")
    if sampling.early_stopping not in EARLY_STOPPING:
        raise invalid("early_stopping", f"must be one of {', '.join(EARLY_STOPPING)}")
    if not sampling.use_beam_search:
        for name, neutral in _ONLY_WITH_BEAMS.items():
            if getattr(sampling, name) != neutral:
                raise invalid(name, "needs use_beam_search")
        return
    for name, neutrals in _NOT_WITH_BEAMS.items():
        if getattr(sampling, name) not in neutrals:
            raise invalid(name, "must be left out: not with use_beam_search")
    if sampling.num_samples != sampling.n:
        raise invalid("best_of", f"must be n ({sampling.n}) or left out: not with use_beam_search")
    if sampling.max_tokens == 0:
        raise invalid("max_tokens", "must be at least 1 with use_beam_search")
    _check_width(sampling, limits)


def _check_width(sampling: SamplingRequest, limits: Limits) -> None:
    """Each step looks at so many continuations that enough of them do not end."""
    endings = len(set(sampling.stop_token_ids)) + (0 if sampling.ignore_eos else limits.num_eos)
    looked_at = max(2, 1 + endings)
    if sampling.n * looked_at > limits.vocab_size:
        raise invalid(
            "n",
            f"must be at most {limits.vocab_size // looked_at} with use_beam_search, {endings} ending "
            f"tokens and a vocabulary of {limits.vocab_size}, got {sampling.n}",
        )


def _check_cache_salt(cache_salt: str) -> None:
    if len(cache_salt) > MAX_CACHE_SALT:
        raise invalid("cache_salt", f"must have at most {MAX_CACHE_SALT} characters")


def _check_bias(sampling: SamplingRequest, limits: Limits) -> None:
    bias = sampling.logit_bias
    if len(bias) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"must have at most {MAX_LOGIT_BIAS} entries, got {len(bias)}")
    _check_ids("logit_bias", list(bias), limits.vocab_size)
    for token_id, value in bias.items():
        if not (math.isfinite(value) and -100 <= value <= 100):
            raise invalid("logit_bias", f"of token {token_id} must be in [-100, 100], got {value}")


def _check_stops(sampling: SamplingRequest, limits: Limits) -> None:
    if len(sampling.stop) > MAX_STOPS:
        raise invalid("stop", f"must have at most {MAX_STOPS} strings, got {len(sampling.stop)}")
    for stop in sampling.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise invalid(
                "stop", f"must have strings of 1 to {MAX_STOP_CHARS} characters, got one of {len(stop)}"
            )
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid("stop_token_ids", f"must have at most {MAX_STOP_TOKEN_IDS} entries")
    _check_ids("stop_token_ids", sampling.stop_token_ids, limits.vocab_size)


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError for the first id outside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise invalid(field, f"has token id {wrong}, which is not in [0, {vocab_size})")
