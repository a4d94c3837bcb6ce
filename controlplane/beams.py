"""Carries a step of a beam search out: slots and blocks follow the beams.

The first child of a beam keeps its slot; further children take the slots of beams that died, sharing
all blocks with their parent. What the worker must be told goes into `Pending`.
"""

from octavo.controlplane.beam import Continuation
from octavo.controlplane.block_manager import BlockManager
from octavo.controlplane.draft import Pending
from octavo.controlplane.sequence import Sequence, SequenceGroup
from octavo.controlplane.slots import SlotTable
from octavo.proto.wire import int32s


def advance(group: SequenceGroup, slots: SlotTable, blocks: BlockManager, pending: Pending) -> bool:
    """Takes the group's search one step further, if all beams have answered.

    Returns:
        Whether the search is done.
    """
    search = group.search
    assert search is not None
    if not search.has_all_answers:
        return False
    beams = [group.sequences[sample] for sample in search.order]
    histories = [slots.tokens(_slot(beam))[len(group.prompt) :] for beam in beams]
    chosen = search.step(histories)
    if search.done:
        return True
    children = _place(group, beams, chosen)
    for continuation, child in zip(chosen, children, strict=True):
        parent = beams[continuation.parent]
        if child is not parent:
            _fork(_slot(parent), child, slots, blocks, pending)
    for continuation, child in zip(chosen, children, strict=True):
        slot = _slot(child)
        slots.append(int32s([slot]), int32s([continuation.token]))
        slots.decoding[slot] = True
        pending.pushes[slot] = continuation.token
    search.order = [child.sample for child in children]
    return False


def _slot(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot


def _place(group: SequenceGroup, beams: list[Sequence], chosen: list[Continuation]) -> list[Sequence]:
    """Which sample each continuation becomes."""
    parents = {beams[continuation.parent].sample for continuation in chosen}
    unused = [sequence for sequence in group.sequences if sequence.sample not in parents]
    taken: set[int] = set()
    children = []
    for continuation in chosen:
        parent = beams[continuation.parent]
        children.append(unused.pop(0) if parent.sample in taken else parent)
        taken.add(parent.sample)
    return children


def _fork(
    parent: int, child: Sequence, slots: SlotTable, blocks: BlockManager, pending: Pending
) -> None:
    slot = _slot(child)
    blocks.free([slot])
    if slots.announced[slot]:
        pending.free_slots[slot] = None
        slots.announced[slot] = False
    blocks.fork(parent, slot)
    slots.copy(parent, slot)
    pending.forks.append((parent, slot, child.sample))
