"""Reference counts, the free list, and the blocks that are kept for reuse, of one pool."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from octavo.proto.session import Pool
from octavo.proto.wire import Int32s


class OutOfBlocks(Exception):  # noqa: N818 (a condition that callers rule out, not a fault of theirs)
    """More blocks were asked for than are free. Callers check `available` first."""


class BlockPool:
    """`total` blocks. A block is free, cached (count 0, content kept), or held (count above 0)."""

    def __init__(
        self,
        total: int,
        contents: Sequence[object] = (),
        on_evict: Callable[[int], None] = lambda block: None,
    ) -> None:
        """
        Args:
            contents: what each block can be found for; None: it is not worth keeping at count 0.
                Empty: none is.
            on_evict: called before a kept block gets other content.
        """
        self.total = total
        self.counts = np.zeros(total, dtype=np.int32)
        self.pinned = np.zeros(total, dtype=np.bool_)
        self.num_pinned = 0
        self._free = np.arange(total - 1, -1, -1, dtype=np.int32)  # a stack; low ids first
        self._num_free = total
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._contents, self._on_evict = contents, on_evict

    @property
    def available(self) -> int:
        """Blocks that may be taken."""
        return self._num_free + len(self._cached)

    def take(self, count: int) -> Int32s:
        """`count` blocks with reference count 1. Raises OutOfBlocks and takes none."""
        if count > self._num_free:
            self._evict(count - self._num_free)
        self._num_free -= count
        blocks = self._free[self._num_free : self._num_free + count].copy()
        self.counts[blocks] = 1
        return blocks

    def _evict(self, count: int) -> None:
        if count > len(self._cached):
            raise OutOfBlocks(f"{count} more blocks wanted, {len(self._cached)} cached")
        for _ in range(count):
            block, _ = self._cached.popitem(last=False)
            self._on_evict(block)
            self._push(block)

    def _push(self, block: int) -> None:
        self._free[self._num_free] = block
        self._num_free += 1

    def share(self, blocks: Int32s) -> None:
        """One more reference to each of these distinct blocks."""
        if self._cached:
            for block in blocks[self.counts[blocks] == 0].tolist():
                del self._cached[block]
        self.counts[blocks] += 1

    def release(self, blocks: Int32s) -> None:
        """One reference less for each time that a block occurs, given in the order of tables.

        Those at count 0 become free, or cached where they can be found again: the last of a table
        first, so that it is evicted before what comes before it.
        """
        np.subtract.at(self.counts, blocks, 1)
        dead = blocks[self.counts[blocks] == 0].tolist()
        dead.reverse()
        if self._contents:
            contents, dead, named = self._contents, [], dead
            for block in named:
                if contents[block] is None:
                    dead.append(block)
                else:
                    self._cached[block] = None
        freed = list(dict.fromkeys(dead))  # each once
        self._free[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def mark_pinned(self, blocks: Int32s, pinned: bool) -> None:
        """Marks held blocks as pinned, or not any more."""
        self.pinned[blocks] = pinned
        self.num_pinned = int(self.pinned.sum())

    def num_cached(self, blocks: list[int]) -> int:
        """How many of these distinct blocks are kept at count 0."""
        return sum(block in self._cached for block in blocks)

    def state(self) -> Pool:
        used = self.total - self._num_free - len(self._cached) - self.num_pinned
        return Pool(
            total=self.total,
            free=self._num_free,
            cached=len(self._cached),
            pinned=self.num_pinned,
            used=used,
        )

    def check(self, references: Int32s) -> None:
        """Raises AssertionError unless the counts equal `references` and all else is free or cached."""
        assert np.array_equal(self.counts, references), "reference counts differ from the tables"
        free = self._free[: self._num_free].tolist()
        idle = sorted([*free, *self._cached])
        assert idle == np.flatnonzero(self.counts == 0).tolist(), "the free list is wrong"
        assert all(self.counts[self.pinned] > 0), "a pinned block is not held"
        assert self.num_pinned == int(self.pinned.sum()), "pinned blocks are counted wrong"
