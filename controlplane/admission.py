"""What it takes to bring a group onto the device: which blocks it finds, which it must take.

Three ways in. A *fresh* group has no output: one sample, the lead, prefills the prompt, and the others
hold slots until they fork from it. A group *with outputs* prefills each sample's own tokens; samples
share the full blocks of what they have in common. A *swapped* group gets its blocks copied back.
Everything here only reads.
"""

from dataclasses import dataclass, field

import numpy as np

from octavo.controlplane.block_manager import BlockManager
from octavo.controlplane.prefix import Entry, Path
from octavo.controlplane.sequence import Sequence, SequenceGroup
from octavo.proto.wire import Int32s


@dataclass
class Entrance:
    """How one sample comes in."""

    sequence: Sequence
    history: Int32s
    path: Path | None  # the full blocks of `history`; None without prefix reuse
    found: list[Entry] = field(default_factory=list)  # leading blocks that the index has
    # Leading blocks that another sample of the group computes: that sample and how many tokens.
    leader: Sequence | None = None
    led_tokens: int = 0


@dataclass
class Admission:
    """How a group comes in."""

    entrances: list[Entrance]
    wants: int  # available device blocks that it takes, those of its next tokens included
    hits: dict[int, int] = field(default_factory=dict)  # swapped blocks still on the device


def plan_admission(group: SequenceGroup, blocks: BlockManager) -> Admission:
    """How this group would come in now."""
    if group.is_swapped:
        return _swapped(group, blocks)
    if group.is_fresh:
        return _fresh(group, blocks)
    return _with_outputs(group, blocks)


@dataclass(slots=True)
class Single:
    """How a fresh group of one sample comes in whose prompt is computed at once."""

    group: SequenceGroup
    found: list[Entry]  # leading blocks that the index has
    cached: int  # of these, those that nobody holds
    fresh: int  # blocks to take for the rest of the prompt
    left: int  # tokens to compute
    wants: int  # as in `Admission`


def plan_single(group: SequenceGroup, blocks: BlockManager) -> Single:
    """How this group would come in now, if it has no output and one sample."""
    length, size = len(group.prompt), blocks.block_size
    # At least one token must be computed: its logits give the first output.
    found = blocks.find_prefix(group.path, length - 1) if group.path is not None else []
    cached = blocks.num_cached(found) if found else 0
    fresh = -(-length // size) - len(found)
    next_block = length % size == 0 and group.end > length + 1
    left = length - len(found) * size
    return Single(group, found, cached, fresh, left, wants=fresh + cached + next_block)


def _find(group: SequenceGroup, path: Path | None, blocks: BlockManager, limit: int) -> list[Entry]:
    if group.wants_prompt_scores:  # they need the logits of every prompt position
        return []
    return blocks.find_prefix(path, limit)


def _fresh(group: SequenceGroup, blocks: BlockManager) -> Admission:
    lead = group.live[0]
    found = _find(group, group.path, blocks, len(group.prompt) - 1)
    length = len(group.prompt)
    whole = blocks.blocks_for(max(length, min(length + 1, group.end - 1)))
    wants = whole - len(found) + blocks.num_cached(found)
    return Admission([Entrance(lead, group.prompt, group.path, found)], wants)


def _with_outputs(group: SequenceGroup, blocks: BlockManager) -> Admission:
    entrances: list[Entrance] = []
    wants, held = 0, set[int]()
    for sequence in group.live:
        entrance = _entrance(group, sequence, entrances, blocks)
        whole = blocks.blocks_for(min(len(entrance.history) + 1, group.end - 1))
        wants += whole - max(len(entrance.found), entrance.led_tokens // blocks.block_size)
        held.update(entry.block for entry in entrance.found)
        entrances.append(entrance)
    return Admission(entrances, wants + blocks.device.num_cached(list(held)))


def _entrance(
    group: SequenceGroup, sequence: Sequence, earlier: list[Entrance], blocks: BlockManager
) -> Entrance:
    history = group.history(sequence)
    path = blocks.path(group.cache_salt, history)
    entrance = Entrance(sequence, history, path, _find(group, path, blocks, len(history) - 1))
    for other in earlier:
        common = _common_tokens(history, other.history) // blocks.block_size * blocks.block_size
        if common > max(entrance.led_tokens, len(entrance.found) * blocks.block_size):
            entrance.leader, entrance.led_tokens = other.sequence, common
    if entrance.leader is not None:
        entrance.found = []
    return entrance


def _common_tokens(left: Int32s, right: Int32s) -> int:
    """Length of the common prefix that leaves each at least one token to compute."""
    length = min(len(left), len(right)) - 1
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


def _swapped(group: SequenceGroup, blocks: BlockManager) -> Admission:
    entrances, tables = [], []
    for sequence in group.live:
        assert sequence.swapped is not None
        history = group.history(sequence)
        path = blocks.path(group.cache_salt, history)
        found = blocks.find_prefix(path, sequence.swapped.computed)
        entrances.append(Entrance(sequence, history, path, found))
        tables.append(sequence.swapped)
    hits = blocks.hits_for(tables, [entrance.found for entrance in entrances])
    wants = blocks.swap_in_wants(tables, hits) + _next_blocks(group, blocks)
    return Admission(entrances, wants, hits)


def _next_blocks(group: SequenceGroup, blocks: BlockManager) -> int:
    """Blocks that the next tokens of a swapped group take: appended, or copied on write."""
    appended, written = 0, []
    for sequence in group.live:
        table = sequence.swapped
        assert table is not None
        if len(group.prompt) + len(sequence.outputs) >= group.end:
            continue
        index = table.computed // blocks.block_size
        if index == len(table.blocks):
            appended += 1
        else:
            written.append(int(table.blocks[index]))
    return appended + len(written) - len(set(written))
