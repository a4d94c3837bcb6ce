"""Philox4x32-10 and the noise of sampling, the same bits as the reference draws.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3.
"""

import triton
import triton.language as tl

ROUNDS = tl.constexpr(10)
MULTIPLIER_0 = tl.constexpr(0xD2511F53)
MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
KEY_STEP_0 = tl.constexpr(0x9E3779B9)
KEY_STEP_1 = tl.constexpr(0xBB67AE85)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four words of 32 random bits for each counter; all arguments are uint32 tensors."""
    for _ in tl.static_range(ROUNDS):
        m0 = tl.full(c0.shape, MULTIPLIER_0, tl.uint32)
        m1 = tl.full(c0.shape, MULTIPLIER_1, tl.uint32)
        high0, high1 = tl.umulhi(c0, m0), tl.umulhi(c2, m1)
        low0, low1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += KEY_STEP_0
        k1 += KEY_STEP_1
    return c0, c1, c2, c3


@triton.jit
def gumbel(bits):
    """Gumbel(0, 1) noise from words of 32 random bits, by inversion."""
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -tl.log(-tl.log(uniform))


@triton.jit
def gumbel_of_ids(seed, position, sample, first, COUNT: tl.constexpr):
    """The noise of the ids first .. first + COUNT, which begin at a multiple of four: ``[COUNT]``.

    Four ids share a counter and take one word each.
    """
    FOURTHS: tl.constexpr = COUNT // 4
    zeros = tl.zeros([FOURTHS], tl.uint32)
    fourths = (first // 4 + tl.arange(0, FOURTHS)).to(tl.uint32)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = philox4x32(
        zeros + position.to(tl.uint32),
        zeros + sample.to(tl.uint32),
        fourths,
        zeros,
        zeros + low,
        zeros + high,
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [fourth, word // 2, word % 2] of ids
    return gumbel(tl.reshape(words, [COUNT]))
