"""A request that the control plane is working on, as the gateway keeps it.

It holds what a new attempt needs: the request itself and what each sample has produced. The text
side belongs to the `Listener`, which hears of every token exactly once and in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from octavo.frontend.errors import RequestError
from octavo.proto.plan import Beams, Sampling
from octavo.proto.session import SampleState, Submit
from octavo.proto.wire import Int32s, int32s


@dataclass(slots=True)
class Score:
    """A token's log-probability and those of the best tokens at its position, best first."""

    logprob: float
    top: Sequence[tuple[int, float]] = ()


class Listener(Protocol):
    """Hears what happens to a request. Called on the event loop; must not block."""

    def on_token(self, sample: int, token: int, score: Score | None) -> None: ...

    def on_finish(
        self, sample: int, reason: str, stop_token: int | None, score: float | None
    ) -> None: ...

    def on_prompt_scores(self, scores: Sequence[Score]) -> None: ...

    def on_started(self, cached_tokens: int) -> None: ...

    def on_failure(self, error: RequestError) -> None: ...


@dataclass(slots=True)
class SampleProgress:
    """Output tokens so far, and the finish reason, empty while unfinished."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    stop_token: int | None = None
    score: float | None = None  # of a beam search's hypothesis


class LiveRequest:
    """Owner of a request's attempt number and of its samples' progress.

    The hypotheses of a beam search are kept here until all are whole: only then does the listener
    hear of them, so that a search that has to start over takes nothing back.
    """

    def __init__(
        self,
        listener: Listener,
        prompt: Sequence[int],
        sampling: Sampling,
        n: int,
        max_tokens: int,
        arrival: float,
        priority: int = 0,
        cache_salt: str = "",
        beams: Beams | None = None,
    ) -> None:
        """`arrival` in Unix seconds; with `beams` a search that is `n` wide."""
        self.listener = listener
        self.prompt: Int32s = int32s(prompt)
        self.sampling = sampling
        self.samples = [SampleProgress() for _ in range(n)]
        self.max_tokens = max_tokens
        self.arrival = arrival
        self.priority = priority
        self.cache_salt = cache_salt
        self.beams = beams
        self.number = 0  # given by the link; 0 before
        self.attempt = 0
        self.sent = False  # whether this attempt has gone out
        self.received = 0  # tokens, over all samples
        self._scored = 1  # the prompt position whose score is to come next
        eos = () if sampling.ignore_eos else sampling.eos_token_ids.tolist()
        self._endings = frozenset([*sampling.stop_token_ids.tolist(), *eos])

    @property
    def done(self) -> bool:
        return all(sample.finish for sample in self.samples)

    def resume(self, samples: Sequence[SampleProgress]) -> None:
        """Begins with what was generated elsewhere; the listener has heard of it."""
        self.samples = list(samples)
        self.received = sum(len(sample.tokens) for sample in samples)

    def next_attempt(self) -> None:
        """From here on, answers to what was sent before count no more.

        Samples whose last token has come but whose finish is lost are finished here, so that what
        is left is what still has to be computed; `done` may be true afterwards. A beam search starts
        over.
        """
        if self.sent:
            self.attempt += 1
            self.sent = False
        if self.beams is None:
            self.finish_ended_samples()
        else:
            self.samples = [SampleProgress() for _ in self.samples]
            self.received = 0

    def finish_ended_samples(self) -> None:
        """Finishes samples that have their last token already."""
        for index, sample in enumerate(self.samples):
            if sample.tokens and sample.tokens[-1] in self._endings:
                self.take_finish(index, "stop", sample.tokens[-1])
            elif 0 < self.max_tokens <= len(sample.tokens):
                self.take_finish(index, "length", None)

    def submit(self, gateway: int) -> Submit:
        """The message that asks for what is still missing."""
        return Submit(
            gateway=gateway,
            request=self.number,
            attempt=self.attempt,
            arrival=self.arrival,
            priority=self.priority,
            prompt=self.prompt,
            samples=[SampleState(tokens=int32s(s.tokens), finish=s.finish) for s in self.samples],
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            cache_salt=self.cache_salt,
            beams=self.beams,
        )

    def take_token(self, index: int, offset: int, token: int, score: Score | None) -> bool:
        """Passes a new token on; one that was seen already is dropped. False: tokens are missing."""
        sample = self.samples[index]
        missing = offset - len(sample.tokens)
        if missing < 0 or sample.finish:
            return True
        if missing > 0:
            return False
        sample.tokens.append(token)
        self.received += 1
        if self.beams is None:
            self.listener.on_token(index, token, score)
        return True

    def take_finish(
        self, index: int, reason: str, stop_token: int | None, score: float | None = None
    ) -> None:
        sample = self.samples[index]
        if sample.finish:
            return
        sample.finish, sample.stop_token, sample.score = reason, stop_token, score
        if self.beams is None:
            self.listener.on_finish(index, reason, stop_token, score)
        elif self.done:
            self._tell_hypotheses()

    def _tell_hypotheses(self) -> None:
        for index, sample in enumerate(self.samples):
            for token in sample.tokens:
                self.listener.on_token(index, token, None)
            self.listener.on_finish(index, sample.finish, sample.stop_token, sample.score)

    def take_prompt_scores(self, start: int, scores: Sequence[Score]) -> bool:
        """Passes on those not seen before. False: scores are missing."""
        if start > self._scored:
            return False
        fresh = scores[self._scored - start : len(self.prompt) - start]
        if fresh:
            self._scored += len(fresh)
            self.listener.on_prompt_scores(fresh)
        return True
