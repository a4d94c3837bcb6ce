"""What an iteration has to tell the gateways, gathered and split into one message for each."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.controlplane.beam import Hypothesis
from octavo.controlplane.sequence import SequenceGroup
from octavo.controlplane.slots import Fields
from octavo.proto.plan import DrawLogprobs, PromptLogprobs
from octavo.proto.session import FINISH_REASONS, Failure, Finishes, PromptScores, Tokens
from octavo.proto.wire import Int32s, int32s

# request, attempt, sample, index of the reason, stop token, score
_Ending = tuple[int, int, int, int, int | None, float | None]
_REASONS = {reason: index for index, reason in enumerate(FINISH_REASONS)}
NO_FINISHES = Finishes()


@dataclass
class _Rows:
    """Drawn tokens with where they belong, as parallel arrays of one result."""

    gateways: NDArray[np.int64]
    fields: Fields  # of their slots, before they are appended
    tokens: Int32s
    draws: NDArray[np.bool_]  # which of the result's draws they are
    logprobs: DrawLogprobs | None

    def by_gateway(self) -> dict[int, Any]:
        """What selects each gateway's entries of the arrays."""
        gateways = self.gateways
        if not len(gateways):
            return {}
        first = int(gateways[0])
        if (gateways == first).all():
            return {first: slice(None)}
        return {int(gateway): np.flatnonzero(gateways == gateway) for gateway in np.unique(gateways)}


@dataclass
class _News:
    """What one gateway hears besides tokens."""

    finishes: list[_Ending] = field(default_factory=list)
    scores: list[PromptScores] = field(default_factory=list)
    started: list[tuple[int, int, int]] = field(default_factory=list)  # request, attempt, cached tokens
    hypotheses: list[tuple[SequenceGroup, int, Int32s]] = field(default_factory=list)  # rank, tokens


@dataclass
class Outputs:
    """Filled by the scheduler, emptied by the server."""

    rows: _Rows | None = None
    news: dict[int, _News] = field(default_factory=lambda: defaultdict(_News))  # by gateway
    failures: list[tuple[SequenceGroup, str, str]] = field(default_factory=list)
    ended: list[SequenceGroup] = field(default_factory=list)

    def add_tokens(
        self,
        gateways: NDArray[np.int64],
        fields: Fields,
        tokens: Int32s,
        draws: NDArray[np.bool_],
        logprobs: DrawLogprobs | None,
    ) -> None:
        """Tokens just drawn.

        Args:
            gateways: whom each is for.
            fields: of their slots, before they are appended.
            draws: which of the result's draws they are.
        """
        self.rows = _Rows(gateways, fields, tokens, draws, logprobs)

    def add_finish(
        self,
        group: SequenceGroup,
        sample: int,
        reason: str,
        stop_token: int | None,
        score: float | None = None,
    ) -> None:
        ending = (group.id.request, group.attempt, sample, _REASONS[reason], stop_token, score)
        self.news[group.id.gateway].finishes.append(ending)

    def add_hypotheses(self, group: SequenceGroup, hypotheses: list[Hypothesis]) -> None:
        """The results of a beam search: the best becomes sample 0, whole and finished."""
        for rank, hypothesis in enumerate(hypotheses):
            self.news[group.id.gateway].hypotheses.append((group, rank, hypothesis.tokens))
            reason = "stop" if hypothesis.stopped else "length"
            stop_token = int(hypothesis.tokens[-1]) if hypothesis.stopped else None
            self.add_finish(group, rank, reason, stop_token, hypothesis.score)

    def add_prompt_scores(self, group: SequenceGroup, part: PromptLogprobs) -> None:
        scores = PromptScores(
            request=group.id.request,
            attempt=group.attempt,
            start=part.start,
            logprobs=part.logprobs,
            top_count=part.top_count,
            top_ids=part.top_ids,
            top_logprobs=part.top_logprobs,
        )
        self.news[group.id.gateway].scores.append(scores)

    def add_started(self, group: SequenceGroup, cached_tokens: int) -> None:
        started = (group.id.request, group.attempt, cached_tokens)
        self.news[group.id.gateway].started.append(started)

    def add_failure(self, group: SequenceGroup, code: str, reason: str) -> None:
        if group.prefix is None:
            self.failures.append((group, code, reason))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return self.rows is None and not (self.news or self.failures or self.ended)

    @property
    def ended_prefixes(self) -> list[SequenceGroup]:
        """Ended groups that computed a registered prefix."""
        return [group for group in self.ended if group.prefix is not None]

    def token_messages(self, controlplane: int) -> list[tuple[int, Tokens]]:
        """One message for each gateway that has anything to hear."""
        drawn = {} if self.rows is None else self.rows.by_gateway()
        gateways = sorted({*self.news, *drawn}) if self.news else drawn
        return [(to, self._message(controlplane, to, drawn.get(to))) for to in gateways]

    def failure_messages(self, controlplane: int) -> list[tuple[int, Failure]]:
        return [
            (
                group.id.gateway,
                Failure(
                    controlplane=controlplane,
                    request=group.id.request,
                    attempt=group.attempt,
                    code=code,
                    reason=reason,
                ),
            )
            for group, code, reason in self.failures
        ]

    def _message(self, controlplane: int, gateway: int, mine: Any) -> Tokens:
        """
        Args:
            mine: what selects the gateway's rows; None: it has none.
        """
        message = Tokens(controlplane=controlplane, finishes=NO_FINISHES)
        if self.rows is not None and mine is not None:
            _fill_rows(message, self.rows, mine)
        if gateway in self.news:
            _add_news(message, self.news[gateway])
        return message


def _add_news(message: Tokens, news: _News) -> None:
    message.prompt_scores = news.scores
    if news.finishes:
        message.finishes = _columns(news.finishes)
    if news.started:
        started = int32s(news.started).reshape(-1, 3)
        message.started, message.started_attempts, message.cached = started.T
    for group, rank, tokens in news.hypotheses:
        _append_rows(message, group, rank, tokens)


def _columns(endings: list[_Ending]) -> Finishes:
    requests, attempts, samples, reasons, stop_tokens, scores = zip(*endings, strict=True)
    return Finishes(
        requests=int32s(requests),
        attempts=int32s(attempts),
        samples=int32s(samples),
        reasons=int32s(reasons),
        stop_tokens=list(stop_tokens),
        scores=list(scores),
    )


def _fill_rows(message: Tokens, rows: _Rows, mine: Any) -> None:
    fields = rows.fields
    message.requests = fields.request[mine]
    message.attempts = fields.attempt[mine]
    message.samples = fields.sample[mine]
    message.offsets = (fields.known - fields.prompt_len)[mine]
    message.tokens = rows.tokens[mine]
    if rows.logprobs is not None:
        message.logprobs = _select_logprobs(rows.logprobs, np.flatnonzero(rows.draws)[mine])


def _append_rows(message: Tokens, group: SequenceGroup, rank: int, tokens: Int32s) -> None:
    """All tokens of one hypothesis, behind the others."""
    count = len(tokens)
    columns = {
        "requests": np.full(count, group.id.request),
        "attempts": np.full(count, group.attempt),
        "samples": np.full(count, rank),
        "offsets": np.arange(count),
        "tokens": tokens,
    }
    for name, column in columns.items():
        setattr(message, name, int32s(np.concatenate([getattr(message, name), column])))


def _select_logprobs(logprobs: DrawLogprobs, draws: Int32s) -> DrawLogprobs | None:
    """The entries for these draws, renumbered: entry i is about draws[i]."""
    wanted = {int(draw): index for index, draw in enumerate(draws)}
    ends = np.cumsum(logprobs.top_counts)
    kept = [row for row, draw in enumerate(logprobs.draws) if int(draw) in wanted]
    if not kept:
        return None
    tops = np.concatenate([np.arange(ends[row] - logprobs.top_counts[row], ends[row]) for row in kept])
    return DrawLogprobs(
        draws=int32s([wanted[int(logprobs.draws[row])] for row in kept]),
        logprobs=logprobs.logprobs[kept],
        top_counts=logprobs.top_counts[kept],
        top_ids=logprobs.top_ids[tops],
        top_logprobs=logprobs.top_logprobs[tops],
    )
