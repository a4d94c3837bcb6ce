"""What a client asks for when the gateway of its stream has gone, and what it leaves out then."""

from octavo.frontend.resuming import Progress
from octavo.v1 import generation_pb2 as pb


def delta(index: int, text: str, ids: list[int], **rest: object) -> pb.GenerateDelta:
    return pb.GenerateDelta(index=index, text=text, token_ids=ids, **rest)  # type: ignore[arg-type]


def begun(**sampling: object) -> Progress:
    """A stream of two samples, of which the second has nothing but its echo."""
    request = pb.GenerateRequest(text="ab", echo=True, sampling=pb.SamplingParams(n=2, **sampling))  # type: ignore[arg-type]
    progress = Progress(request)
    assert progress.request() == request and not progress.has_begun
    progress.take(delta(0, "abc", [7], prompt_token_ids=[1, 2], seed=5))
    progress.take(delta(1, "ab", []))
    progress.take(delta(0, "d", [8, 9]))
    return progress


def test_it_goes_on_with_what_there_is() -> None:
    request = begun().request()
    assert list(request.token_ids.ids) == [1, 2] and request.sampling.seed == 5
    assert [list(sample.token_ids) for sample in request.resume.samples] == [[7, 8, 9], []]
    assert request.echo and request.sampling.n == 2


def test_what_comes_again_is_left_out() -> None:
    progress = begun()
    progress.request()
    first = progress.take(delta(1, "abx", [3], prompt_token_ids=[1, 2], seed=5))
    assert (first.text, list(first.token_ids), list(first.prompt_token_ids)) == ("x", [3], [])
    second = progress.take(delta(0, "e", [4]))
    assert second.text == "e"
    samples = progress.request().resume.samples
    assert [list(sample.token_ids) for sample in samples] == [[7, 8, 9, 4], [3]]


def test_an_echo_that_comes_again_in_pieces_is_left_out() -> None:
    progress = begun()
    progress.request()
    texts = [progress.take(delta(1, text, [])).text for text in ("a", "b", "x")]
    assert texts == ["", "", "x"]


def test_finished_samples_stay_finished() -> None:
    progress = begun()
    progress.take(delta(0, "", [], finish_reason="stop"))
    assert [s.finish_reason for s in progress.request().resume.samples] == ["stop", ""]
    assert not progress.is_whole
    progress.take(delta(1, "z", [1], finish_reason="length", usage=pb.Usage(prompt_tokens=2)))
    assert progress.is_whole


def test_searches_begin_anew() -> None:
    for sampling in ({"use_beam_search": True}, {"best_of": 4}):
        request = begun(**sampling).request()
        assert not request.HasField("resume") and request.sampling.seed == 5
