"""Registered prefixes: questions to the control plane, and what a new one is told."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from link_session import Session, drive
from plane_driver import until

from octavo.frontend.errors import RequestError
from octavo.frontend.prefixes import Prefix
from octavo.frontend.queries import Queries
from octavo.proto.session import BeatAnswer, Hello, Pin, Pins, PinsQuery, PinState, Unpin, Welcome
from octavo.proto.wire import int32s

RULES = Prefix("rules", int32s([1, 2, 3, 4]), "salt")
PINNED = PinState(name="rules", tokens=4, blocks=1)


def begin(question: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.ensure_future(question)


async def error_of(question: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await question
    return caught.value


async def join(s: Session) -> None:
    await s.driver.welcome()
    await until(lambda: s.link.ready)


async def registered(s: Session, prefix: Prefix = RULES) -> Pin:
    """Registers a prefix; returns what the control plane was asked."""
    asking = begin(s.link.prefixes.register(prefix))
    pin = await s.driver.expect(Pin)
    state = PinState(name=prefix.name, tokens=len(prefix.tokens), blocks=1)
    await s.driver.send(Pins(query=pin.query, pins=[state]))
    assert await asking == state
    return pin


async def replace_control_plane(s: Session, incarnation: int) -> None:
    s.driver.incarnation = incarnation
    await s.driver.send(BeatAnswer(controlplane=incarnation, known=False))
    await s.driver.welcome()
    await until(lambda: s.link.controlplane == incarnation and s.link.ready)


def test_register_list_unregister() -> None:
    async def test(s: Session) -> None:
        await join(s)
        pin = await registered(s)
        assert (pin.name, pin.tokens.tolist(), pin.cache_salt) == ("rules", [1, 2, 3, 4], "salt")
        assert pin.gateway == s.link.incarnation
        asking = begin(s.link.prefixes.list())
        query = await s.driver.expect(PinsQuery)
        await s.driver.send(Pins(query=query.query, pins=[PINNED]))
        assert await asking == [PINNED]
        asking = begin(s.link.prefixes.unregister("rules"))
        unpin = await s.driver.expect(Unpin)
        assert unpin.name == "rules"
        await s.driver.send(Pins(query=unpin.query))
        await asking

    drive(test)


def test_answers_find_their_questions() -> None:
    async def test(s: Session) -> None:
        await join(s)
        one = begin(s.link.prefixes.register(RULES))
        first = await s.driver.expect(Pin)
        two = begin(s.link.prefixes.register(Prefix("more", int32s([5]))))
        second = await s.driver.expect(Pin)
        more = PinState(name="more", tokens=1, blocks=1)
        await s.driver.send(Pins(query=second.query, pins=[more]))
        await s.driver.send(Pins(query=999))  # nobody's
        await s.driver.send(Pins(query=first.query, pins=[PINNED]))
        assert (await one, await two) == (PINNED, more)

    drive(test)


@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "ALREADY_EXISTS", "FAILED_PRECONDITION"])
def test_a_refusal_keeps_its_code_and_reason(code: str) -> None:
    async def test(s: Session) -> None:
        await join(s)
        asking = begin(s.link.prefixes.register(RULES))
        pin = await s.driver.expect(Pin)
        await s.driver.send(Pins(query=pin.query, code=code, reason="above --max-pinned"))
        error = await error_of(asking)
        assert (error.code, error.message) == (code, "above --max-pinned")
        await replace_control_plane(s, 8)  # and does not hear of it
        listing = begin(s.link.prefixes.list())
        await s.driver.expect(PinsQuery)
        listing.cancel()

    drive(test)


def test_without_a_control_plane_prefixes_are_unavailable() -> None:
    async def test(s: Session) -> None:
        prefixes = s.link.prefixes
        for question in (prefixes.register(RULES), prefixes.unregister("x"), prefixes.list()):
            assert (await error_of(question)).code == "UNAVAILABLE"

    drive(test)


def test_a_lost_control_plane_answers_nothing_more() -> None:
    async def test(s: Session) -> None:
        await join(s)
        questions = [begin(s.link.prefixes.register(RULES)), begin(s.link.info())]
        await s.driver.expect(Pin)
        await s.driver.send(BeatAnswer(controlplane=7, known=False))
        for question in questions:
            assert (await error_of(question)).code == "UNAVAILABLE"

    drive(test)


@pytest.mark.parametrize(
    ("limit", "ask"),
    [
        ("PIN_TIMEOUT", lambda s: s.link.prefixes.register(RULES)),
        ("TIMEOUT", lambda s: s.link.prefixes.unregister("rules")),
        ("TIMEOUT", lambda s: s.link.prefixes.list()),
    ],
)
def test_no_answer_in_time(
    monkeypatch: pytest.MonkeyPatch, limit: str, ask: Callable[[Session], Coroutine[Any, Any, Any]]
) -> None:
    monkeypatch.setattr(f"octavo.frontend.prefixes.{limit}", 0.01)

    async def test(s: Session) -> None:
        await join(s)
        assert (await error_of(ask(s))).code == "DEADLINE_EXCEEDED"

    drive(test)


def test_a_new_control_plane_is_told_when_it_can_serve(caplog: pytest.LogCaptureFixture) -> None:
    async def test(s: Session) -> None:
        await join(s)
        await registered(s)
        await registered(s, Prefix("more", int32s([5, 6])))
        s.driver.incarnation = 8
        await s.driver.send(BeatAnswer(controlplane=8, known=False))
        await s.driver.expect(Hello)
        for ready in (False, True, True):  # told once
            await s.driver.send(Welcome(controlplane=8, ready=ready))
        pins = [await s.driver.expect(Pin) for _ in range(2)]
        assert [(pin.name, pin.tokens.tolist()) for pin in pins] == [
            ("rules", [1, 2, 3, 4]),
            ("more", [5, 6]),
        ]
        refusal = Pins(query=pins[0].query, code="RESOURCE_EXHAUSTED", reason="above --max-pinned")
        await s.driver.send(refusal)
        await until(lambda: "above --max-pinned" in caplog.text)
        assert "prefix 'rules' could not be registered again" in caplog.text
        listing = begin(s.link.prefixes.list())
        await s.driver.expect(PinsQuery)  # and no other Pin before it
        listing.cancel()

    drive(test)


def test_a_renewal_that_was_cut_off_starts_again() -> None:
    async def test(s: Session) -> None:
        await join(s)
        await registered(s)
        await replace_control_plane(s, 8)
        await s.driver.expect(Pin)
        await replace_control_plane(s, 8)
        pin = await s.driver.expect(Pin)
        await s.driver.send(Pins(query=pin.query, pins=[PINNED]))

    drive(test)


@pytest.mark.parametrize("code", ["OK", "NOT_FOUND"])
def test_an_unregistered_prefix_is_forgotten(code: str) -> None:
    async def test(s: Session) -> None:
        await join(s)
        await registered(s)
        asking = begin(s.link.prefixes.unregister("rules"))
        unpin = await s.driver.expect(Unpin)
        await s.driver.send(Pins(query=unpin.query, code=code, reason="no prefix 'rules'"))
        await asyncio.wait([asking])
        assert (asking.exception() is None) == (code == "OK")
        await replace_control_plane(s, 8)
        listing = begin(s.link.prefixes.list())
        await s.driver.expect(PinsQuery)  # and no Pin before it
        listing.cancel()

    drive(test)


def test_remembered_prefixes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.frontend.prefixes.MAX_PREFIXES", 1)

    async def test(s: Session) -> None:
        await join(s)
        await registered(s)
        error = await error_of(s.link.prefixes.register(Prefix("more", int32s([5]))))
        assert (error.code, error.message) == (
            "RESOURCE_EXHAUSTED",
            "the gateway has its limit of 1 registered prefixes",
        )
        await registered(s)  # the same again is no more than there was

    drive(test)


def test_questions_under_way_are_bounded() -> None:
    async def test() -> None:
        queries = Queries[int](limit=1)
        asking = begin(queries.ask(lambda _: True, 20.0))
        await asyncio.sleep(0)
        assert (await error_of(queries.ask(lambda _: True, 20.0))).code == "RESOURCE_EXHAUSTED"
        queries.answer(1, 5)
        assert await asking == 5
        assert (await error_of(queries.ask(lambda _: False, 20.0))).code == "UNAVAILABLE"

    asyncio.run(test())
