"""Beam search, with the results of Hugging Face `generate`.

The worker gives, for each beam, its best continuations; here the beams of the next step are chosen,
and the finished hypotheses kept. Follows the search of transformers 5 (`_beam_search`): of the best
max(2, 1 + number of EOS ids) * width continuations of all beams, the best `width` that do not end go
on, and those among the first `width` that end are hypotheses.
"""

from dataclasses import dataclass, field

import numpy as np

from octavo.proto.plan import Beams
from octavo.proto.wire import Float32s, Int32s

_NEVER = np.float32(-1.0e9)  # the score of what does not exist


@dataclass(frozen=True)
class Hypothesis:
    """A finished beam."""

    score: float  # sum of log-probabilities / length ** length_penalty
    tokens: Int32s  # outputs
    stopped: bool  # by an EOS, not by length


@dataclass(frozen=True)
class Continuation:
    """A beam of the next step: a beam of this one and a token more."""

    parent: int
    token: int


@dataclass
class BeamSearch:
    """The search of one request. Lengths count output tokens."""

    beams: Beams
    width: int
    max_length: int
    stops: frozenset[int]
    length: int = 0
    scores: Float32s = field(default_factory=lambda: np.zeros(1, dtype=np.float32))  # of the beams
    finished: list[Hypothesis] = field(default_factory=list)  # best first, at most `width`
    done: bool = False
    order: list[int] = field(default_factory=lambda: [0])  # beam i is this sample
    answers: dict[int, tuple[Int32s, Float32s]] = field(default_factory=dict)  # by sample

    def answer(self, sample: int, ids: Int32s, logprobs: Float32s) -> None:
        """Takes a beam's best continuations. Beams may answer in different plans."""
        if sample in self.order and len(ids) == self.num_candidates:
            self.answers[sample] = (ids, logprobs)

    def forget_answers(self) -> None:
        """The beams are preempted, and will be asked again."""
        self.answers.clear()

    @property
    def has_all_answers(self) -> bool:
        return len(self.answers) == len(self.order)

    @property
    def num_candidates(self) -> int:
        """Continuations that the worker must give for each beam."""
        return candidates_for(self.width, len(self.stops))

    def step(self, histories: list[Int32s]) -> list[Continuation]:
        """Chooses the next beams from all answers.

        Args:
            histories: the outputs of each beam so far, in `order`.

        Returns:
            `width` continuations, best first; nothing once the search is done.
        """
        ids = np.stack([self.answers[sample][0] for sample in self.order])
        logprobs = np.stack([self.answers[sample][1] for sample in self.order])
        self.answers.clear()
        totals = (self.scores[:, None] + logprobs).reshape(-1)
        best = np.argsort(-totals, kind="stable")[: self.num_candidates]
        parents, tokens, totals = best // ids.shape[1], ids.reshape(-1)[best], totals[best]
        self.length += 1
        is_stop = np.isin(tokens, list(self.stops))
        ends = is_stop | (self.length >= self.max_length)
        self._keep_finished(parents, tokens, totals, ends, is_stop, histories)
        going = totals + np.where(ends, _NEVER, np.float32(0))
        order = np.argsort(-going, kind="stable")[: self.width]
        self.scores = going[order]
        self.done = bool(ends.all()) or self._is_full() or not self._can_improve()
        if self.done:
            return []
        return [Continuation(int(parents[index]), int(tokens[index])) for index in order]

    def _keep_finished(
        self,
        parents: Int32s,
        tokens: Int32s,
        totals: Float32s,
        ends: np.ndarray[tuple[int], np.dtype[np.bool_]],
        is_stop: np.ndarray[tuple[int], np.dtype[np.bool_]],
        histories: list[Int32s],
    ) -> None:
        if self._is_full():
            return
        scale = float(self.length) ** self.beams.length_penalty
        for index in np.flatnonzero(ends[: self.width]).tolist():
            outputs = np.append(histories[int(parents[index])], tokens[index])
            score = float(totals[index]) / scale
            self.finished.append(Hypothesis(score, outputs.astype(np.int32), bool(is_stop[index])))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.width :]

    def _is_full(self) -> bool:
        return self.beams.early_stopping == "true" and len(self.finished) >= self.width

    def _can_improve(self) -> bool:
        """Whether the best beam might still end above the worst hypothesis that is kept."""
        if len(self.finished) < self.width:
            return True
        length = self.length
        if self.beams.early_stopping == "never" and self.beams.length_penalty > 0:
            length = self.max_length
        best = float(self.scores[0]) / float(length) ** self.beams.length_penalty
        return bool(best > self.finished[-1].score)


def candidates_for(width: int, num_stops: int) -> int:
    """Best continuations of one beam among which the next step is surely found."""
    return max(2, 1 + num_stops) * width
