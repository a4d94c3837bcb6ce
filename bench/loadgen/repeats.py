"""Recognises the events of a stream that differ from an earlier one in nothing but their text."""

import json
import re
from typing import Any

# A string as JSON allows it, but not the empty one: an event without text may mean something else.
_STRING = r'"(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})++"'
_TEXT = re.compile(_STRING)
_FIELD = re.compile(rf'"(?:text|content|reasoning_content)" ?: ?({_STRING})')
_MAX_FRUITLESS = 8


def text_of(choice: dict[str, Any]) -> Any:
    """The output that a choice carries, of chat and completions alike."""
    delta = choice.get("delta", choice)
    return delta.get("text") or delta.get("content") or delta.get("reasoning_content")


class Repeats:
    """Whether an event is the one last learned again, with any text that is not empty.

    Such an event need not be parsed: around a valid string in the text's place it has the same
    bytes, so all else in it is the same too.
    """

    def __init__(self) -> None:
        self._before, self._after = "", ""  # what stands around the text; nothing before: none learned
        self._fruitless = 0  # events learned since one was last found again

    def has(self, data: bytes) -> bool:
        """Called for every event: the usual one must be cheap."""
        before, after = self._before, self._after
        try:
            event = data.decode()
        except UnicodeDecodeError:
            return False
        if not before or not event.startswith(before) or not event.endswith(after):
            return False
        if not _TEXT.fullmatch(event, len(before), len(event) - len(after)):
            return False
        self._fruitless = 0
        return True

    def learn(self, data: bytes, text: str) -> None:
        """Takes an event as the model; `text` is the `text_of` its only choice.

        Some servers' events all differ in more than the text: after a few of those this does nothing.
        """
        event = data.decode(errors="replace")
        field = _FIELD.search(event)
        if field is None or self._fruitless >= _MAX_FRUITLESS:
            return
        self._fruitless += 1
        before, after = event[: field.start(1)], event[field.end(1) :]
        if _is_text_between(before, after, text):
            self._before, self._after = before, after


def _is_text_between(before: str, after: str, text: str) -> bool:
    """Whether the string between these is what `text_of` found: another one there is then found."""
    other = "x" + text  # were `before` to end inside a string, the x would stand bare
    try:
        chunk = json.loads((before + json.dumps(other) + after).encode())
    except ValueError:
        return False
    return bool(text_of(chunk["choices"][0]) == other)
