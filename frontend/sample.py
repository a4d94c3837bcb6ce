"""The text side of one sample: tokens in, deltas out."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.frontend.detokenizer import Detokenizer
from octavo.frontend.live import Score
from octavo.frontend.requests import SamplingRequest
from octavo.frontend.stops import StopMatcher
from octavo.frontend.tokenizer import Vocabulary


@dataclass(slots=True)
class TokenScore:
    """A token's log-probability and where its text begins.

    `logprob` is None for the first token of a prompt, which nothing predicts. `text_offset` counts
    the characters before the token's text in the sample's text, an echoed prompt included.
    """

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]]
    text_offset: int


@dataclass(slots=True)
class Delta:
    """What a sample has produced since its last delta."""

    index: int
    text: str
    token_ids: list[int]
    scores: list[TokenScore]
    finish_reason: str = ""  # "stop" or "length", in the last delta of the sample
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    score: float | None = None  # of a beam search's hypothesis, in the last delta


@dataclass(frozen=True)
class TextRules:
    """How the tokens of a request's samples become text. Shared by its samples."""

    vocabulary: Vocabulary
    sampling: SamplingRequest
    ending_ids: frozenset[int]  # tokens that end a sample, and are not part of its text
    prompt: Sequence[int] = ()
    echo: str = ""  # goes before the text of each sample


class SampleText:
    """Decodes one sample's tokens, looks for its stop strings, and collects what is new."""

    def __init__(self, index: int, rules: TextRules) -> None:
        sampling = rules.sampling
        self.index = index
        self.count = 0  # tokens
        self.logprob = 0.0  # of all tokens together, as far as they came with theirs
        self.finish_reason = ""
        self._score: float | None = None
        self._shows_scores = sampling.logprobs is not None
        self._ending_ids = rules.ending_ids
        self._includes_stop = sampling.include_stop
        self._min_tokens = sampling.min_tokens
        self._stop_reason: str | int | None = None
        self._decoder = Detokenizer(rules.vocabulary, sampling.skip_special_tokens, rules.prompt)
        self._matcher = StopMatcher(sampling.stop, sampling.include_stop) if sampling.stop else None
        # What waits until somebody takes it. Bounded by the sample's own length.
        self._text = [rules.echo] if rules.echo else []
        self._token_ids: list[int] = []
        self._scores: list[TokenScore] = []
        self._chars = len(rules.echo)  # decoded, whether given out or held back
        self.drained = False  # whether the last delta has been taken

    def push(self, token: int, score: Score | None) -> bool:
        """Takes the next token. True: it completed a stop string, and the sample is finished."""
        self.count += 1
        self._token_ids.append(token)
        if score is not None:
            self._push_score(token, score)
        if token in self._ending_ids:
            self._stop_reason = token
            if not self._includes_stop:
                return False
        text = self._decoder.push(token)
        return self._push_text(text) if text else False

    def _push_score(self, token: int, score: Score) -> None:
        self.logprob += score.logprob
        if self._shows_scores:
            self._scores.append(TokenScore(token, score.logprob, score.top, self._chars))

    @property
    def unread(self) -> int:
        """Tokens that wait until somebody takes them."""
        return len(self._token_ids)

    def drop_unread(self) -> None:
        """Nobody will take what waits."""
        self._text, self._token_ids, self._scores = [], [], []

    def resume(self, tokens: Sequence[int], finish_reason: str) -> None:
        """Begins behind what the client has already; an echo was in front of the first token."""
        if not tokens and not finish_reason:
            return
        for token in tokens:
            self.push(token, None)
        self.drop_unread()
        if finish_reason:
            self.finish_reason, self.drained = finish_reason, True

    def finish(self, reason: str, score: float | None = None) -> None:
        """The sample has ended by its length or by an ending token; `score` of a hypothesis."""
        self._score = score
        if self.finish_reason or self._push_text(self._decoder.flush()):
            return
        if self._matcher is not None:
            self._text.append(self._matcher.flush())
        self.finish_reason = reason

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token; 0 for no tokens."""
        return self.logprob / self.count if self.count else 0.0

    def take(self) -> Delta | None:
        """All that is new since the last call; None if nothing is."""
        if not (self._token_ids or self._text or (self.finish_reason and not self.drained)):
            return None
        delta = Delta(self.index, "".join(self._text), self._token_ids, self._scores)
        self.drop_unread()
        if self.finish_reason:
            self.drained = True
            delta.finish_reason, delta.stop_reason = self.finish_reason, self._stop_reason
            delta.score = self._score
        return delta

    def _push_text(self, text: str) -> bool:
        """True: a stop string is complete. None completes within the first `min_tokens` tokens."""
        self._chars += len(text)
        if self._matcher is None:
            self._text.append(text)
            return False
        released = self._matcher.push(text, armed=self.count > self._min_tokens)
        if released:
            self._text.append(released)
        if self._matcher.found is None:
            return False
        self.finish_reason, self._stop_reason = "stop", self._matcher.found
        return True


def echo_prompt(vocabulary: Vocabulary, prompt: Sequence[int], skipped: int) -> tuple[str, list[int]]:
    """The text of an echoed prompt, and the text offset of each of its tokens.

    The first `skipped` tokens were put there by the tokenizer and are not part of the text.
    """
    decoder = Detokenizer(vocabulary, skip_special_tokens=False)
    parts: list[str] = []
    offsets, chars = [0] * skipped, 0
    for token in prompt[skipped:]:
        offsets.append(chars)
        parts.append(decoder.push(token))
        chars += len(parts[-1])
    return "".join([*parts, decoder.flush()]), offsets
