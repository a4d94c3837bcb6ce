"""A request as its client sees it: deltas, prompt scores, usage, and its end."""

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from octavo.frontend.errors import RequestError
from octavo.frontend.link import Link
from octavo.frontend.live import LiveRequest, SampleProgress, Score
from octavo.frontend.metrics import Metrics
from octavo.frontend.requests import GenerateCall, SampleSoFar, SamplingRequest, Usage
from octavo.frontend.sample import Delta, SampleText, TextRules, TokenScore
from octavo.proto.plan import Beams, Sampling


@dataclass(frozen=True)
class PreparedRequest:
    """A call that is checked and tokenized."""

    call: GenerateCall
    prompt: Sequence[int]
    max_tokens: int  # of each sample
    sampling: Sampling
    rules: TextRules
    offsets: Sequence[int]  # of each prompt token's text in an echo; empty where nothing is echoed
    arrival: float  # Unix seconds


class Stream:
    """One request as its client sees it. Listens to the link, gives out deltas, counts usage.

    With `best_of` above `n` there is nothing to take until all samples are finished.
    """

    def __init__(self, request: PreparedRequest, link: Link, metrics: Metrics) -> None:
        call = request.call
        self.prompt_ids = request.prompt
        self.seed = request.sampling.seed
        self.prompt_scores: list[TokenScore] = []  # complete before the first delta
        self._live = _live_request(self, request)
        self._link = link
        self._metrics = metrics
        self._samples = [SampleText(i, request.rules) for i in range(call.sampling.num_samples)]
        self._n = call.sampling.n
        # What the client gets of the samples; empty until the best are known.
        self._choices = self._samples if self._n == len(self._samples) else []
        self._offsets = request.offsets
        self._stop_token_ids = frozenset(call.sampling.stop_token_ids)
        self._wants_scores = call.sampling.prompt_logprobs is not None
        self._cached = 0
        self._error: RequestError | None = None
        self._wake: Callable[[], None] = lambda: None
        self._born = time.monotonic()
        self._started = False
        self._first: float | None = None
        self._ended = False
        if self._wants_scores:
            self.prompt_scores.append(TokenScore(self.prompt_ids[0], None, (), 0))
        if call.resume:
            self._resume(call.resume)

    def start(self, wake: Callable[[], None]) -> None:
        """Sends the request out; `wake` is called whenever there is something to take."""
        self._wake = wake
        if self._live.max_tokens == 0 and not self._wants_scores:
            for i in range(len(self._samples)):  # there is nothing to compute
                self.on_finish(i, "length", None, None)
            return
        self._live.finish_ended_samples()
        if not self._live.done:
            self._link.open(self._live)
        else:  # a stop string was complete in what is continued
            self._end_if_finished()
        self._wake()

    def _resume(self, samples: Sequence[SampleSoFar]) -> None:
        """Continues a stream whose client has these outputs."""
        progress = []
        for text, sample in zip(self._samples, samples, strict=True):
            text.resume(sample.tokens, sample.finish_reason)
            progress.append(SampleProgress(list(sample.tokens), text.finish_reason))
        self._live.resume(progress)

    def take(self) -> list[Delta]:
        """What is new. Raises RequestError if the request failed."""
        if self._error is not None:
            raise self._error
        if self._wants_scores and len(self.prompt_scores) < len(self.prompt_ids):
            return []
        return [delta for sample in self._choices if (delta := sample.take()) is not None]

    @property
    def drained(self) -> bool:
        """Whether every choice's last delta has been taken."""
        return self._ended and bool(self._choices) and all(s.drained for s in self._choices)

    def is_stop_token(self, token: int) -> bool:
        """Whether the client asked to stop at this token, as opposed to the model's EOS tokens."""
        return token in self._stop_token_ids

    def usage(self) -> Usage:
        """Tokens that were generated for samples that are not returned count too."""
        generated = sum(sample.count for sample in self._samples)
        return Usage(len(self.prompt_ids), self._cached, generated)

    @property
    def unread(self) -> int:
        """Tokens of one sample that have come and were not taken, of the sample that has most."""
        return max((sample.unread for sample in self._choices), default=0)

    def end_unread(self) -> None:
        """The client does not read: the request is cancelled, and what waits for it is dropped."""
        waiting = self.unread
        self._link.close(self._live)
        for sample in self._choices:
            sample.drop_unread()
        self.on_failure(
            RequestError(
                "RESOURCE_EXHAUSTED",
                f"the client did not read this stream: {waiting} tokens waited for it, more than the "
                "limit (--max-unread-tokens)",
            )
        )

    def close(self) -> None:
        """Nobody reads on: whatever still runs is cancelled at once. May be called again."""
        self._link.close(self._live)
        self._end("error" if self._error else "abort")

    # -- what the link tells ----------------------------------------------------------------------

    def on_token(self, sample: int, token: int, score: Score | None) -> None:
        if self._first is None:
            self._first = time.monotonic()
            self._metrics.first_token(self._first - self._born)
        if self._samples[sample].push(token, score):
            self._link.finish_sample(self._live, sample, "stop")
            self._end_if_finished()
        self._wake()

    def on_finish(self, sample: int, reason: str, stop_token: int | None, score: float | None) -> None:
        self._samples[sample].finish(reason, score)
        self._end_if_finished()
        self._wake()

    def on_prompt_scores(self, scores: Sequence[Score]) -> None:
        begin = len(self.prompt_scores)
        for i, score in enumerate(scores, start=begin):
            token, offset = self.prompt_ids[i], self._offsets[i] if self._offsets else 0
            self.prompt_scores.append(TokenScore(token, score.logprob, score.top, offset))
        self._wake()

    def on_started(self, cached_tokens: int) -> None:
        self._cached = max(self._cached, cached_tokens)
        if not self._started:
            self._started = True
            self._metrics.queued(time.monotonic() - self._born)

    def on_failure(self, error: RequestError) -> None:
        self._error = error
        self._end("error")
        self._wake()

    def _end_if_finished(self) -> None:
        reasons = [sample.finish_reason for sample in self._samples]
        if all(reasons):
            self._choose()
            self._end("stop" if "stop" in reasons else "length")

    def _choose(self) -> None:
        """Of more samples than are returned, the likeliest per token, best first."""
        if self._choices:
            return
        ranked = sorted(self._samples, key=lambda sample: sample.mean_logprob, reverse=True)
        self._choices = ranked[: self._n]
        for rank, sample in enumerate(self._choices):
            sample.index = rank

    def _end(self, reason: str) -> None:
        """Counts the request, once."""
        if self._ended:
            return
        self._ended = True
        now, usage = time.monotonic(), self.usage()
        longest = max(sample.count for sample in self._samples)
        if self._first is not None and longest > 1 and self._live.beams is None:
            self._metrics.token_pace((now - self._first) / (longest - 1))
        self._metrics.request_ended(reason, usage, now - self._born)


def _live_request(stream: Stream, request: PreparedRequest) -> LiveRequest:
    return LiveRequest(
        stream,
        request.prompt,
        request.sampling,
        request.call.sampling.num_samples,
        request.max_tokens,
        request.arrival,
        request.call.priority,
        request.call.cache_salt,
        _beams(request.call.sampling),
    )


def _beams(sampling: SamplingRequest) -> Beams | None:
    if not sampling.use_beam_search:
        return None
    return Beams(length_penalty=float(sampling.length_penalty), early_stopping=sampling.early_stopping)


class Batch:
    """The streams of one API call, read together. Leaving its context closes them all."""

    def __init__(self, streams: Sequence[Stream], max_unread: int) -> None:
        """`max_unread`: tokens of a sample that may wait while the client does not read."""
        self.streams = streams
        self._max_unread = max_unread
        self._unfinished = dict(enumerate(streams))
        self._has_news = False
        self._reader: asyncio.Future[None] | None = None  # waits for news
        self._is_writing = False  # what was taken is on its way to the client, which may be slow

    def start(self) -> None:
        for stream in self.streams:
            stream.start(functools.partial(self._on_news, stream))

    def _on_news(self, stream: Stream) -> None:
        self._has_news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        # Much that comes at once for a client that reads, such as beams, is no fault of the client.
        if self._is_writing and stream.unread > self._max_unread:
            stream.end_unread()

    async def take(self) -> list[tuple[int, Delta]]:
        """All that is new, each delta with the index of its stream, as soon as there is any.

        Nothing, once all streams are drained. A reader that is slow gets longer deltas, not more of
        them. Raises RequestError when a stream has failed and what the others had is taken.
        """
        self._is_writing = False
        while self._unfinished:
            if not self._has_news:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            self._has_news = False
            if news := self._take_news():
                self._is_writing = True
                return news
        return []

    def _take_news(self) -> list[tuple[int, Delta]]:
        news: list[tuple[int, Delta]] = []
        for i, stream in list(self._unfinished.items()):
            try:
                deltas = stream.take()
            except RequestError:
                if not news:
                    raise
                self._has_news = True  # the failure is
                break
            for delta in deltas:
                news.append((i, delta))
            if stream.drained:
                del self._unfinished[i]
        return news

    def close(self) -> None:
        for stream in self.streams:
            stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
