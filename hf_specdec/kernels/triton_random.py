"""The numbers of `random_bits` inside Triton kernels: `@triton.jit` device functions, made in registers, nothing read.

The words and the uniform numbers are those of `random_bits` bit for bit. Gumbel noise goes through two logarithms, whose
last bits differ between libraries: it agrees with `random_bits.gumbel` to a few float32 roundings (tested: 1e-6).
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from . import random_bits

TOKEN_STREAM = tl.constexpr(random_bits.TOKEN_STREAM)
ACCEPT_STREAM = tl.constexpr(random_bits.ACCEPT_STREAM)
RESIDUAL_STREAM = tl.constexpr(random_bits.RESIDUAL_STREAM)
# Gumbel noise is below log(2**33): u is at least 2**-33.
MOST_GUMBEL = tl.constexpr(22.9)


@triton.jit
def uniform_of_words(words):
    """Uniform float32 numbers in (0, 1) of uint32 words.

    `random_bits.uniform` rounds (word + 0.5) / 2**32 from float64. Both halves of the word are exact in float32, so their
    sum rounds once, to the same number; no float64 is needed.
    """
    high = (words >> 16).to(tl.float32) * 65536.0
    low = (words & 0xFFFF).to(tl.float32) + 0.5
    return tl.minimum((high + low) * 2.3283064365386963e-10, 0.999999940395355224609375)


@triton.jit
def _four_uniforms(seed, position, step, stream: tl.constexpr, blocks):
    zero, wide = blocks * 0, tl.full([], 0, tl.int64)  # what is added to them may be numbers or tensors
    a, b, c, d = tl.philox(
        wide + seed,
        blocks,
        zero + (wide + position).to(tl.uint32),
        zero + (wide + step).to(tl.uint32),
        zero + stream,
    )
    return uniform_of_words(a), uniform_of_words(b), uniform_of_words(c), uniform_of_words(d)


@triton.jit
def uniform_block(seed, position, step, stream: tl.constexpr, start, BLOCK: tl.constexpr):
    """Uniform numbers float32 [BLOCK] of token ids start .. start + BLOCK - 1; `start` and BLOCK are multiples of 4.

    seed, position, step: int64 scalars. One Philox call gives four ids' numbers.
    """
    blocks = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    a, b, c, d = _four_uniforms(seed, position, step, stream, blocks)
    # Word lane = id % 4: (a, c) and (b, d) interleaved, then these with each other, give a, b, c, d.
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def uniform_at(seed, position, step, stream: tl.constexpr, index):
    """One uniform number, float32 scalar, of counter `index` (int32 scalar)."""
    a, b, c, d = _four_uniforms(seed, position, step, stream, (tl.full([], 0, tl.int32) + index // 4).to(tl.uint32))
    lane = index % 4
    return tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))


@triton.jit
def gumbel_of_uniform(u):
    """-log(-log1p(-u)) in float32.

    log1p(x) = x log(1 + x) / ((1 + x) - 1) with 1 + x as rounded: accurate wherever log is (Kahan's rearrangement), and
    the same source runs in the interpreter, which has no libdevice.
    """
    rest = 1.0 - u
    lost = 1.0 - rest  # exact
    exponential = tl.where(lost == 0.0, u, -tl.log(rest) * (u / tl.where(lost == 0.0, 1.0, lost)))
    return -tl.log(exponential)
