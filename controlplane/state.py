"""What a gang holds: its groups, slots and blocks, and the ways to give them back."""

from collections import deque

from octavo.controlplane.block_manager import BlockManager
from octavo.controlplane.counters import Counters
from octavo.controlplane.draft import Flight, Pending, Shape
from octavo.controlplane.fit import Reserved
from octavo.controlplane.outputs import Outputs
from octavo.controlplane.preemption import Speeds
from octavo.controlplane.prefix import PrefixIndex
from octavo.controlplane.sequence import (
    OrderedGroups,
    RunningGroups,
    Sequence,
    SequenceGroup,
    State,
)
from octavo.controlplane.slots import SlotTable


class GangState:
    """Groups are in exactly one state; each state has one place. The scheduler decides, this keeps."""

    def __init__(
        self,
        shape: Shape,
        waiting: OrderedGroups,
        counters: Counters,
        speeds: Speeds | None = None,
        number: int = 0,
    ) -> None:
        self.number = number  # of the gang
        self.waiting = waiting  # all groups that wait; of several gangs each has a part of them
        self.counters = counters
        self.speeds = speeds or Speeds()
        self.preempted = OrderedGroups()
        self.outputs = Outputs()
        self.running = RunningGroups()
        # Registered prefixes: {name: (salt, tokens)}; their full blocks are or will be pinned.
        self.reserved: Reserved = {}
        self._start(shape)

    def _start(self, shape: Shape) -> None:
        self.shape = shape
        self.blocks = BlockManager(
            shape.num_blocks,
            shape.num_cpu_blocks,
            shape.block_size,
            shape.num_slots,
            shape.max_model_len,
            PrefixIndex(shape.num_blocks) if shape.prefix_caching else None,
        )
        self.slots = SlotTable(shape.num_slots, shape.max_model_len)
        self.pending = Pending()
        self._prefilling: list[Sequence] = []
        self.suspect: SequenceGroup | None = None  # a running group that may kill the worker
        self._in_flight: deque[Flight] = deque()
        self._cancels: list[int] = []  # for each: the last plan that was done when it came
        self.next_number = 0

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits to come back, or is in flight."""
        return not (self.running or self.preempted or self._in_flight or self.pending.free_slots)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def take_outputs(self) -> Outputs:
        """What there is to tell the gateways; the next call gives only what is new."""
        outputs, self.outputs = self.outputs, Outputs()
        return outputs

    def _slots_of(self, group: SequenceGroup) -> list[int]:
        return [sequence.slot for sequence in group.sequences if sequence.slot is not None]

    def _any_slot(self, group: SequenceGroup, samples: set[int]) -> bool:
        return any(
            sequence.slot is not None and (not samples or sequence.sample in samples)
            for sequence in group.live
        )

    def _recompute(self, group: SequenceGroup, kind: str) -> None:
        for sequence in group.sequences:
            if sequence.slot is not None:
                self._release(sequence)
        self._put_back(group, kind)

    def _put_back(self, group: SequenceGroup, kind: str) -> None:
        self.running.remove(group)
        group.state = State.PREEMPTED
        group.is_prefilling = False
        if group.search is not None:
            group.search.forget_answers()
        self.preempted.add(group)
        self.counters.preemptions[kind] += 1

    def _make_free(self, group: SequenceGroup) -> None:
        """A preempted group that has nothing on this gang any more may run on any."""
        for sequence in group.sequences:
            sequence.swapped = None
        group.state, group.gang = State.WAITING, None

    def has_progressed(self, group: SequenceGroup) -> bool:
        """Whether a running group has got a token since it was admitted."""
        known, prompt = self.slots.known, len(group.prompt)
        # While a sequence holds a slot, its `outputs` are those that it came with.
        return any(
            sequence.slot is not None and int(known[sequence.slot]) - prompt > len(sequence.outputs)
            for sequence in group.live
        )

    def _count_swapped(self, direction: str, blocks: int) -> None:
        self.counters.swapped_blocks[direction] += blocks
        self.counters.swapped_bytes[direction] += blocks * self.shape.block_bytes

    def _release(self, sequence: Sequence) -> None:
        """Frees a sequence's slot and blocks: for the next plan, which runs after those in flight."""
        assert sequence.slot is not None
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        self.blocks.free([sequence.slot])
        self._release_slot(sequence)

    def _release_slot(self, sequence: Sequence) -> None:
        slot = sequence.slot
        assert slot is not None
        if self.slots.announced[slot]:
            self.pending.free_slots[slot] = None
        self.pending.drop(slot)
        self.slots.release(slot)

    def _end(self, sequence: Sequence) -> None:
        """Finishes a sequence, and its group with the last one."""
        sequence.finished = True
        group = sequence.group
        if sequence.swapped is not None:
            self.blocks.drop(sequence.swapped)
            sequence.swapped = None
        if sequence.slot is not None and not self._is_needed(sequence):
            self._release(sequence)
        if group.live:
            return
        for other in group.sequences:
            if other.slot is not None:
                self._release(other)
        self._leave_queue(group)
        group.state = State.FINISHED
        self.outputs.ended.append(group)

    def _end_singles(self, sequences: list[Sequence]) -> None:
        """Finishes sequences that are alone in their running groups, and have been prefilled."""
        slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
        self.blocks.free(slots)
        self.slots.release_all(slots)
        self.pending.add_freed(slots)
        groups = [sequence.group for sequence in sequences]
        self.running.remove(*groups)
        self.outputs.ended += groups
        for sequence in sequences:
            sequence.finished = True
            sequence.group.state = State.FINISHED

    def _is_needed(self, sequence: Sequence) -> bool:
        """Whether other samples still wait for what this one prefills."""
        return sequence in self._prefilling and bool(sequence.group.live)

    def _leave_queue(self, group: SequenceGroup) -> None:
        if group.state is State.RUNNING:
            self.running.remove(group)
        elif group.state is State.WAITING:
            self.waiting.remove(group)
        elif group.state is State.PREEMPTED:
            self.preempted.remove(group)

    def groups_in_flight(self) -> set[SequenceGroup]:
        """Running groups with a row in a plan that has no result yet."""
        rows = {int(slot) for flight in self._in_flight for slot in flight.current_rows(self.slots)}
        drawn = {sequence.group for slot in rows if (sequence := self.slots.sequences[slot])}
        chunks = {group for flight in self._in_flight for group in flight.chunks}
        return {group for group in drawn | chunks if group.state is State.RUNNING}

    def check(self) -> None:
        """Raises AssertionError unless every block, slot and group is accounted for."""
        self.blocks.check()
        held = [sequence for sequence in self.slots.sequences if sequence is not None]
        assert len(held) + self.slots.num_free == self.slots.num_slots, "a slot is lost"
        assert {sequence.group for sequence in held} == set(self.running), "a group without slots runs"
        for queue, state in ((self.waiting, State.WAITING), (self.preempted, State.PREEMPTED)):
            assert all(group.state is state for group in queue), f"a {state.value} group is elsewhere"
        assert all(group.state is State.RUNNING for group in self.running)
        assert not any(sequence.swapped for group in self.running for sequence in group.sequences)
        if not self.running:
            held_blocks = self.blocks.device.total - self.blocks.available
            assert held_blocks == self.blocks.num_pinned, "blocks are held by nobody"
