"""A stream that outlives the gateway it came from: what the client has, and how to go on with it."""

from collections import defaultdict
from dataclasses import dataclass, field

from octavo.v1 import generation_pb2 as pb


@dataclass
class _Sample:
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    chars: int = 0  # of text that came before any token: an echo, which comes again


class Progress:
    """Follows a stream's deltas; makes the request that continues it, and cuts what comes again."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        self._samples: dict[int, _Sample] = defaultdict(_Sample)
        self._surplus: dict[int, int] = {}  # characters still to be cut, by sample
        self._prompt: list[int] = []
        self._seed: int | None = None
        self.is_whole = False  # the last message has come

    @property
    def has_begun(self) -> bool:
        """Whether anything has come."""
        return self._seed is not None

    @property
    def _starts_over(self) -> bool:
        """Beam searches and best_of say nothing before they are done."""
        sampling = self._request.sampling
        return sampling.use_beam_search or sampling.best_of > max(sampling.n, 1)

    def request(self) -> pb.GenerateRequest:
        """What is still to be asked for."""
        if not self.has_begun:
            return self._request
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        assert self._seed is not None
        request.sampling.seed = self._seed
        request.token_ids.ids[:] = self._prompt
        self._surplus = {}
        if self._starts_over or not any(s.token_ids or s.finish_reason for s in self._samples.values()):
            self._surplus = {i: s.chars for i, s in self._samples.items()}
            return request
        for index in range(max(request.sampling.n, 1)):
            sample = self._samples[index]
            request.resume.samples.add(token_ids=sample.token_ids, finish_reason=sample.finish_reason)
            if not sample.token_ids:
                self._surplus[index] = sample.chars
        return request

    def take(self, delta: pb.GenerateDelta) -> pb.GenerateDelta:
        """Notes a delta, and leaves out of it what an earlier stream has brought already."""
        if self.has_begun:
            self._cut_repeats(delta)
        else:
            self._seed, self._prompt = delta.seed, list(delta.prompt_token_ids)
        sample = self._samples[delta.index]
        sample.token_ids += delta.token_ids
        sample.finish_reason = delta.finish_reason or sample.finish_reason
        if not sample.token_ids:
            sample.chars += len(delta.text)
        self.is_whole = delta.HasField("usage")
        return delta

    def _cut_repeats(self, delta: pb.GenerateDelta) -> None:
        surplus = self._surplus.pop(delta.index, 0)
        if surplus:
            if len(delta.text) < surplus:
                self._surplus[delta.index] = surplus - len(delta.text)
            delta.text = delta.text[surplus:]
        if delta.prompt_token_ids:  # the first message of a later stream
            delta.ClearField("prompt_token_ids")
            delta.ClearField("prompt_logprobs")
            delta.ClearField("seed")
