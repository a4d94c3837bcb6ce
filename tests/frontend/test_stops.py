"""Stop strings across pieces of text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.stops import StopMatcher


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """The texts given out, the flush included, and the stop string that was found."""
    matcher = StopMatcher(stops, include)
    given_out = []
    for piece in pieces:
        given_out.append(matcher.push(piece))
        if matcher.found is not None:
            return given_out, matcher.found
    return [*given_out, matcher.flush()], None


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the stop string that ends first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def test_stop_string_over_four_tokens_leaves_no_text() -> None:
    given_out, found = run(["DEF", "G", "HI", "J"], ["DEFGHIJ"])
    assert "".join(given_out) == ""
    assert found == "DEFGHIJ"


def test_a_near_miss_releases_the_text() -> None:
    assert run(["DEF", "G", "HI", "K", "x"], ["DEFGHIJ"]) == (["", "", "", "DEFGHIK", "x", ""], None)


def test_held_text_is_flushed_once() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert matcher.push("abcDEF") == "abc"
    assert matcher.flush() == "DEF"
    assert matcher.flush() == ""


def test_only_the_longest_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("aaa") == "a"
    assert matcher.push("b") == ""
    assert matcher.found == "aab"


def test_included_stop_string() -> None:
    assert run(["x END y"], ["END"], include=True) == (["x END"], "END")


def test_no_stop_strings_pass_everything() -> None:
    assert run(["a", "b"], []) == (["a", "b", ""], None)


def test_not_armed_text_does_not_stop_but_may_begin_a_stop_string() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("END EN", armed=False) == "END "
    assert matcher.found is None
    assert matcher.push("D!") == ""
    assert matcher.found == "END"


def test_short_stop_inside_held_unarmed_text_does_not_count() -> None:
    matcher = StopMatcher(["abc", "b"])
    assert matcher.push("ab", armed=False) == ""
    assert matcher.push("x") == "abx"
    assert matcher.found is None


@pytest.mark.parametrize("include", [False, True])
@settings(derandomize=True, max_examples=400)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=10),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_same_as_the_definition(include: bool, pieces: list[str], stops: list[str]) -> None:
    given_out, found = run(pieces, stops, include)
    assert ("".join(given_out), found) == naive("".join(pieces), stops, include)


@settings(derandomize=True, max_examples=200)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_no_more_is_held_back_than_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_out = "".join(map(matcher.push, text)) if naive(text, stops, False)[1] is None else text
    held = text[len(given_out) :]
    assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
