"""The gateway's session with the control plane, driven from the other end of a real socket."""

import asyncio

import pytest
from link_session import VOCAB, Session, drive
from plane_driver import WAIT, Driver, until

from octavo.frontend.errors import RequestError
from octavo.frontend.link import LinkRefusedError
from octavo.frontend.live import Score
from octavo.proto.plan import Beams, DrawLogprobs
from octavo.proto.session import (
    BeatAnswer,
    Cancel,
    Failure,
    GatewayBeat,
    Hello,
    PromptScores,
    Refused,
    Submit,
    Tokens,
    Welcome,
    gateway_identity,
)
from octavo.proto.wire import float32s, int32s


def test_hello_and_welcome() -> None:
    async def test(s: Session) -> None:
        hello = await s.driver.expect(Hello)
        assert hello.model_digest == "digest"
        assert s.driver.gateway == gateway_identity(hello.incarnation)
        assert not s.link.ready
        await s.driver.send(Welcome(controlplane=7, ready=True))
        await until(lambda: s.link.ready)
        await s.driver.send(Welcome(controlplane=7, ready=False))
        await until(lambda: not s.link.ready)

    drive(test)


def test_a_request_from_submit_to_finish() -> None:
    async def test(s: Session) -> None:
        recorder, _ = s.open(n=2)  # before the welcome: it waits
        await s.driver.welcome()
        submit = await s.driver.expect(Submit)
        assert (submit.attempt, submit.arrival, submit.sampling.seed) == (0, 12.5, 5)
        assert [state.tokens.tolist() for state in submit.samples] == [[], []]
        await s.driver.tokens(submit, 0, 0, [10, 11])
        await s.driver.tokens(submit, 1, 0, [20])
        await s.driver.finish(submit, 0)
        await s.driver.finish(submit, 1, "stop")
        await until(lambda: s.link.live_count == 0)
        assert recorder.tokens == [(0, 10), (0, 11), (1, 20)]
        assert recorder.finishes == [(0, "length", None), (1, "stop", None)]

    drive(test)


def test_scores_and_cached_tokens_reach_their_request() -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        plain, _ = s.open()
        scored, _ = s.open(logprobs=1, prompt_logprobs=1)
        first, second = await s.driver.expect(Submit), await s.driver.expect(Submit)
        scores = DrawLogprobs(
            draws=int32s([1]),
            logprobs=float32s([-0.5]),
            top_counts=int32s([2]),
            top_ids=int32s([9, 8]),
            top_logprobs=float32s([-0.25, -1.0]),
        )
        prompt = PromptScores(
            request=second.request,
            attempt=0,
            start=1,
            logprobs=float32s([-2.0, -3.0]),
            top_count=1,
            top_ids=int32s([4, 5]),
            top_logprobs=float32s([-1.5, -2.5]),
        )
        await s.driver.send(
            Tokens(
                controlplane=7,
                requests=int32s([first.request, second.request]),
                attempts=int32s([0, 0]),
                samples=int32s([0, 0]),
                offsets=int32s([0, 0]),
                tokens=int32s([10, 20]),
                logprobs=scores,
                prompt_scores=[prompt, prompt],  # the second time they were seen already
                started=int32s([second.request]),
                started_attempts=int32s([0]),
                cached=int32s([2]),
            )
        )
        await until(lambda: bool(scored.tokens))
        assert plain.scores == [None]
        assert scored.scores == [Score(-0.5, [(9, -0.25), (8, -1.0)])]
        assert scored.prompt_scores == [-2.0, -3.0]
        assert scored.cached == 2

    drive(test)


def test_what_was_seen_is_dropped() -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        recorder, _ = s.open()
        submit = await s.driver.expect(Submit)
        await s.driver.tokens(submit, 0, 0, [10, 11])
        await s.driver.tokens(submit, 0, 0, [10, 11, 12])
        await until(lambda: len(recorder.tokens) >= 3)
        assert recorder.tokens == [(0, 10), (0, 11), (0, 12)]

    drive(test)


def test_a_gap_starts_a_new_attempt_with_what_there_is() -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        recorder, _ = s.open(n=2)
        old = await s.driver.expect(Submit)
        await s.driver.tokens(old, 0, 0, [10])
        await s.driver.tokens(old, 1, 0, [20, 21])
        await s.driver.finish(old, 1, "stop")
        await s.driver.tokens(old, 0, 2, [12])  # 11 is lost
        new = await s.driver.expect(Submit)
        assert (new.request, new.attempt, new.arrival) == (old.request, 1, 12.5)
        assert new.sampling.seed == old.sampling.seed
        states = [(state.tokens.tolist(), state.finish) for state in new.samples]
        assert states == [([10], ""), ([20, 21], "stop")]
        await s.driver.tokens(old, 0, 1, [11])  # of the old attempt: too late
        await s.driver.tokens(new, 0, 1, [31])
        await s.driver.finish(new, 0)
        await until(lambda: s.link.live_count == 0)
        assert recorder.tokens == [(0, 10), (1, 20), (1, 21), (0, 31)]

    drive(test)


@pytest.mark.parametrize("sign", ["beat-answer", "unknown", "welcome"])
def test_a_new_control_plane_gets_everything_again(sign: str) -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        recorder, _ = s.open()
        old = await s.driver.expect(Submit)
        await s.driver.tokens(old, 0, 0, [10])
        await until(lambda: bool(recorder.tokens))
        if sign == "beat-answer":
            s.driver.incarnation = 8
            await s.driver.send(BeatAnswer(controlplane=8, known=True))
        elif sign == "unknown":
            await s.driver.send(BeatAnswer(controlplane=7, known=False))
        if sign == "welcome":
            s.driver.incarnation = 8
            await s.driver.send(Welcome(controlplane=8, ready=True))
        else:
            await until(lambda: not s.link.ready)
            await s.driver.welcome()
        new = await s.driver.expect(Submit)
        assert (new.request, new.attempt) == (old.request, 1)
        assert new.samples[0].tokens.tolist() == [10]
        await s.driver.tokens(new, 0, 1, [11])
        await until(lambda: len(recorder.tokens) == 2)

    drive(test)


def test_a_broken_connection_starts_the_session_again() -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        s.open()
        old = await s.driver.expect(Submit)
        port = int(s.driver.address.rsplit(":", 1)[1])
        s.driver.socket.close()
        await until(lambda: not s.link.ready)
        s.driver = Driver(s.context, port)
        await s.driver.welcome()
        new = await s.driver.expect(Submit)
        assert (new.request, new.attempt) == (old.request, 1)

    drive(test)


def test_a_request_that_the_control_plane_lacks_is_sent_again() -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        s.open()
        old = await s.driver.expect(Submit)
        beat = await s.driver.expect(GatewayBeat)
        while not len(beat.requests):
            beat = await s.driver.expect(GatewayBeat)
        assert (beat.requests.tolist(), beat.newest) == ([old.request], old.request)
        answer = BeatAnswer(
            controlplane=7, known=True, missing=beat.requests, missing_attempts=beat.attempts
        )
        await s.driver.send(answer)
        assert (await s.driver.expect(Submit)).attempt == 1

    drive(test)


def test_a_control_plane_that_was_only_silent_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("octavo.frontend.link.BEAT_INTERVAL", 0.01)

    async def test(s: Session) -> None:
        await s.driver.welcome()
        recorder, _ = s.open()
        submit = await s.driver.expect(Submit)
        await until(lambda: not s.link.ready)  # no beat was answered
        await s.driver.tokens(submit, 0, 0, [10])
        await s.driver.welcome()
        await s.driver.tokens(submit, 0, 1, [11])
        await until(lambda: len(recorder.tokens) == 2)
        assert s.link.attempts == 0

    drive(test)


def test_a_lost_finish_is_not_asked_for_again() -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        recorder, _ = s.open(n=2, eos_token_ids=int32s([2]))
        submit = await s.driver.expect(Submit)
        await s.driver.tokens(submit, 0, 0, [10, 2])
        await s.driver.tokens(submit, 1, 0, list(range(20, 28)))
        await s.driver.send(BeatAnswer(controlplane=7, known=False))
        await s.driver.welcome()
        await until(lambda: s.link.live_count == 0)
        assert recorder.finishes == [(0, "stop", 2), (1, "length", None)]

    drive(test)


def test_tokens_of_another_control_plane_are_dropped() -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        recorder, _ = s.open()
        submit = await s.driver.expect(Submit)
        s.driver.incarnation = 6
        await s.driver.tokens(submit, 0, 0, [66])
        s.driver.incarnation = 7
        await s.driver.tokens(submit, 0, 0, [10])
        await until(lambda: bool(recorder.tokens))
        assert recorder.tokens == [(0, 10)]

    drive(test)


def test_cancelling_is_said_once_and_late_tokens_are_dropped() -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        recorder, live = s.open(n=2)
        submit = await s.driver.expect(Submit)
        s.link.finish_sample(live, 1, "stop")
        assert (await s.driver.expect(Cancel)).samples.tolist() == [1]
        s.link.close(live)
        s.link.close(live)
        assert (await s.driver.expect(Cancel)).samples.tolist() == []
        await s.driver.tokens(submit, 0, 0, [10])
        beat = await s.driver.expect(GatewayBeat)  # and no other Cancel before it
        assert beat.requests.tolist() == []
        assert recorder.tokens == []

    drive(test)


def test_a_failure_ends_its_request() -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        recorder, _ = s.open()
        submit = await s.driver.expect(Submit)
        for attempt, code in ((1, "INTERNAL"), (0, "RESOURCE_EXHAUSTED")):
            failure = Failure(
                controlplane=7, request=submit.request, attempt=attempt, code=code, reason="full"
            )
            await s.driver.send(failure)
        await until(lambda: recorder.error is not None)
        assert recorder.error is not None
        assert (recorder.error.code, recorder.error.message) == ("RESOURCE_EXHAUSTED", "full")
        assert s.link.live_count == 0

    drive(test)


def test_malformed_messages_are_counted_and_harm_nothing() -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        recorder, _ = s.open()
        submit = await s.driver.expect(Submit)
        await s.driver.send_frame(b"\x00garbage")
        await s.driver.send(Hello(incarnation=1, model_digest=""))
        await s.driver.tokens(submit, 0, 0, [VOCAB])
        await s.driver.send(Tokens(controlplane=7, tokens=int32s([1])))
        top = DrawLogprobs(draws=int32s([5]), logprobs=float32s([0.0]), top_counts=int32s([0]))
        await s.driver.send(Tokens(controlplane=7, logprobs=top))
        await s.driver.tokens(submit, 0, 0, [10])
        await until(lambda: bool(recorder.tokens))
        assert s.link.malformed == 5
        assert recorder.tokens == [(0, 10)]

    drive(test)


def test_a_refused_gateway_stops() -> None:
    async def test(s: Session) -> None:
        await s.driver.expect(Hello)
        await s.driver.send(Refused(reason="another model"))
        with pytest.raises(LinkRefusedError, match="another model"):
            await asyncio.wait_for(s.run, WAIT)

    drive(test)


def test_info_without_a_control_plane_is_unavailable() -> None:
    async def test(s: Session) -> None:
        with pytest.raises(RequestError) as caught:
            await s.link.info()
        assert caught.value.code == "UNAVAILABLE"

    drive(test)


# -- beam search ------------------------------------------------------------------------------------

BEAMS = Beams(length_penalty=0.5, early_stopping="never")


def test_hypotheses_are_told_when_all_are_whole() -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        recorder, live = s.open(n=2, beams=BEAMS)
        submit = await s.driver.expect(Submit)
        assert submit.beams == BEAMS
        assert [state.tokens.tolist() for state in submit.samples] == [[], []]
        await s.driver.tokens(submit, 1, 0, [20])
        await s.driver.finish(submit, 1, "length", -1.5)
        await s.driver.tokens(submit, 0, 0, [10, 11])
        await until(lambda: live.received == 3)
        assert not recorder.tokens
        assert not recorder.finishes
        await s.driver.finish(submit, 0, "stop", -0.5)
        await until(lambda: s.link.live_count == 0)
        assert recorder.tokens == [(0, 10), (0, 11), (1, 20)]
        assert recorder.finishes == [(0, "stop", None), (1, "length", None)]
        assert recorder.hypothesis_scores == [-0.5, -1.5]

    drive(test)


@pytest.mark.parametrize("sign", ["gap", "unknown"])
def test_a_beam_search_starts_over(sign: str) -> None:
    async def test(s: Session) -> None:
        await s.driver.welcome()
        recorder, live = s.open(n=2, beams=BEAMS, eos_token_ids=int32s([2]))
        old = await s.driver.expect(Submit)
        await s.driver.tokens(old, 0, 0, [10, 2])
        await s.driver.finish(old, 0, "stop", -0.5)
        if sign == "gap":
            await s.driver.tokens(old, 1, 1, [21])
        else:
            await s.driver.send(BeatAnswer(controlplane=7, known=False))
            await s.driver.welcome()
        new = await s.driver.expect(Submit)
        assert (new.attempt, new.beams, live.received) == (1, BEAMS, 0)
        assert [(state.tokens.tolist(), state.finish) for state in new.samples] == [([], ""), ([], "")]
        await s.driver.finish(old, 1, "stop", -0.75)  # of the old attempt: too late
        await s.driver.tokens(new, 0, 0, [30])
        await s.driver.tokens(new, 1, 0, [40])
        await s.driver.finish(new, 0, "length", -0.25)
        await s.driver.finish(new, 1, "length", -0.5)
        await until(lambda: s.link.live_count == 0)
        assert recorder.tokens == [(0, 30), (1, 40)]
        assert recorder.hypothesis_scores == [-0.25, -0.5]

    drive(test)
