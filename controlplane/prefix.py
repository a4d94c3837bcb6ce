"""Which full blocks hold the KV of which tokens: the index behind prefix reuse.

An entry names a block by the tokens in it and by the entry before it, so a chain of entries stands for
all tokens from the start. Lookups go by a chained hash (the idea of RadixAttention's and vLLM's
prefix caches); a hit counts only if the entry's tokens are equal and its parent is the very entry found
one step before, so that colliding hashes cost a miss and never a wrong answer.
"""

import hashlib
from collections.abc import Callable
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


@dataclass(frozen=True, slots=True)
class Path:
    """The full blocks of a token list, hashed once: it is looked up and added under the same keys."""

    root: Entry
    blocks: list[bytes]  # int32 tokens of each
    keys: list[bytes]


class PrefixIndex:
    """Entries by key, and by block. Knows nothing of reference counts."""

    def __init__(self, num_blocks: int, hash_function: Hash = chained_hash) -> None:
        self._hash = hash_function
        self._entries: dict[bytes, Entry] = {}
        # [num_blocks] the entry of each block, None where it cannot be found. Others may read it.
        self.contents: list[Entry | None] = [None] * num_blocks

    def root(self, salt: str) -> Entry:
        """Where the chains of this salt begin; different salts share nothing."""
        return Entry(self._hash(b"salt", salt.encode()), None, salt.encode(), 0)

    def path(self, salt: str, tokens: bytes, block_bytes: int) -> Path:
        """The keys of the full blocks of `tokens`, from the start."""
        root = self.root(salt)
        starts = range(0, len(tokens) - block_bytes + 1, block_bytes)
        blocks = [tokens[start : start + block_bytes] for start in starts]
        return Path(root, blocks, self.keys_after(root, blocks))

    def find(self, path: Path, limit: int) -> list[Entry]:
        """The longest known chain of at most `limit` blocks from the start of the path."""
        chain: list[Entry] = []
        if not limit or not path.keys or path.keys[0] not in self._entries:
            return chain
        parent = path.root
        for key, tokens in zip(path.keys[:limit], path.blocks, strict=False):
            entry = self._entries.get(key)
            if entry is None or not _continues(entry, parent, tokens):
                break
            chain.append(entry)
            parent = entry
        return chain

    def keys_after(self, parent: Entry, contents: list[bytes]) -> list[bytes]:
        """The keys of blocks of these tokens that follow `parent`, one after the other."""
        keys, key = [], parent.key
        for tokens in contents:
            key = self._hash(key, tokens)
            keys.append(key)
        return keys

    def extend(
        self, parent: Entry, keys: list[bytes], contents: list[bytes], blocks: list[int]
    ) -> Entry:
        """Makes blocks findable that follow `parent`, one after the other.

        Where the same content is indexed already, that entry stays.

        Returns:
            The entry of the last one.
        """
        entries, by_block = self._entries, self.contents
        for key, tokens, block in zip(keys, contents, blocks, strict=True):
            entry = entries.get(key)
            if entry is None or not _continues(entry, parent, tokens):
                if entry is not None:
                    by_block[entry.block] = None
                entry = entries[key] = by_block[block] = Entry(key, parent, tokens, block)
            parent = entry
        return parent

    def forget(self, block: int) -> None:
        """The block gets other content."""
        entry, self.contents[block] = self.contents[block], None
        if entry is not None:
            del self._entries[entry.key]

    def __len__(self) -> int:
        return len(self._entries)


def _continues(entry: Entry, parent: Entry, tokens: bytes) -> bool:
    """Whether the entry holds these tokens after that parent, whatever its key says."""
    return entry.tokens == tokens and (entry.parent is parent or _same_root(entry.parent, parent))


def _same_root(left: Entry | None, right: Entry) -> bool:
    """Roots are made anew for each path and equal by their salt."""
    return left is not None and left.parent is right.parent is None and left.tokens == right.tokens
