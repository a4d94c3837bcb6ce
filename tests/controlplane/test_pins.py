"""Registered prefixes: computed once, held, found, given up, computed again."""

import dataclasses

import pytest
from driver import GATEWAY, Driver, shape, submit

from octavo.controlplane.draft import Shape
from octavo.controlplane.pins import PrefixRefused, PrefixRegistry
from octavo.proto.session import Pin, Pins
from octavo.proto.wire import int32s

SYSTEM = [7 * index % 50 for index in range(14)]  # three full blocks of four, and two tokens more


class PinDriver(Driver):
    """A driver with a registry, which hears of ended groups as the server lets it hear."""

    def __init__(self, **changes: object) -> None:
        super().__init__(shape(**{"num_blocks": 24, "prefix_caching": True, **changes}), depth=2)
        self.registry = PrefixRegistry(self.waiting, max_pinned=0.5)
        self.answers: list[tuple[int, Pins]] = []

    def _hear(self, outputs: object) -> None:
        super()._hear(outputs)  # type: ignore[arg-type]
        ended = outputs.ended_prefixes  # type: ignore[attr-defined]
        self.answers += self.registry.computed(ended, self.scheduler)

    def pin(self, name: str, tokens: list[int], salt: str = "") -> Pins | None:
        pin = Pin(gateway=GATEWAY, query=1, name=name, tokens=int32s(tokens), cache_salt=salt)
        return self.registry.register(pin, [self.scheduler])

    def reset(self, gang: Shape, orderly: bool = True) -> None:
        super().reset(gang, orderly)
        self.registry.leave(self.scheduler.number)
        self.answers += self.registry.recompute(self.scheduler)


def test_a_prefix_is_computed_once_and_found_by_everyone() -> None:
    driver = PinDriver()
    assert driver.pin("system", SYSTEM) is None
    driver.run()
    [(gateway, answer)] = driver.answers
    assert (gateway, answer.pins[0].tokens, answer.pins[0].blocks) == (GATEWAY, 12, 3)
    assert driver.counters.prefill_tokens == 12
    requests = [submit(i, [*SYSTEM, i, i + 1], 6, n=i) for i in (1, 2, 3)]
    for request in requests:
        driver.add(request)
    driver.run()
    for request in requests:
        driver.check_answer(request)
        assert driver.told[request.request].cached == 12
    assert driver.counters.prefill_tokens == 12 + 3 * 4
    state = driver.scheduler.blocks.device.state()
    assert (state.pinned, state.used) == (3, 0)
    driver.check_idle()
    assert driver.pin("system", SYSTEM) is not None


def test_pinned_blocks_outlive_pressure_and_go_when_unregistered() -> None:
    driver = PinDriver()
    driver.pin("system", SYSTEM)
    driver.run()
    others = [submit(i, [i % 50] * 20, 16) for i in range(1, 9)]
    for request in others:
        driver.add(request)
    driver.run()
    for request in others:
        driver.check_answer(request)
    asks = submit(20, SYSTEM, 3)
    driver.add(asks)
    driver.run()
    assert driver.told[20].cached == 12
    driver.registry.unregister("system", [driver.scheduler])
    driver.scheduler.check()
    assert driver.scheduler.blocks.device.state().pinned == 0
    with pytest.raises(PrefixRefused, match="no prefix"):
        driver.registry.unregister("system", [driver.scheduler])


def test_two_names_may_share_blocks() -> None:
    driver = PinDriver()
    driver.pin("a", SYSTEM)
    driver.run()
    driver.pin("b", [*SYSTEM[:12], 1, 2, 3, 4])
    driver.run()
    assert driver.scheduler.blocks.num_pinned == 4
    driver.registry.unregister("a", [driver.scheduler])
    driver.scheduler.check()
    assert driver.scheduler.blocks.num_pinned == 4
    driver.registry.unregister("b", [driver.scheduler])
    driver.scheduler.check()
    assert driver.scheduler.blocks.num_pinned == 0


def test_fit_means_what_is_not_pinned() -> None:
    driver = PinDriver(num_blocks=12)
    driver.pin("system", SYSTEM)
    driver.run()
    fits, wall = submit(1, [3] * 36, 1), submit(3, [4] * 8, 40, n=4)
    assert driver.add(fits) is None
    assert "exceed the 36 tokens" in (driver.add(submit(2, [3] * 37, 1)) or "")
    with_prefix = submit(4, [*SYSTEM[:12], *[5] * 30], 1)  # its own pinned blocks do not count
    assert driver.add(with_prefix) is None
    assert driver.add(wall) is None
    driver.run()
    driver.check_answer(fits)
    driver.check_answer(with_prefix)
    driver.check_answer(wall, end=13)  # two shared blocks, and one for each of the four
    driver.check_idle()


def test_what_is_refused() -> None:
    driver = PinDriver()
    for name, tokens, code in (
        ("", SYSTEM, "INVALID_ARGUMENT"),
        ("short", [1, 2, 3], "INVALID_ARGUMENT"),
        ("large", [1] * 52, "INVALID_ARGUMENT"),
    ):
        with pytest.raises(PrefixRefused) as caught:
            driver.pin(name, tokens)
        assert caught.value.code == code
    driver.pin("a", SYSTEM)
    driver.pin("b", [1] * 36)
    with pytest.raises(PrefixRefused, match="--max-pinned allows 12"):
        driver.pin("c", [2] * 8)
    with pytest.raises(PrefixRefused) as caught:
        driver.pin("a", [1] * 14)
    assert caught.value.code == "ALREADY_EXISTS"
    driver.run()
    assert driver.scheduler.blocks.num_pinned == 12


def test_a_prefix_that_would_leave_an_accepted_request_no_room_is_refused() -> None:
    driver = PinDriver()
    request = submit(1, [5] * 8, 40, n=2)  # may grow to 22 blocks
    driver.add(request)
    driver.step()
    with pytest.raises(PrefixRefused, match="no room beside it"):
        driver.pin("system", SYSTEM)
    driver.run()
    driver.check_answer(request)
    driver.pin("system", SYSTEM)
    driver.run()
    assert driver.scheduler.blocks.num_pinned == 3


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_new_epoch_computes_prefixes_again(steps: int) -> None:
    driver = PinDriver(prefill_chunk=5)
    driver.pin("system", SYSTEM)
    for _ in range(steps):
        driver.step()
    driver.reset(dataclasses.replace(driver.scheduler.shape, epoch=2))
    driver.run()
    assert driver.scheduler.blocks.num_pinned == 3
    driver.scheduler.check()
    assert len(driver.answers) == 1


def test_who_waits_for_a_prefix_that_is_given_up_is_told() -> None:
    driver = PinDriver(prefill_chunk=5)
    driver.pin("system", SYSTEM)
    driver.step()
    [(gateway, answer)] = driver.registry.unregister("system", [driver.scheduler])
    assert (gateway, answer.code) == (GATEWAY, "NOT_FOUND")
    driver.run()
    driver.check_idle()
    assert not driver.answers


def test_who_waits_for_a_prefix_that_fits_no_more_is_told() -> None:
    driver = PinDriver(prefill_chunk=5)
    driver.pin("system", SYSTEM)
    driver.run()
    driver.answers.clear()
    driver.reset(dataclasses.replace(driver.scheduler.shape, epoch=2, num_blocks=2))
    assert driver.answers == []
    assert driver.registry.states() == []
    driver.run()
    driver.check_idle()
