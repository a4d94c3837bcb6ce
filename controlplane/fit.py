"""What could ever fit: where a request must end, and what it needs then."""

from collections.abc import Iterable

import numpy as np

from octavo.controlplane.draft import Shape
from octavo.controlplane.sequence import SequenceGroup
from octavo.proto.wire import Int32s

Reserved = dict[str, tuple[str, Int32s]]  # registered prefixes: {name: (salt, tokens)}


class NeverFits(Exception):  # noqa: N818 (an answer to the client)
    """The pool could never hold the group; the text names the field and the limit."""


def fit(group: SequenceGroup, shape: Shape, reserved: Reserved) -> int:
    """The tokens, prompt included, at which a group must end. Raises NeverFits."""
    prompt, n = len(group.prompt), len(group.sequences)
    if n > shape.num_slots:
        raise NeverFits(
            f"n: {n} samples exceed the limit of {shape.num_slots} sequences that run at once"
        )
    if prompt > shape.max_model_len or (prompt == shape.max_model_len and group.max_tokens):
        raise NeverFits(
            f"prompt: {prompt} tokens leave no room in a context of {shape.max_model_len} tokens"
        )
    room = _room_for(group, shape, reserved.values())
    held = room * shape.block_size
    if prompt > held:
        raise NeverFits(f"prompt: {prompt} tokens exceed the {held} tokens that the KV pool holds")
    shared = prompt // shape.block_size
    of_each = (shared + (room - shared) // n) * shape.block_size  # tokens with KV
    longest = max(of_each, prompt) + 1  # the last token needs no KV
    return min(prompt + group.max_tokens, shape.max_model_len, longest)


def _room_for(group: SequenceGroup, shape: Shape, reserved: Iterable[tuple[str, Int32s]]) -> int:
    """Blocks that the group could have at most: all but those reserved for other prompts."""
    room, own = shape.num_blocks, 0
    for salt, tokens in reserved:
        blocks = len(tokens) // shape.block_size
        room -= blocks
        prefix = tokens[: blocks * shape.block_size]
        if salt == group.cache_salt and np.array_equal(group.prompt[: len(prefix)], prefix):
            own = max(own, blocks)
    # What the group finds pinned is its own; one that wants scores of its prompt looks for nothing.
    return room if group.wants_prompt_scores else room + own


def longest_need(group: SequenceGroup, shape: Shape) -> int:
    """Blocks of a group when all its samples are as long as they may become."""
    shared = len(group.prompt) // shape.block_size
    whole = -(-max(group.end - 1, len(group.prompt)) // shape.block_size)
    return shared + len(group.sequences) * (whole - shared)
