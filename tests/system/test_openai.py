"""The `openai` Python client, unchanged, against the running service."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion
from service import Service, get, wait_for
from shared_files import golden

pytestmark = pytest.mark.system

MODEL = "SmolLM2-135M-Instruct"
RAW = golden("greedy")[1]
CHAT = next(line for line in golden("greedy") if line["kind"] == "chat")


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Any]:
    # `Any`: the tests also send what the client's types do not allow.
    with openai.OpenAI(base_url=service.base_url, api_key="none", max_retries=0) as client:
        yield client


def messages(line: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": line["prompt"]}]


# -- answers ----------------------------------------------------------------------------------------


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_completion(client: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt=RAW["text"], temperature=0, max_tokens=10)
    assert RAW["output_text"].startswith(answer.choices[0].text)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(RAW["prompt_token_ids"])
    assert answer.usage.completion_tokens == 10
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 10


def test_completions_end_after_16_tokens_by_default(client: Any) -> None:
    answer = client.completions.create(model=MODEL, prompt=RAW["text"], temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_streamed_completion_equals_the_whole_one(client: Any) -> None:
    request: dict[str, Any] = {
        "model": MODEL,
        "prompt": RAW["text"],
        "max_tokens": 8,
        "seed": 5,
        "n": 2,
        "logprobs": 2,
        "stop": [" the "],
    }
    whole = client.completions.create(**request)
    options = {"include_usage": True}
    chunks = list(client.completions.create(**request, stream=True, stream_options=options))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [p.finish_reason for p in parts if p.finish_reason] == [choice.finish_reason]
        scores = [part.logprobs for part in parts if part.logprobs]
        assert choice.logprobs is not None
        joined = [value for score in scores for value in score.token_logprobs or []]
        # Batches of other sizes, when a sample ends earlier, sum in another order.
        assert joined == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
        assert [t for score in scores for t in score.tokens or []] == choice.logprobs.tokens


def test_chat(client: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=messages(CHAT), temperature=0, max_tokens=10
    )
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert CHAT["output_text"].startswith(message.content)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(CHAT["prompt_token_ids"])


def test_streamed_chat(client: Any) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages(CHAT),
        temperature=0,
        max_completion_tokens=10,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert deltas[0].delta.role == "assistant"
    assert CHAT["output_text"].startswith("".join(d.delta.content or "" for d in deltas))
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10


def test_chat_logprobs(client: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages(CHAT),
        temperature=0,
        max_tokens=5,
        logprobs=True,
        top_logprobs=3,
    )
    scores = answer.choices[0].logprobs
    assert scores is not None and scores.content is not None
    assert "".join(score.token for score in scores.content) == answer.choices[0].message.content
    for score, expected in zip(scores.content, CHAT["logprobs"], strict=False):
        assert abs(score.logprob - expected) < 1e-3
        assert len(score.top_logprobs) == 3
        assert score.top_logprobs[0].token == score.token
        assert bytes(score.bytes or []).decode() == score.token


def test_n_samples_and_seed(client: Any) -> None:
    def ask(seed: int) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt=RAW["text"], max_tokens=4, n=3, seed=seed
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    first = ask(1)
    assert len(set(first)) == 3
    assert ask(1) == first
    assert ask(2) != first


def test_stop(client: Any) -> None:
    word = RAW["output_text"].split()[5]
    request: dict[str, Any] = {"model": MODEL, "prompt": RAW["text"], "temperature": 0}
    answer = client.completions.create(**request, max_tokens=40, stop=word)
    assert answer.choices[0].text == RAW["output_text"].split(word)[0]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == word
    extra = {"include_stop_str_in_output": True}
    kept = client.completions.create(**request, max_tokens=40, stop=[word], extra_body=extra)
    assert kept.choices[0].text == RAW["output_text"].split(word)[0] + word


def test_lists_of_prompts_are_prompt_major(client: Any) -> None:
    texts = [line["text"] for line in golden("greedy")[:2]]
    ids = [line["prompt_token_ids"] for line in golden("greedy")[:2]]

    def ask(prompt: Any, n: int = 1) -> Completion:
        return client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=3, n=n)

    one_by_one = [ask(text).choices[0].text for text in texts]
    for prompts in (texts, ids):
        answer = ask(prompts, n=2)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        expected = [text for text in one_by_one for _ in range(2)]
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert answer.usage.completion_tokens == 12
    assert ask(ids[0]).choices[0].text == one_by_one[0]


def test_token_ids_in_the_answer(client: Any) -> None:
    answer = client.completions.create(
        model=MODEL,
        prompt=RAW["text"],
        temperature=0,
        max_tokens=6,
        extra_body={"return_token_ids": True},
    )
    choice: Any = answer.choices[0]
    assert choice.prompt_token_ids == RAW["prompt_token_ids"]
    assert choice.token_ids == RAW["output_token_ids"][:6]


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_with_logprobs(client: Any, max_tokens: int) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=RAW["text"], temperature=0, max_tokens=max_tokens, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text.startswith(RAW["text"])
    scores = choice.logprobs
    assert scores is not None
    assert scores.tokens and scores.text_offset and scores.token_logprobs
    assert len(scores.tokens) == len(RAW["prompt_token_ids"]) + max_tokens
    assert scores.token_logprobs[0] is None
    assert all(value is not None and value < 0 for value in scores.token_logprobs[1:])
    for token, offset in zip(scores.tokens, scores.text_offset, strict=True):
        assert choice.text[offset : offset + len(token)] == token


# -- errors -----------------------------------------------------------------------------------------


def test_an_unknown_model_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"suffix": "x"}, "suffix"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
        ({"extra_body": {"use_beam_search": True, "n": 2, "top_k": 5}}, "top_k"),
        ({"extra_body": {"frobnicate": 1}}, "frobnicate"),
    ],
)
def test_bad_requests_are_typed(client: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": MODEL, "prompt": "x", **fields})
    assert caught.value.param == param
    assert param in caught.value.message


def test_tools_and_images_are_refused(client: Any) -> None:
    tool: Any = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(openai.BadRequestError, match="tools is not offered"):
        client.chat.completions.create(model=MODEL, messages=messages(CHAT), tools=[tool])
    image: Any = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
    with pytest.raises(openai.BadRequestError, match=r"image_url.* is not offered"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": image}])


def test_unknown_paths_and_bodies_give_the_error_object(service: Service) -> None:
    status, body = get(f"{service.base_url}/embeddings")
    assert status == 404
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    request = urllib.request.Request(f"{service.base_url}/completions", b"{nonsense")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    assert caught.value.code == 400
    assert "not valid JSON" in json.load(caught.value)["error"]["message"]


# -- leaving, probes --------------------------------------------------------------------------------


def test_closing_a_stream_frees_its_request(client: Any, service: Service) -> None:
    stream = client.completions.create(
        model=MODEL, prompt=RAW["text"], max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    service.wait_until_idle()


def test_probes_and_metrics(client: Any, service: Service) -> None:
    assert get(f"{service.http}/health")[0] == 200
    assert get(f"{service.http}/ready")[0] == 200
    client.completions.create(model=MODEL, prompt="x", max_tokens=2)
    _, metrics = get(f"{service.http}/metrics")
    for name in (
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:request_time_per_output_token_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        'octavo_requests_total{finished_reason="length"}',
        "octavo_generation_tokens_total",
    ):
        assert name in metrics
    wait_for(
        lambda: "octavo_live_requests 0.0" in get(f"{service.http}/metrics")[1],
        "the gateway holds no request",
        10,
    )
