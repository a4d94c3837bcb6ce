"""What a client gets of a request: the best of its samples, hypotheses, usage, metrics."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from link_session import Session, drive
from plane_driver import WAIT, until

from octavo.frontend.errors import RequestError
from octavo.frontend.metrics import Metrics
from octavo.frontend.requests import GenerateCall, SamplingRequest, Usage
from octavo.frontend.sample import Delta, TextRules
from octavo.frontend.streams import Batch, PreparedRequest, Stream
from octavo.frontend.tokenizer import Vocabulary
from octavo.frontend.validation import wire_sampling
from octavo.proto.session import BeatAnswer, Cancel, Failure, Submit, Tokens
from octavo.proto.wire import int32s

END = 2
A, B, C, D = 65, 66, 67, 68


def prepared(vocabulary: Vocabulary, **sampling: Any) -> PreparedRequest:
    asked = SamplingRequest(**sampling)
    return PreparedRequest(
        call=GenerateCall([1, 3], asked),
        prompt=[1, 3],
        max_tokens=8,
        sampling=wire_sampling(asked, [END], 100),
        rules=TextRules(vocabulary, asked, frozenset([END])),
        offsets=[],
        arrival=12.5,
    )


class Scene:
    """One stream over a link."""

    def __init__(self, session: Session, vocabulary: Vocabulary, **sampling: Any) -> None:
        self.driver = session.driver
        self.metrics = Metrics()
        self.stream = Stream(prepared(vocabulary, **sampling), session.link, self.metrics)
        self.batch = Batch([self.stream], max_unread=100)
        self.batch.start()

    async def sample(
        self, submit: Submit, index: int, tokens: list[int], logprobs: Sequence[float]
    ) -> None:
        """A whole sample."""
        await self.driver.tokens(submit, index, 0, tokens, logprobs)
        await self.driver.finish(submit, index)

    async def read(self) -> list[Delta]:
        deltas: list[Delta] = []
        while news := await self.batch.take():
            deltas += [delta for _, delta in news]
        return deltas

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


def test_the_likeliest_samples_come_best_first(byte_vocabulary: Vocabulary) -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        scene = Scene(s, byte_vocabulary, n=2, best_of=4)
        submit = await s.driver.expect(Submit)
        assert (len(submit.samples), submit.sampling.logprobs, submit.beams) == (4, 0, None)
        await scene.sample(submit, 0, [A], [-2.0])
        await scene.sample(submit, 2, [C, C, C], [-0.5, -0.5, -0.5])  # less likely as a whole
        await scene.sample(submit, 3, [D], [-0.75])
        await s.driver.tokens(submit, 1, 0, [B], [-0.75])
        await until(lambda: scene.stream.usage().completion_tokens == 6)
        assert scene.stream.take() == []  # the best are not known yet
        await s.driver.finish(submit, 1, "stop")
        deltas = await scene.read()
        assert [(d.index, d.text, d.finish_reason) for d in deltas] == [
            (0, "CCC", "length"),
            (1, "B", "stop"),  # as likely as D, and before it
        ]
        assert all(delta.scores == [] for delta in deltas)
        assert scene.stream.usage() == Usage(2, 0, 6)

    drive(test)


def test_scores_of_the_best_are_shown_where_asked_for(byte_vocabulary: Vocabulary) -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        scene = Scene(s, byte_vocabulary, best_of=2, logprobs=0)
        submit = await s.driver.expect(Submit)
        await scene.sample(submit, 0, [A], [-1.0])
        await scene.sample(submit, 1, [B], [-0.5])
        (delta,) = await scene.read()
        assert [(score.token, score.logprob) for score in delta.scores] == [(B, -0.5)]

    drive(test)


def test_a_stop_string_ends_one_of_the_samples(byte_vocabulary: Vocabulary) -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        scene = Scene(s, byte_vocabulary, best_of=2, stop=["AB"])
        submit = await s.driver.expect(Submit)
        await s.driver.tokens(submit, 0, 0, [C, A, B, D], [-0.1] * 4)
        assert (await s.driver.expect(Cancel)).samples.tolist() == [0]
        await scene.sample(submit, 1, [D], [-1.0])
        (delta,) = await scene.read()
        assert (delta.text, delta.finish_reason, delta.stop_reason) == ("C", "stop", "AB")
        assert scene.stream.usage().completion_tokens == 4

    drive(test)


def test_the_best_is_found_over_a_new_attempt(byte_vocabulary: Vocabulary) -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        scene = Scene(s, byte_vocabulary, best_of=2)
        old = await s.driver.expect(Submit)
        await s.driver.tokens(old, 0, 0, [A], [-4.0])
        await scene.sample(old, 1, [B], [-1.0])
        await s.driver.send(BeatAnswer(controlplane=7, known=False))
        await s.driver.welcome()
        new = await s.driver.expect(Submit)
        assert [state.tokens.tolist() for state in new.samples] == [[A], [B]]
        await s.driver.tokens(new, 0, 1, [A], [-0.5])  # -2.25 a token
        await s.driver.finish(new, 0)
        assert [delta.text for delta in await scene.read()] == ["B"]
        assert scene.stream.usage().completion_tokens == 3

    drive(test)


def test_leaving_cancels_all_samples(byte_vocabulary: Vocabulary) -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        scene = Scene(s, byte_vocabulary, best_of=3)
        submit = await s.driver.expect(Submit)
        await scene.sample(submit, 0, [A], [-1.0])
        scene.batch.close()
        assert (await s.driver.expect(Cancel)).samples.tolist() == []
        assert s.link.live_count == 0

    drive(test)


def test_hypotheses_are_choices_with_scores(byte_vocabulary: Vocabulary) -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        scene = Scene(
            s, byte_vocabulary, n=2, use_beam_search=True, length_penalty=2.0, early_stopping="true"
        )
        submit = await s.driver.expect(Submit)
        assert submit.beams is not None
        assert (submit.beams.length_penalty, submit.beams.early_stopping) == (2.0, "true")
        await s.driver.tokens(submit, 0, 0, [A, END])
        await s.driver.tokens(submit, 1, 0, [B, C, D])
        await s.driver.finish(submit, 0, "stop", -0.25)
        await s.driver.finish(submit, 1, "length", -0.5)
        deltas = await scene.read()
        assert [(d.index, d.text, d.finish_reason, d.score) for d in deltas] == [
            (0, "A", "stop", -0.25),
            (1, "BCD", "length", -0.5),
        ]
        assert deltas[0].stop_reason == END
        assert scene.stream.usage() == Usage(2, 0, 5)
        assert scene.metric("vllm:request_time_per_output_token_seconds_count") == 0

    drive(test)


@pytest.mark.parametrize("again", [False, True])
def test_queue_time_and_cached_tokens_are_counted_once(
    byte_vocabulary: Vocabulary, again: bool
) -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        scene = Scene(s, byte_vocabulary)
        submit = await s.driver.expect(Submit)
        started = Tokens(
            controlplane=7,
            started=int32s([submit.request]),
            started_attempts=int32s([0]),
            cached=int32s([1]),
        )
        for _ in range(1 + again):
            await s.driver.send(started)
        await scene.sample(submit, 0, [A], [])
        await scene.read()
        assert scene.stream.usage().cached_tokens == 1
        assert scene.metric("vllm:request_queue_time_seconds_count") == 1
        assert scene.metric("octavo_prompt_tokens_cached_total") == 1
        assert scene.metric("octavo_prompt_tokens_total") == 2

    drive(test)


def test_a_failure_comes_behind_what_the_other_streams_have(byte_vocabulary: Vocabulary) -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        streams = [Stream(prepared(byte_vocabulary), s.link, Metrics()) for _ in range(2)]
        with Batch(streams, max_unread=100) as batch:
            batch.start()
            submits = [await s.driver.expect(Submit) for _ in streams]
            await s.driver.tokens(submits[0], 0, 0, [A])
            failed = submits[1].request
            await s.driver.send(
                Failure(controlplane=7, request=failed, attempt=0, code="UNAVAILABLE", reason="gone")
            )
            await until(lambda: s.link.live_count == 1)
            assert [(stream, delta.text) for stream, delta in await batch.take()] == [(0, "A")]
            with pytest.raises(RequestError, match="gone"):
                await asyncio.wait_for(batch.take(), WAIT)

    drive(test)


def test_each_token_is_news_to_a_reader_that_waits(byte_vocabulary: Vocabulary) -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        scene = Scene(s, byte_vocabulary)
        submit = await s.driver.expect(Submit)
        for offset, token in enumerate([A, B, C]):
            reader = asyncio.ensure_future(scene.batch.take())
            await s.driver.tokens(submit, 0, offset, [token])
            assert [delta.token_ids for _, delta in await reader] == [[token]]
        await s.driver.finish(submit, 0)
        assert [delta.finish_reason for delta in await scene.read()] == ["length"]

    drive(test)
