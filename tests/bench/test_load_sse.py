import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loadgen.sse import (
    MAX_EVENT_BYTES,
    MAX_HEAD_BYTES,
    EventSplitter,
    HttpResponse,
    MalformedResponseError,
)

EVENTS = [b'{"choices": [{"text": "\xf0\x9f\x98\x80"}]}', b"two\nlines", b"[DONE]"]
STREAM = (
    b": a comment\n\nevent: x\nid: 7\ndata: " + EVENTS[0] + b"\n\n"
    b"data:two\r\ndata: lines\r\n\r\n\n\ndata: [DONE]\n\n"
)


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    bounds = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds) if a < b]


PLACES = st.lists(st.integers(0, 10_000), max_size=40)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(PLACES)
def test_events_do_not_depend_on_how_bytes_arrive(places: list[int]) -> None:
    splitter = EventSplitter()
    assert [event for piece in cut(STREAM, places) for event in splitter.feed(piece)] == EVENTS


@settings(derandomize=True, max_examples=100, deadline=None)
@given(PLACES, st.integers(1, 60))
def test_a_chunked_response_in_any_pieces_gives_its_events(places: list[int], size: int) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
    response, splitter = HttpResponse(), EventSplitter()
    events: list[bytes] = []
    for piece in cut(head + chunked(STREAM, size), places):
        assert not response.is_complete
        events += splitter.feed(response.feed(piece))
    assert events == EVENTS
    assert response.status == 200 and response.is_complete


def test_an_unfinished_event_is_held_back() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: half\n") == []
    assert splitter.feed(b"\n") == [b"half"]


@pytest.mark.parametrize(
    ("pieces", "event"),
    [
        ([b"data: one\n", b"data: two\n\n"], b"one\ntwo"),
        ([b"data: ", b"data: two\n\n"], b"data: two"),
        ([b"data: one\r\n\n"], b"one"),
        ([b"data: \n\n"], b""),
    ],
)
def test_a_piece_that_looks_whole_belongs_to_what_came_before(
    pieces: list[bytes], event: bytes
) -> None:
    splitter = EventSplitter()
    assert [found for piece in pieces for found in splitter.feed(piece)] == [event]


def test_an_error_response_gives_status_and_body() -> None:
    response = HttpResponse()
    body = response.feed(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfu")
    assert not response.is_complete
    assert body + response.feed(b"ll") == b"full"
    assert response.status == 429 and response.is_complete


def test_what_is_not_http_is_refused() -> None:
    with pytest.raises(MalformedResponseError):
        HttpResponse().feed(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")


def test_endless_heads_and_events_are_refused() -> None:
    response = HttpResponse()
    response.feed(b"HTTP/1.1 200 OK\r\n")
    with pytest.raises(MalformedResponseError, match="head of more than"):
        for _ in range(MAX_HEAD_BYTES // 1000 + 2):
            response.feed(b"X-Filler: " + b"x" * 988 + b"\r\n")
    splitter = EventSplitter()
    with pytest.raises(MalformedResponseError, match="event of more than"):
        for _ in range(MAX_EVENT_BYTES // 65536 + 2):
            splitter.feed(b"data: " + b"x" * 65536 + b"\n")
