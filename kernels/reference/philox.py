"""Philox4x32-10, a counter-based random number generator, and the noise that sampling needs.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3. The value
at a counter depends on the key and the counter only, so a token's randomness does not depend on what
else is in its batch.
"""

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Four words of 32 random bits for each counter.

    Args:
        counter: four int64 tensors and
        key: two int64 tensors that broadcast together; the values are unsigned words of 32 bits.

    Returns:
        four int64 tensors of the broadcast shape, values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # An int64 product wraps, but its 64 bits are those of the unsigned product.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _LOW, (product1 >> 32) & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _LOW, high0 ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniform(bits: Tensor) -> Tensor:
    """Words of 32 random bits as float32 in the open interval (0, 1).

    The upper 23 bits plus a half, times 2^-23: each value is exact in float32, so none rounds to 1,
    where Gumbel noise would be infinite.
    """
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def gumbel_noise(seeds: Tensor, positions: Tensor, samples: Tensor, ids: Tensor) -> Tensor:
    """Gumbel(0, 1) noise of vocabulary ids: float32 of the shape of `ids`, in [-2.82, 16.64].

    Args:
        seeds: ``[num_rows]`` int64, the bits of the unsigned 64-bit seed: the key.
        positions: ``[num_rows]``, the absolute position of the token being drawn.
        samples: ``[num_rows]``, the index of the sample in its request.
        ids: ``[num_rows, n]`` vocabulary ids. The counter is (position, sample, id // 4, 0); of its
            four words id % 4 names one.
    """
    ids = ids.long()
    counter = (positions.long()[:, None], samples.long()[:, None], ids // 4, torch.zeros_like(ids))
    words = torch.stack(philox4x32(counter, key_of(seeds[:, None])), dim=-1)
    return gumbel_from_bits(words.gather(-1, (ids % 4).unsqueeze(-1)).squeeze(-1))


def key_of(seeds: Tensor) -> tuple[Tensor, Tensor]:
    """The key of each seed: its lower and its upper 32 bits."""
    return seeds & _LOW, (seeds >> 32) & _LOW


def gumbel_from_bits(bits: Tensor) -> Tensor:
    """Gumbel(0, 1) noise from words of 32 random bits, by inversion."""
    return -torch.log(-torch.log(uniform(bits)))
