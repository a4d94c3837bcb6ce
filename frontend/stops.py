"""Stop strings in a text that comes in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string, holding back only text that may still become one.

    The first is the one whose last character comes first; of several that end there, the longest.
    How the text was cut into pieces makes no difference. Each stop string is followed by its
    Knuth-Morris-Pratt automaton, so a character costs the same however long the strings are.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: whether the text that is released keeps the stop string."""
        self._stops = [_Automaton(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, armed: bool = True) -> str:
        """The text that may be given out now. Sets `found` when a stop string is complete.

        While not `armed` no stop string completes, but one may begin.
        """
        if not self._stops or not text:
            return text
        self._held += text
        offset = len(self._held) - len(text)
        for i, char in enumerate(text, start=offset + 1):
            complete = [stop.text for stop in self._stops if stop.feed(char)]
            if complete and armed:
                return self._finish(max(complete, key=len), i)
        return self._release(max(stop.matched for stop in self._stops))

    def flush(self) -> str:
        """The text held back, given out once at the end of a sample that no stop string ended."""
        held, self._held = self._held, ""
        return held

    def _finish(self, stop: str, end: int) -> str:
        self.found = stop
        text = self._held[: end if self._include else end - len(stop)]
        self._held = ""
        return text

    def _release(self, keep: int) -> str:
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


class _Automaton:
    """How many characters of `text` the input so far ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._failure = _failure_function(text)

    def feed(self, char: str) -> bool:
        """Whether the input now ends with the whole of `text`."""
        self.matched = _step(self.text, self._failure, self.matched, char)
        if self.matched < len(self.text):
            return False
        self.matched = self._failure[-1]
        return True


def _failure_function(text: str) -> list[int]:
    """failure[i]: length of the longest proper prefix of text that text[: i + 1] ends with."""
    failure = [0] * len(text)
    for i in range(1, len(text)):
        failure[i] = _step(text, failure, failure[i - 1], text[i])
    return failure


def _step(text: str, failure: list[int], matched: int, char: str) -> int:
    while matched and text[matched] != char:
        matched = failure[matched - 1]
    return matched + 1 if text[matched] == char else 0
