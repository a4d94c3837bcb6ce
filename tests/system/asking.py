"""Asks a running service over gRPC and collects what it streams."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo.v1 import generation_pb2 as pb

TIMEOUT = 120.0  # seconds


@dataclass
class Sample:
    """One sample of an answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str = ""
    score: float | None = None


@dataclass
class Answer:
    """What a call gave, streamed or whole."""

    samples: dict[int, Sample] = field(default_factory=lambda: defaultdict(Sample))
    prompt_logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    usage: pb.Usage | None = None
    seed: int = 0
    messages: int = 0

    def values(self) -> list[tuple[str, list[int], str, str]]:
        """What must not depend on how the answer travelled."""
        return [
            (s.text, s.token_ids, s.finish_reason, s.stop_reason)
            for _, s in sorted(self.samples.items())
        ]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Usage: prompt, cached and completion tokens."""
        assert self.usage is not None
        return self.usage.prompt_tokens, self.usage.cached_tokens, self.usage.completion_tokens


def request(prompt: str | list[int], echo: bool = False, **sampling: Any) -> pb.GenerateRequest:
    """A request; a string prompt is text, a list token ids."""
    parts = {"text": prompt} if isinstance(prompt, str) else {"token_ids": pb.TokenIds(ids=prompt)}
    return pb.GenerateRequest(sampling=pb.SamplingParams(**sampling), echo=echo, **parts)


def stream(stub: Any, message: pb.GenerateRequest) -> Answer:
    """The answer through `Generate`."""
    return collect(stub.Generate(message, timeout=TIMEOUT))


def collect(deltas: Iterable[pb.GenerateDelta]) -> Answer:
    answer = Answer()
    for delta in deltas:
        answer.messages += 1
        _add(answer.samples[delta.index], delta)
        answer.prompt_logprobs += delta.prompt_logprobs
        answer.seed = delta.seed or answer.seed
        if delta.HasField("usage"):
            assert answer.usage is None, "usage came twice"
            answer.usage = delta.usage
    return answer


def _add(sample: Sample, delta: pb.GenerateDelta) -> None:
    assert not sample.finish_reason or not (delta.text or delta.token_ids), "text after the finish"
    sample.text += delta.text
    sample.token_ids += delta.token_ids
    sample.logprobs += delta.logprobs
    sample.finish_reason = delta.finish_reason or sample.finish_reason
    sample.stop_reason = delta.stop_reason or sample.stop_reason
    if delta.HasField("score"):
        sample.score = delta.score


def whole(stub: Any, message: pb.GenerateRequest) -> Answer:
    """The answer through `GenerateUnary`."""
    reply = stub.GenerateUnary(message, timeout=TIMEOUT)
    answer = Answer(usage=reply.usage, seed=reply.seed, prompt_logprobs=list(reply.prompt_logprobs))
    for choice in reply.choices:
        answer.samples[choice.index] = Sample(
            choice.text,
            list(choice.token_ids),
            list(choice.logprobs),
            choice.finish_reason,
            choice.stop_reason,
            choice.score if choice.HasField("score") else None,
        )
    return answer
