"""Who holds which KV block: block tables, sharing, copy-on-write, swapping, prefix reuse.

Tables are rows of one array, indexed by slot, so that an iteration in which n sequences need a block
costs a few array operations and not n calls.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from octavo.controlplane.block_pool import BlockPool
from octavo.controlplane.prefix import Entry, Path, PrefixIndex
from octavo.proto.wire import Int32s, int32s


@dataclass(frozen=True, eq=False)
class SwappedTable:
    """A block table in CPU memory."""

    blocks: Int32s
    computed: int  # tokens whose KV the blocks hold


@dataclass(frozen=True)
class Usage:
    """How well the blocks that sequences hold are used."""

    tokens: int  # whose KV is there, shared ones counted once
    physical: int  # blocks held, pinned ones included
    logical: int  # entries of block tables: what it would take without sharing


class BlockManager:
    """Block tables of all slots over the device pool; swapped tables over the CPU pool."""

    def __init__(
        self,
        num_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        num_slots: int,
        max_len: int,
        index: PrefixIndex | None = None,
    ) -> None:
        self.block_size = block_size
        self.index = index  # None: no prefix reuse
        if index is None:
            self.device = BlockPool(num_blocks)
        else:
            self.device = BlockPool(num_blocks, index.contents, index.forget)
        self.swap = BlockPool(num_cpu_blocks)
        # Rows are touched only as far as they are used, so the array costs address space, not memory.
        self._tables = np.zeros((num_slots, self.blocks_for(max_len)), dtype=np.int32)
        self.lengths = np.zeros(num_slots, dtype=np.int32)  # [num_slots] blocks in each table
        self.forked: set[int] = set()  # slots whose last block others may hold: they copy it on write
        self._swapped: set[SwappedTable] = set()
        self._pins: dict[str, Int32s] = {}
        self._chains: list[Entry | None] = [None] * num_slots  # the last block of each in the index
        self.indexed = np.zeros(num_slots, dtype=np.int32)  # [num_slots] blocks that can be found

    @property
    def num_entries(self) -> int:
        """Of all tables."""
        return int(self.lengths.sum())

    @property
    def available(self) -> int:
        """Device blocks that may be taken, cached ones included."""
        return self.device.available

    def num_cached(self, found: list[Entry]) -> int:
        """How many of these entries' blocks nobody holds: taking them makes fewer available."""
        return self.device.num_cached([entry.block for entry in found]) if found else 0

    @property
    def num_pinned(self) -> int:
        """Device blocks that no sequence can have for itself."""
        return self.device.num_pinned

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold the KV of `tokens` tokens."""
        return -(-tokens // self.block_size)

    def table(self, slot: int) -> Int32s:
        """The block table of a slot. Do not write it."""
        return self._tables[slot, : self.lengths[slot]]

    # -- growing and sharing -----------------------------------------------------------------------

    def allocate(self, slot: int, tokens: int, shared: Int32s) -> Int32s:
        """Gives an empty slot a table for `tokens` tokens that begins with the `shared` blocks.

        Raises OutOfBlocks.
        """
        length, held = self.blocks_for(tokens), len(shared)
        table = self._tables[slot, :length]
        if held:
            self.device.share(shared)  # first: a cached block that is shared must not be evicted
            table[:held] = shared
        table[held:] = self.device.take(length - held)
        self.lengths[slot] = length
        return table

    def allocate_all(self, slots: list[int], lengths: list[int], shared: list[list[Entry]]) -> Int32s:
        """Gives each of these empty slots a table of so many blocks.

        Args:
            shared: what each table begins with; references to these were taken with `share`.

        Returns:
            All tables, one after the other.

        Raises:
            OutOfBlocks: nothing was changed.
        """
        held = sum(map(len, shared))
        tables = self.device.take(sum(lengths) - held)
        if held:
            tables = _interleave(tables, lengths, shared)
        end = 0
        for slot, length in zip(slots, lengths, strict=True):
            self._tables[slot, :length] = tables[end : end + length]
            end += length
        self.lengths[slots] = lengths
        return tables

    def share(self, found: list[Entry]) -> None:
        """Takes a reference to the blocks of these entries, for a table that will name them."""
        if found:
            self.device.share(int32s([entry.block for entry in found]))

    def append(self, slots: Int32s) -> tuple[Int32s, Int32s]:
        """One fresh block at the end of each slot's table. Raises OutOfBlocks and changes nothing.

        Returns:
            The index of each new entry in its table, and its block.
        """
        blocks, indices = self.device.take(len(slots)), self.lengths[slots]
        self._tables[slots, indices] = blocks
        self.lengths[slots] = indices + 1
        return indices, blocks

    def fork(self, parent: int, child: int) -> None:
        """Gives an empty slot the table of another; both share every block."""
        table = self.table(parent)
        self.device.share(table)
        self._tables[child, : len(table)] = table
        self.lengths[child] = len(table)
        self.forked.update((parent, child))
        self._chains[child], self.indexed[child] = self._chains[parent], self.indexed[parent]

    def is_shared(self, slots: Int32s, indices: Int32s) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether others hold the block at this index of each slot's table."""
        shared: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
            self.device.counts[self._tables[slots, indices]] > 1
        )
        return shared

    def copies_wanted(self, slots: Int32s, indices: Int32s) -> int:
        """Blocks that copy-on-write takes before each slot may write its block at this index.

        Of the holders of a block all but one copy it, if all of them write. Only `forked` slots write
        blocks that others hold: all else that is shared are full blocks.
        """
        blocks = self._tables[slots, indices]
        blocks = blocks[self.device.counts[blocks] > 1]
        if not len(blocks):
            return 0
        distinct, writers = np.unique(blocks, return_counts=True)
        return int((writers - (writers == self.device.counts[distinct])).sum())

    def copy_on_write(self, slot: int, index: int) -> tuple[int, int] | None:
        """Makes the block at `index` of a slot's table its own before a write.

        Returns:
            (source, destination) of the copy to make, or None where the block is its own already.

        Raises:
            OutOfBlocks: nothing was changed.
        """
        source = int(self._tables[slot, index])
        if self.device.counts[source] == 1:
            return None
        destination = self.device.take(1)
        self.device.release(np.array([source], dtype=np.int32))
        self._tables[slot, index] = destination[0]
        return source, int(destination[0])

    def free(self, slots: list[int]) -> None:
        """Empties the slots' tables; blocks that nobody else holds become free or cached."""
        lengths = self.lengths[slots]
        self.forked.difference_update(slots)
        columns = np.arange(lengths.max(initial=0))
        self.device.release(self._tables[slots, : len(columns)][columns < lengths[:, None]])
        self.lengths[slots] = self.indexed[slots] = 0
        for slot in slots:
            self._chains[slot] = None

    # -- swapping ------------------------------------------------------------------------------------

    def can_swap_out(self, slots: list[int]) -> bool:
        """Whether the CPU pool has room for every block of these slots, shared ones counted once."""
        return len(self._distinct(slots)) <= self.swap.available

    def num_distinct(self, slots: list[int]) -> int:
        """Blocks that these slots' tables name, shared ones counted once."""
        return len(self._distinct(slots))

    def num_held(self, slots: list[int]) -> int:
        """Blocks that nobody but these slots holds."""
        named = np.concatenate([int32s(), *(self.table(slot) for slot in slots)])
        blocks, entries = np.unique(named, return_counts=True)
        return int((self.device.counts[blocks] == entries).sum())

    def _distinct(self, slots: list[int]) -> Int32s:
        return np.unique(np.concatenate([self.table(slot) for slot in slots]))

    def swap_out(self, slots: list[int], computed: list[int]) -> tuple[list[SwappedTable], Int32s]:
        """Moves whole tables to CPU memory; what they share moves once and stays shared.

        Returns:
            The swapped tables, and the copies to make: ``[n, 2]`` of (device block, cpu block).
        """
        sources = self._distinct(slots)
        destinations = self.swap.take(len(sources))
        self.swap.counts[destinations] = 0
        tables = []
        for slot, tokens in zip(slots, computed, strict=True):
            blocks = destinations[np.searchsorted(sources, self.table(slot))]
            self.swap.counts[blocks] += 1
            tables.append(SwappedTable(blocks, tokens))
        self.free(slots)
        self._swapped.update(tables)
        return tables, np.stack([sources, destinations], axis=1)

    def hits_for(self, tables: list[SwappedTable], chains: list[list[Entry]]) -> dict[int, int]:
        """Which swapped blocks are still on the device: {cpu block: device block}.

        Args:
            chains: for each table, the index's entries for its tokens from the start.
        """
        hits: dict[int, int] = {}
        for table, chain in zip(tables, chains, strict=True):
            for block, entry in zip(table.blocks.tolist(), chain, strict=False):
                hits[block] = entry.block
        return hits

    def swap_in_wants(self, tables: list[SwappedTable], hits: dict[int, int]) -> int:
        """Available device blocks that `swap_in` takes."""
        distinct = np.unique(np.concatenate([table.blocks for table in tables]))
        return len(distinct) - len(hits) + self.device.num_cached(list(set(hits.values())))

    def swap_in(self, slots: list[int], tables: list[SwappedTable], hits: dict[int, int]) -> Int32s:
        """Moves whole tables back into these empty slots.

        Returns:
            The copies to make: ``[n, 2]`` of (cpu block, device block).

        Raises:
            OutOfBlocks: see `swap_in_wants`.
        """
        kept = int32s(sorted(set(hits.values())))
        self.device.share(kept)  # first: a cached block that is wanted must not be evicted
        distinct = np.unique(np.concatenate([table.blocks for table in tables])).tolist()
        missing = [block for block in distinct if block not in hits]
        fresh = self.device.take(len(missing))
        self.device.counts[fresh] = 0
        places = {**hits, **dict(zip(missing, fresh.tolist(), strict=True))}
        for slot, table in zip(slots, tables, strict=True):
            blocks = int32s([places[block] for block in table.blocks.tolist()])
            self.device.counts[blocks] += 1
            self._tables[slot, : len(blocks)] = blocks
            self.lengths[slot] = len(blocks)
            self.drop(table)
        if len(slots) > 1:
            self.forked.update(slots)
        self.device.release(kept)
        return np.stack([int32s(missing), fresh], axis=1)

    def drop(self, table: SwappedTable) -> None:
        """Forgets a swapped table; CPU blocks that no other one names become free."""
        self._swapped.remove(table)
        self.swap.release(table.blocks)

    # -- prefix reuse --------------------------------------------------------------------------------

    def path(self, salt: str, tokens: Int32s) -> Path | None:
        """The full blocks of `tokens` as `find_prefix` wants them; None without prefix reuse."""
        if self.index is None:
            return None
        return self.index.path(salt, tokens.tobytes(), 4 * self.block_size)

    def find_prefix(self, path: Path | None, limit: int) -> list[Entry]:
        """Entries of the longest known chain of at most `limit` tokens from the start of a path."""
        if self.index is None or path is None:
            return []
        return self.index.find(path, limit // self.block_size)

    @contextmanager
    def keeping(self, found: list[Entry]) -> Iterator[None]:
        """Inside, these entries' blocks are not evicted: all of a group's are wanted together."""
        blocks = int32s(sorted({entry.block for entry in found}))
        self.device.share(blocks)
        yield
        self.device.release(blocks)

    def start_chain(self, slot: int, path: Path | None, found: list[Entry]) -> None:
        """From now on `extend_index` may be called for the slot; its table begins with `found`."""
        if self.index is not None and path is not None:
            self._chains[slot] = found[-1] if found else path.root
            self.indexed[slot] = len(found)

    def extend_index(
        self,
        slots: list[int],
        computed: Int32s,
        tokens: Callable[[int], Int32s],
        paths: list[Path | None],
    ) -> None:
        """Makes the full blocks of the slots' first `computed` tokens findable.

        Their KV must be computed by a plan that has been sent.

        Args:
            tokens: those of a slot.
            paths: those of the slots' prompts: the part that they cover need not be hashed again.
        """
        if self.index is None or not slots:
            return
        indexed, full = self.indexed[slots], computed // self.block_size
        firsts, lasts = indexed.tolist(), full.tolist()
        left = min(firsts)
        tables = self._tables[slots, left : max(lasts)].tolist()
        entries = zip(slots, firsts, lasts, tables, paths, strict=True)
        for slot, first, last, table, path in entries:
            entry = self._chains[slot]
            if entry is None or first >= last:
                continue
            if path is not None and first == 0 and last == len(path.keys):
                keys, contents = path.keys, path.blocks
            elif path is not None and last <= len(path.keys):
                keys, contents = path.keys[first:last], path.blocks[first:last]
            else:
                contents = self._contents(tokens(slot), first, last)
                keys = self.index.keys_after(entry, contents)
            blocks = table[first - left : last - left]
            self._chains[slot] = self.index.extend(entry, keys, contents, blocks)
        self.indexed[slots] = np.maximum(indexed, full)

    def _contents(self, tokens: Int32s, first: int, last: int) -> list[bytes]:
        """The tokens of blocks first .. last, as the index keeps them."""
        size = self.block_size
        return [tokens[n * size : (n + 1) * size].tobytes() for n in range(first, last)]

    def pin(self, name: str, found: list[Entry]) -> None:
        """Holds the blocks of these entries under a name until `unpin`."""
        blocks = int32s([entry.block for entry in found])
        self.device.share(blocks)
        self.device.mark_pinned(blocks, True)
        self._pins[name] = blocks

    def unpin(self, name: str) -> None:
        """Gives up what `pin` held. Raises KeyError."""
        blocks = self._pins.pop(name)
        still = np.concatenate([int32s(), *self._pins.values()])
        self.device.mark_pinned(blocks[~np.isin(blocks, still)], False)
        self.device.release(blocks)

    # -- what operators see --------------------------------------------------------------------------

    def usage(self, computed: Int32s) -> Usage:
        """How well the device pool is used.

        Args:
            computed: ``[num_slots]`` tokens whose KV each slot's table holds.
        """
        slots = np.flatnonzero(self.lengths)
        if not len(slots):
            return Usage(0, 0, 0)
        last = self._tables[slots, self.lengths[slots] - 1]
        # Of blocks that several tables end with, the fullest counts; all others are full.
        order = np.argsort(computed[slots] - self.lengths[slots] * self.block_size, kind="stable")
        room = dict(zip(last[order].tolist(), order.tolist(), strict=True))
        unused = sum(
            int(self.lengths[slots[i]]) * self.block_size - int(computed[slots[i]])
            for i in room.values()
        )
        physical = self.device.total - self.device.available
        return Usage(physical * self.block_size - unused, physical, self.num_entries)

    # -- integrity -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError unless every count equals the table entries that name the block."""
        tables = [self.table(int(slot)) for slot in np.flatnonzero(self.lengths)]
        self.device.check(_count([*tables, *self._pins.values()], self.device.total))
        self.swap.check(_count([table.blocks for table in self._swapped], self.swap.total))
        pinned = np.unique(np.concatenate([int32s(), *self._pins.values()]))
        assert np.array_equal(pinned, np.flatnonzero(self.device.pinned)), (
            "pins differ from their marks"
        )


def _interleave(fresh: Int32s, lengths: list[int], shared: list[list[Entry]]) -> Int32s:
    """Tables that begin with shared blocks and go on with fresh ones."""
    parts, begin = [], 0
    for length, entries in zip(lengths, shared, strict=True):
        end = begin + length - len(entries)
        parts += [int32s([entry.block for entry in entries]), fresh[begin:end]]
        begin = end
    return np.concatenate(parts)


def _count(tables: list[Int32s], total: int) -> Int32s:
    named = np.concatenate([int32s(), *tables])
    return np.bincount(named, minlength=total).astype(np.int32)
