"""Who holds which KV block: reference counts, block tables, copy-on-write.

Tables are rows of one array, indexed by slot, so that an iteration in which n sequences need a block
costs a few array operations and not n calls.
"""

import numpy as np

from octavo.proto.session import Pool
from octavo.proto.wire import Int32s


class OutOfBlocks(Exception):  # noqa: N818 (a condition that callers rule out, not a fault of theirs)
    """More blocks were asked for than are free. Callers check `free_blocks` first."""


class BlockPool:
    """Reference counts and the free list of one pool of `total` blocks."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.counts = np.zeros(total, dtype=np.int32)
        self._free = np.arange(total - 1, -1, -1, dtype=np.int32)  # a stack; low ids first
        self.num_free = total

    def take(self, count: int) -> Int32s:
        """`count` blocks with reference count 1. Raises OutOfBlocks and takes none."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} free")
        self.num_free -= count
        blocks = self._free[self.num_free : self.num_free + count].copy()
        self.counts[blocks] = 1
        return blocks

    def share(self, blocks: Int32s) -> None:
        """One more reference to each of these distinct blocks."""
        self.counts[blocks] += 1

    def release(self, blocks: Int32s) -> None:
        """One reference less to each of these distinct blocks; those at count 0 become free."""
        self.counts[blocks] -= 1
        dead = blocks[self.counts[blocks] == 0]
        self._free[self.num_free : self.num_free + len(dead)] = dead
        self.num_free += len(dead)

    def state(self) -> Pool:
        return Pool(total=self.total, free=self.num_free, used=self.total - self.num_free)

    def check(self, references: Int32s) -> None:
        """Raises AssertionError unless the counts equal `references` and free = the rest."""
        assert np.array_equal(self.counts, references), "reference counts differ from the tables"
        free = np.sort(self._free[: self.num_free])
        assert np.array_equal(free, np.flatnonzero(self.counts == 0)), "the free list is wrong"


class BlockManager:
    """Block tables of all slots over the device pool; the CPU swap pool beside it."""

    def __init__(
        self, num_blocks: int, num_cpu_blocks: int, block_size: int, num_slots: int, max_len: int
    ):
        self.block_size = block_size
        self.device = BlockPool(num_blocks)
        self.swap = BlockPool(num_cpu_blocks)
        # Rows are touched only as far as they are used, so the array costs address space, not memory.
        self._tables = np.zeros((num_slots, self.blocks_for(max_len)), dtype=np.int32)
        self.lengths = np.zeros(num_slots, dtype=np.int32)  # [num_slots] blocks in each table

    @property
    def free_blocks(self) -> int:
        """Device blocks that may be taken."""
        return self.device.num_free

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold the KV of `tokens` tokens."""
        return -(-tokens // self.block_size)

    def table(self, slot: int) -> Int32s:
        """The block table of a slot. Do not write it."""
        return self._tables[slot, : self.lengths[slot]]

    def allocate(self, slot: int, tokens: int, shared: Int32s) -> Int32s:
        """Gives an empty slot a table for `tokens` tokens that begins with the `shared` blocks.

        Raises OutOfBlocks and changes nothing.
        """
        fresh = self.device.take(self.blocks_for(tokens) - len(shared))
        self.device.share(shared)
        length = len(shared) + len(fresh)
        self._tables[slot, : len(shared)] = shared
        self._tables[slot, len(shared) : length] = fresh
        self.lengths[slot] = length
        return self.table(slot)

    def append(self, slots: Int32s) -> Int32s:
        """One fresh block at the end of each slot's table. Raises OutOfBlocks and changes nothing."""
        blocks = self.device.take(len(slots))
        self._tables[slots, self.lengths[slots]] = blocks
        self.lengths[slots] += 1
        return blocks

    def fork(self, parent: int, child: int) -> None:
        """Gives an empty slot the table of another; both share every block."""
        table = self.table(parent)
        self.device.share(table)
        self._tables[child, : len(table)] = table
        self.lengths[child] = len(table)

    def is_shared(self, slots: Int32s, indices: Int32s) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether others hold the block at this index of each slot's table."""
        shared: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
            self.device.counts[self._tables[slots, indices]] > 1
        )
        return shared

    def copies_wanted(self, slots: Int32s, indices: Int32s) -> int:
        """Blocks that copy-on-write takes before each slot may write its block at this index.

        Of the holders of a block all but one copy it, if all of them write.
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

    def free(self, slot: int) -> None:
        """Empties a slot's table; blocks that nobody else holds become free."""
        self.device.release(self.table(slot))
        self.lengths[slot] = 0

    def check(self) -> None:
        """Raises AssertionError unless every count equals the table entries that name the block."""
        entries = [self.table(int(slot)) for slot in np.flatnonzero(self.lengths)]
        named = np.concatenate(entries) if entries else np.zeros(0, dtype=np.int32)
        self.device.check(np.bincount(named, minlength=self.device.total).astype(np.int32))
        self.swap.check(np.zeros(self.swap.total, dtype=np.int32))
