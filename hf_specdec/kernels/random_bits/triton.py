"""The random numbers of `reference` inside Triton kernels: device functions that compute in registers and read no memory.

Words and uniform numbers equal those of `reference` bit for bit. Gumbel noise takes two logarithms, whose last bits differ between
libraries: it agrees with `reference.gumbel` to a few float32 roundings (tested: 1e-6).
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from . import reference

TOKEN_STREAM = tl.constexpr(reference.TOKEN_STREAM)
ACCEPT_STREAM = tl.constexpr(reference.ACCEPT_STREAM)
RESIDUAL_STREAM = tl.constexpr(reference.RESIDUAL_STREAM)
MINIMA = tl.constexpr(reference.MINIMA)
GROUP = tl.constexpr(reference.GROUP)
# Gumbel noise is below log(2**33), because a minimum is at least 2**-30 / GROUP.
MOST_GUMBEL = tl.constexpr(22.9)


@triton.jit
def uniform_of_words(words):
    """Uniform float32 numbers in (0, 1) from uint32 words.

    `reference.uniform` rounds (word + 0.5) / 2**32 from float64. Both halves of the word are exact in float32, so their sum rounds
    once, to the same number, without float64.
    """
    high = (words >> 16).to(tl.float32) * 65536.0
    low = (words & 0xFFFF).to(tl.float32) + 0.5
    return tl.minimum((high + low) * 2.3283064365386963e-10, 0.999999940395355224609375)


@triton.jit
def _four_words(seed, position, step, stream: tl.constexpr, counters):
    zero, wide = counters * 0, tl.full([], 0, tl.int64)  # the other arguments may be numbers or tensors
    return tl.philox(
        wide + seed, counters, zero + (wide + position).to(tl.uint32), zero + (wide + step).to(tl.uint32), zero + stream
    )


@triton.jit
def uniform_at(seed, position, step, stream: tl.constexpr, index):
    """The uniform numbers at `index` (int32 scalar or tensor) of a stream, float32; seed, position, step: int64 scalars."""
    a, b, c, d = _four_words(seed, position, step, stream, (tl.full([], 0, tl.int32) + index // 4).to(tl.uint32))
    lane = index % 4
    return uniform_of_words(tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d)))


@triton.jit
def minimum_words(seed, position, step, stream: tl.constexpr, counters):
    """Four words per counter (int32), for the groups `span * 128 + 32 * word + counter % 32`, where span = counter // 32."""
    return _four_words(seed, position, step, stream + MINIMA, counters.to(tl.uint32))


@triton.jit
def most_noise(words):
    """An upper bound of the Gumbel noise of the groups of these words. It exceeds large noise by at most 0.06.

    A minimum is at least u / GROUP, and a float's bits (23 of them the fraction) are a lower bound of its base-2 logarithm.
    """
    bits = ((words & 0xFFFFFFF8) | 4).to(tl.float32).to(tl.int32, bitcast=True)  # of u * 2**32
    return 112.28988 - bits.to(tl.float32) * 8.262958e-08  # (127 + 32) log 2 + log GROUP; log 2 / 2**23


@triton.jit
def minimum_of_words(words):
    """The smallest exponential number of the groups of these words, and the id that has it (see `reference.gumbel`)."""
    # As in `uniform_of_words`: two exact halves, one rounding.
    high = (words >> 16).to(tl.float32) * 8192.0
    low = ((words >> 3) & 0x1FFF).to(tl.float32) + 0.5
    u = tl.minimum((high + low) * 1.862645149230957e-09, 0.999999940395355224609375)
    return exponential_of_uniform(u) * 0.125, (words & 7).to(tl.int32)


@triton.jit
def exponential_of_uniform(u):
    """-log1p(-u) in float32.

    log1p(x) = x log(1 + x) / ((1 + x) - 1) with 1 + x as rounded: as accurate as log (Kahan's rearrangement), and
    the same source runs in the interpreter, which lacks libdevice.
    """
    rest = 1.0 - u
    lost = 1.0 - rest  # exact
    return tl.where(lost == 0.0, u, -tl.log(rest) * (u / tl.where(lost == 0.0, 1.0, lost)))


@triton.jit
def gumbel_of_ids(seed, position, step, stream: tl.constexpr, ids, words):
    """Gumbel noise float32 [N] of ids int32 [N]; `words` uint32 [N]: the words of their groups' minima."""
    least, which = minimum_of_words(words)
    above = exponential_of_uniform(uniform_at(seed, position, step, stream, ids))
    return -tl.log(least + tl.where(ids % GROUP == which, 0.0, above))


@triton.jit
def gumbel_of_groups(seed, position, step, stream: tl.constexpr, groups, words):
    """Gumbel noise float32 [N, GROUP] of the ids of groups int32 [N]; `words` uint32 [N]: the words of their minima."""
    least, which = minimum_of_words(words)
    counters = (groups * 2)[:, None] + tl.arange(0, 2)[None, :]
    a, b, c, d = _four_words(seed, position, step, stream, counters.to(tl.uint32))
    # Word lane = id % 4: (a, c) and (b, d) interleaved, then these with each other, give a, b, c, d.
    u = uniform_of_words(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))
    above = tl.where(tl.arange(0, GROUP)[None, :] == which[:, None], 0.0, exponential_of_uniform(u))
    return -tl.log(least[:, None] + above)


@triton.jit
def words_of_groups(seed, position, step, stream: tl.constexpr, start, GROUPS: tl.constexpr):
    """The words of the minima of groups start .. start + GROUPS - 1, uint32 [GROUPS]; both are multiples of 128."""
    counters = start // 4 + tl.arange(0, GROUPS // 4)
    a, b, c, d = minimum_words(seed, position, step, stream, counters)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [GROUPS // 128, 32, 4])
    return tl.reshape(tl.permute(words, (0, 2, 1)), [GROUPS])


@triton.jit
def gumbel_block(seed, position, step, stream: tl.constexpr, start, BLOCK: tl.constexpr):
    """Gumbel noise float32 [BLOCK] of token ids start .. start + BLOCK - 1; both are multiples of 1024."""
    words = words_of_groups(seed, position, step, stream, start // GROUP, BLOCK // GROUP)
    groups = start // GROUP + tl.arange(0, BLOCK // GROUP)
    return tl.reshape(gumbel_of_groups(seed, position, step, stream, groups, words), [BLOCK])
