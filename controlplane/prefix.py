"""Which full blocks hold the KV of which tokens: the index behind prefix reuse.

An entry names a block by the tokens in it and by the entry before it, so a chain of entries stands for
all tokens from the start. Lookups go by a chained hash (the idea of RadixAttention's and vLLM's
prefix caches); a hit counts only if the entry's tokens are equal and its parent is the very entry found
one step before, so that colliding hashes cost a miss and never a wrong answer.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Hash = Callable[[bytes, bytes], bytes]


def chained_hash(parent: bytes, tokens: bytes) -> bytes:
    """The key of a block: of its tokens and, through `parent`, of all before them."""
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()


@dataclass(slots=True, eq=False)
class Entry:
    """A block in the index. The root of a chain has no block."""

    key: bytes
    parent: "Entry | None"
    tokens: bytes  # int32 of one block
    block: int


class PrefixIndex:
    """Entries by key, and by block. Knows nothing of reference counts."""

    def __init__(self, hash_function: Hash = chained_hash) -> None:
        self._hash = hash_function
        self._entries: dict[bytes, Entry] = {}
        self._by_block: dict[int, Entry] = {}

    def root(self, salt: str) -> Entry:
        """Where the chains of this salt begin; different salts share nothing."""
        return Entry(self._hash(b"salt", salt.encode()), None, salt.encode(), 0)

    def find(self, parent: Entry, tokens: bytes) -> Entry | None:
        """The entry that continues `parent` with a block of these tokens."""
        entry = self._entries.get(self._hash(parent.key, tokens))
        if entry is None or entry.tokens != tokens or not _same(entry.parent, parent):
            return None
        return entry

    def walk(self, root: Entry, tokens: bytes, block_bytes: int) -> Iterator[Entry]:
        """The longest known chain of full blocks from the start of `tokens`."""
        entry = root
        for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
            found = self.find(entry, tokens[start : start + block_bytes])
            if found is None:
                return
            yield found
            entry = found

    def add(self, parent: Entry, tokens: bytes, block: int) -> Entry:
        """Makes a block findable; where the same content is indexed already, that entry is returned."""
        found = self.find(parent, tokens)
        if found is not None:
            return found
        entry = Entry(self._hash(parent.key, tokens), parent, tokens, block)
        old = self._entries.get(entry.key)
        if old is not None:
            del self._by_block[old.block]
        self._entries[entry.key] = entry
        self._by_block[block] = entry
        return entry

    def holds(self, block: int) -> bool:
        """Whether this block can be found."""
        return block in self._by_block

    def forget(self, block: int) -> None:
        """The block gets other content."""
        entry = self._by_block.pop(block, None)
        if entry is not None:
            del self._entries[entry.key]

    def __len__(self) -> int:
        return len(self._entries)


def _same(left: Entry | None, right: Entry) -> bool:
    """Roots are made anew for each lookup and equal by their salt; other entries are themselves."""
    if left is right:
        return True
    return left is not None and left.parent is right.parent is None and left.tokens == right.tokens
