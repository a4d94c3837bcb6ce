"""Takes a `Tokens` message apart: each token, score and finish to its request."""

from collections.abc import Iterator, Mapping

from octavo.frontend.live import LiveRequest, Score
from octavo.proto.plan import DrawLogprobs
from octavo.proto.session import PromptScores, Tokens
from octavo.proto.wire import ProtocolError, all_below


def deliver(message: Tokens, live: Mapping[int, LiveRequest], vocab_size: int) -> list[LiveRequest]:
    """Hands everything in `message` to the live requests it is about.

    What belongs to a request that is gone, to another attempt, or was seen before is dropped.
    Returns the requests that have a gap and need a new attempt.

    Raises:
        ProtocolError: the parts of the message do not fit one another; nothing was delivered.
    """
    _check(message, vocab_size)
    gaps: dict[int, LiveRequest] = {}
    _deliver_starts(message, live)
    _deliver_prompt_scores(message, live, gaps)
    _deliver_tokens(message, live, gaps)
    for finish in message.finishes:
        request = live.get(finish.request)
        if request is None or request.attempt != finish.attempt or finish.request in gaps:
            continue
        if 0 <= finish.sample < len(request.samples):
            request.take_finish(finish.sample, finish.reason, finish.stop_token, finish.score)
    return list(gaps.values())


def _check(message: Tokens, vocab_size: int) -> None:
    count = len(message.tokens)
    for name in ("requests", "attempts", "samples", "offsets"):
        if len(getattr(message, name)) != count:
            raise ProtocolError(f"tokens.{name}: not as long as tokens.tokens")
    if not len(message.started) == len(message.started_attempts) == len(message.cached):
        raise ProtocolError("tokens.started: not as long as its partners")
    if not all_below(message.tokens, vocab_size):
        raise ProtocolError("tokens.tokens: an id is outside the vocabulary")
    message.finishes.validate()
    if message.logprobs is not None:
        _check_logprobs(message.logprobs, count, vocab_size)
    for scores in message.prompt_scores:
        _check_prompt_scores(scores, vocab_size)


def _check_logprobs(scores: DrawLogprobs, count: int, vocab_size: int) -> None:
    draws, counts = scores.draws, scores.top_counts
    if not len(draws) == len(scores.logprobs) == len(counts):
        raise ProtocolError("tokens.logprobs.draws: not as long as its partners")
    if len(counts) and int(counts.min()) < 0:
        raise ProtocolError("tokens.logprobs.top_counts: negative")
    if not len(scores.top_ids) == len(scores.top_logprobs) == int(counts.sum()):
        raise ProtocolError("tokens.logprobs.top_ids: not as long as top_counts says")
    if not all_below(draws, count):
        raise ProtocolError("tokens.logprobs.draws: out of range")
    if not all_below(scores.top_ids, vocab_size):
        raise ProtocolError("tokens.logprobs.top_ids: an id is outside the vocabulary")


def _check_prompt_scores(scores: PromptScores, vocab_size: int) -> None:
    size = len(scores.logprobs) * scores.top_count
    if scores.top_count < 0 or not len(scores.top_ids) == len(scores.top_logprobs) == size:
        raise ProtocolError("tokens.prompt_scores.top_ids: not as long as top_count says")
    if not all_below(scores.top_ids, vocab_size):
        raise ProtocolError("tokens.prompt_scores.top_ids: an id is outside the vocabulary")
    if scores.start < 1:
        raise ProtocolError("tokens.prompt_scores.start: below 1")


def _deliver_starts(message: Tokens, live: Mapping[int, LiveRequest]) -> None:
    starts = (message.started.tolist(), message.started_attempts.tolist(), message.cached.tolist())
    for number, attempt, cached in zip(*starts, strict=True):
        request = live.get(number)
        if request and request.attempt == attempt:
            request.listener.on_started(cached)


def _deliver_prompt_scores(
    message: Tokens, live: Mapping[int, LiveRequest], gaps: dict[int, LiveRequest]
) -> None:
    for part in message.prompt_scores:
        request = live.get(part.request)
        if request is None or request.attempt != part.attempt:
            continue
        if not request.take_prompt_scores(part.start, _prompt_scores(part)):
            gaps[part.request] = request


def _prompt_scores(part: PromptScores) -> list[Score]:
    k, ids, values = part.top_count, part.top_ids.tolist(), part.top_logprobs.tolist()
    tops = [
        list(zip(ids[i : i + k], values[i : i + k], strict=True)) for i in range(0, len(ids), k or 1)
    ]
    logprobs = part.logprobs.tolist()
    return [Score(logprob, tops[i] if k else ()) for i, logprob in enumerate(logprobs)]


def _deliver_tokens(
    message: Tokens, live: Mapping[int, LiveRequest], gaps: dict[int, LiveRequest]
) -> None:
    scores = dict(_draw_scores(message.logprobs)) if message.logprobs else {}
    columns = (message.requests, message.attempts, message.samples, message.offsets, message.tokens)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for i, (number, attempt, sample, offset, token) in enumerate(rows):
        request = live.get(number)
        if request is None or request.attempt != attempt or number in gaps:
            continue
        if not 0 <= sample < len(request.samples):
            continue
        if not request.take_token(sample, offset, token, scores.get(i)):
            gaps[number] = request


def _draw_scores(logprobs: DrawLogprobs) -> Iterator[tuple[int, Score]]:
    ids, values = logprobs.top_ids.tolist(), logprobs.top_logprobs.tolist()
    rows = zip(
        logprobs.draws.tolist(), logprobs.logprobs.tolist(), logprobs.top_counts.tolist(), strict=True
    )
    begin = 0
    for draw, logprob, count in rows:
        end = begin + count
        yield draw, Score(logprob, list(zip(ids[begin:end], values[begin:end], strict=True)))
        begin = end
