"""What a gang of given workers can hold."""

import logging
from collections.abc import Sequence

from octavo.controlplane.draft import Shape
from octavo.controlplane.options import ControlPlaneOptions
from octavo.controlplane.preemption import Speeds
from octavo.proto.session import Register

log = logging.getLogger(__name__)


class RankRefused(Exception):  # noqa: N818 (an answer to the worker)
    """A worker that cannot take part; the text goes to it and says what to do."""


def shape_of(
    ranks: Sequence[Register], options: ControlPlaneOptions, epoch: int, block_size: int | None
) -> Shape:
    """What a gang of these workers can hold: as many blocks as the rank with the fewest.

    Args:
        ranks: in the order of their ranks.
        block_size: of the other gangs; None where there are none.

    Raises:
        RankRefused: the last one that registered does not go with the rest, or holds too little.
    """
    first = ranks[0]
    size = block_size or options.block_size or first.preferred_block_size
    for register in ranks:
        _check_block_size(register, size)
    num_blocks = min(_device_blocks(register, size) for register in ranks)
    return Shape(
        epoch=epoch,
        block_size=size,
        num_blocks=num_blocks,
        num_cpu_blocks=min(_swap_blocks(register, size) for register in ranks),
        num_slots=options.max_num_seqs,
        max_model_len=_max_model_len(first, options, num_blocks * size),
        max_batched_tokens=options.max_num_batched_tokens,
        prefill_chunk=options.prefill_chunk or options.max_num_batched_tokens,
        watermark=options.watermark,
        block_bytes=size * sum(register.token_bytes for register in ranks),
        preemption=options.preemption,
        prefix_caching=options.prefix_caching,
    )


def speeds_of(ranks: Sequence[Register], block_size: int) -> Speeds:
    """What the slowest worker measured when it started, in blocks and tokens."""
    return Speeds(
        copy=min(r.copy_bandwidth / max(block_size * r.token_bytes, 1) for r in ranks),
        prefill=min(r.prefill_speed for r in ranks),
    )


def _device_blocks(register: Register, block_size: int) -> int:
    if register.num_kv_blocks is not None:
        return register.num_kv_blocks
    return register.kv_bytes // max(block_size * register.token_bytes, 1)


def _swap_blocks(register: Register, block_size: int) -> int:
    if register.swap_blocks is not None:
        return register.swap_blocks
    return register.swap_bytes // max(block_size * register.token_bytes, 1)


def _check_block_size(register: Register, wanted: int) -> None:
    supported = register.block_sizes.tolist()
    if supported and wanted not in supported:
        raise RankRefused(
            f"--block-size {wanted} is not supported by the {register.engine} engine on "
            f"{register.device}, which takes {', '.join(map(str, supported))}: start the worker "
            f"with --block-size {wanted} too, or with --engine torch, which takes any"
        )


def _max_model_len(register: Register, options: ControlPlaneOptions, capacity: int) -> int:
    """Tokens that one sequence may have; `capacity` is what the KV pool holds."""
    of_model, wanted = register.model.max_model_len, options.max_model_len
    if wanted is not None and wanted > of_model:
        raise RankRefused(
            f"--max-model-len {wanted} exceeds the {of_model} positions of {register.model.name}"
        )
    longest = wanted or of_model
    advice = "raise --num-kv-blocks or --kv-memory"
    if capacity < 1:
        raise RankRefused(f"the KV pool is too small for one sequence: it has no block; {advice}")
    if wanted is not None and capacity < wanted:
        raise RankRefused(
            f"the KV pool is too small for one sequence: it holds {capacity} tokens, --max-model-len "
            f"asks for {wanted}; {advice}, or lower --max-model-len"
        )
    if capacity < longest:
        log.warning(
            "the KV pool holds %d tokens, less than the model's %d: longer sequences are refused or "
            "stop there; %s",
            capacity,
            longest,
            advice,
        )
    return min(longest, capacity)
