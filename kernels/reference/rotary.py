"""Rotary position embedding (Su et al., RoFormer, section 3.2), pairing the halves of a head."""

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.kernels.reference.kv_write import kv_write
from octavo.kernels.rows import KvScales


def inverse_frequencies(rotary_dim: int, theta: float) -> Tensor:
    """``[rotary_dim / 2]`` in float32: radians per position of each pair of dimensions."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    return 1.0 / theta**exponents


def rotary_table(
    frequencies: Tensor, max_positions: int, attention_factor: float = 1.0, num_fixed: int = 0
) -> Tensor:
    """``[max_positions, head_dim]`` in float32: each position's cosines, then its sines.

    Args:
        frequencies: radians per position of each pair that turns.
        attention_factor: of cosines and sines, so that rotated vectors become longer by it.
        num_fixed: further pairs, which stay as they are; head_dim is twice the number of all pairs.
    """
    angles = torch.outer(torch.arange(max_positions).float(), frequencies)
    cosines = F.pad(angles.cos() * attention_factor, (0, num_fixed), value=1.0)
    sines = F.pad(angles.sin() * attention_factor, (0, num_fixed))
    return torch.cat((cosines, sines), dim=-1)


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
