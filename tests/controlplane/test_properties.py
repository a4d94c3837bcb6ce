"""Random operations on scheduler and block manager, with everything that must always hold.

A state machine draws arrivals, cancels, prefixes, lost workers and steps; a worker that computes
nothing and notices everything answers. `make test` takes at least 20,000 steps, `make soak` many more.
"""

import os
from typing import Any

from driver import GATEWAY, Driver, shape, submit
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.controlplane.draft import Shape
from octavo.controlplane.pins import PrefixRefused, PrefixRegistry
from octavo.controlplane.sequence import SequenceGroup, State
from octavo.proto.plan import Beams, Sampling
from octavo.proto.session import Pin, Submit
from octavo.proto.wire import int32s

EXAMPLES = int(os.environ.get("OCTAVO_EXAMPLES", "130"))
STEPS = 160  # of each example; 130 * 160 = 20,800

PROMPTS = [[(salt * 31 + index * 7) % 50 for index in range(24)] for salt in range(4)]


class WatchedDriver(Driver):
    """A driver that looks over the scheduler's shoulder at every admission and preemption."""

    def __init__(self, gang: Any, depth: int) -> None:
        super().__init__(gang, depth)
        self.registry = PrefixRegistry(self.waiting, max_pinned=0.4)
        scheduler = self.scheduler
        admit, preempt = scheduler._admit, scheduler._preempt

        def watched_admit(draft: Any, group: SequenceGroup, admission: Any) -> None:
            queued = [*scheduler.waiting, *scheduler.preempted]
            assert all(group.key < other.key for other in queued), "admitted past a smaller key"
            assert admission.wants <= scheduler.blocks.available, "admitted without room"
            admit(draft, group, admission)

        def watched_preempt(draft: Any, group: SequenceGroup) -> None:
            assert group.key == max(other.key for other in scheduler.running), "not the largest key"
            assert not scheduler.num_in_flight, "preempted with unknown tokens"
            preempt(draft, group)

        scheduler._admit = watched_admit  # type: ignore[method-assign]
        scheduler._preempt = watched_preempt  # type: ignore[method-assign]

    def _hear(self, outputs: Any) -> None:
        super()._hear(outputs)
        self.registry.computed(outputs.ended_prefixes, self.scheduler)

    def reset(self, gang: Shape, orderly: bool = True) -> None:
        super().reset(gang, orderly)
        self.registry.leave(self.scheduler.number)
        self.registry.recompute(self.scheduler)


class Machine(RuleBasedStateMachine):
    """The operations, and what holds after each of them."""

    @initialize(
        depth=st.sampled_from([1, 2]),
        blocks=st.integers(6, 24),
        cpu_blocks=st.sampled_from([0, 1, 4, 30]),
        chunk=st.sampled_from([1, 5, 16]),
        mode=st.sampled_from(["swap", "recompute", "auto"]),
        caching=st.booleans(),
        copy=st.sampled_from([0.0, 1.0, 1e6]),
    )
    def start(
        self,
        depth: int,
        blocks: int,
        cpu_blocks: int,
        chunk: int,
        mode: str,
        caching: bool,
        copy: float,
    ) -> None:
        self.gang = shape(
            num_blocks=blocks,
            num_cpu_blocks=cpu_blocks,
            prefill_chunk=chunk,
            preemption=mode,
            prefix_caching=caching,
        )
        self.driver = WatchedDriver(self.gang, depth)
        self.driver.scheduler.speeds.copy = copy
        self.requests: dict[int, Submit] = {}
        self.cancelled: set[int] = set()
        self.number = 0

    @rule(
        salt=st.integers(0, 3),
        length=st.integers(1, 24),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(1, 18),
        stops=st.sampled_from([(), (), (7,), (1, 2, 3)]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        kind=st.sampled_from(["sample", "sample", "scores", "beam"]),
    )
    def arrive(
        self,
        salt: int,
        length: int,
        n: int,
        max_tokens: int,
        stops: tuple[int, ...],
        priority: int,
        kind: str,
    ) -> None:
        self.number += 1
        sampling = Sampling(
            seed=self.number,
            stop_token_ids=int32s(stops),
            prompt_logprobs=0 if kind == "scores" else None,
        )
        request = submit(
            self.number,
            PROMPTS[salt][:length],
            max_tokens,
            n=n,
            sampling=sampling,
            priority=priority,
            cache_salt="x" if salt == 3 else "",
            beams=Beams() if kind == "beam" else None,
        )
        if self.driver.add(request) is None:
            self.requests[self.number] = request

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), whole=st.booleans())
    def cancel(self, data: st.DataObject, whole: bool) -> None:
        victim = data.draw(st.sampled_from(sorted(self.requests)[-6:]))
        self.cancelled.add(victim)
        self.driver.cancel(victim, None if whole else {0})

    @rule(salt=st.integers(0, 3), length=st.integers(4, 16))
    def pin(self, salt: int, length: int) -> None:
        pin = Pin(gateway=GATEWAY, query=1, name=str(salt), tokens=int32s(PROMPTS[salt][:length]))
        try:
            self.driver.registry.register(pin, [self.driver.scheduler])
        except PrefixRefused:
            return

    @rule(salt=st.integers(0, 3))
    def unpin(self, salt: int) -> None:
        try:
            self.driver.registry.unregister(str(salt), [self.driver.scheduler])
        except PrefixRefused:
            return
        self.driver._hear(self.driver.scheduler.take_outputs())

    @rule(unlucky=st.sampled_from([False, False, False, True]), orderly=st.booleans())
    def lose_worker(self, unlucky: bool, orderly: bool) -> None:
        if unlucky:
            epoch = self.driver.scheduler.shape.epoch + 1
            self.driver.reset(shape(**{**vars(self.gang), "epoch": epoch}), orderly)

    @invariant()
    def everything_is_accounted_for(self) -> None:
        scheduler = self.driver.scheduler
        scheduler.check()  # counts equal table entries; free + cached + held = total; states agree
        swap = scheduler.blocks.swap.state()
        assert swap.used <= swap.total == self.gang.num_cpu_blocks
        live = [group for group in self.driver.groups.values() if group.state is not State.FINISHED]
        places = [scheduler.running, list(scheduler.preempted), list(scheduler.waiting)]
        for group in live:
            assert sum(group in place for place in places) == 1, "a group is in two places or none"
            in_swap = [sequence.swapped is not None for sequence in group.live]
            assert all(in_swap) or not any(in_swap), "a group is split between the pools"

    def teardown(self) -> None:
        """Whatever happened, everybody is served, with the tokens of an undisturbed run."""
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        for number in self.requests.keys() - self.cancelled:
            if self.driver.told[number].failure is None:
                self.driver.check_answer(self.requests[number], self.driver.groups[number].end)
        self.driver.check_idle()
        assert self.driver.counters.max_cancel_to_free_plans <= self.driver.depth


def test_random_operations() -> None:
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
