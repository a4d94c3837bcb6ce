"""Rotary position embedding (Su et al., RoFormer, section 3.2), pairing the halves of a head."""

import torch
from torch import Tensor

from octavo.kernels.reference.kv_write import kv_write
from octavo.kernels.rows import KvScales


def rotary_table(head_dim: int, max_positions: int, theta: float) -> Tensor:
    """``[max_positions, head_dim]`` in float32: each position's cosines, then its sines."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse_frequencies = 1.0 / theta**exponents
    angles = torch.outer(torch.arange(max_positions).float(), inverse_frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotary(heads: Tensor, rotations: Tensor) -> Tensor:
    """Rotates dimension i against dimension i + head_dim / 2 by the angle of the token's position.

    Args:
        heads: ``[num_tokens, num_heads, head_dim]``, queries or keys.
        rotations: ``[num_tokens, head_dim]``, the rows of `rotary_table` at the tokens' positions.
    """
    cosines, sines = rotations.to(heads.dtype).unsqueeze(1).chunk(2, dim=-1)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


def rotary_kv_write(
    heads: Tensor,
    rotations: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_slots: Tensor,
    scales: KvScales | None = None,
) -> Tensor:
    """Rotates queries and keys, and stores keys and values as `kv_write` does.

    Args:
        heads: ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]``: queries, keys, values.
        rotations: as in `rotary`; the others as in `kv_write`.

    Returns:
        The queries, ``[num_tokens, num_heads, head_dim]``.
    """
    num_kv_heads = key_cache.shape[1]
    rotated = rotary(heads[:, :-num_kv_heads], rotations)
    query, keys = rotated[:, :-num_kv_heads], rotated[:, -num_kv_heads:]
    kv_write(keys, heads[:, -num_kv_heads:], key_cache, value_cache, kv_slots, scales)
    return query
