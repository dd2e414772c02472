"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A number is a pure function of (seed, position, token id, step, stream): it is the same on CPU and GPU, in any batch and any
order. Triton's `tl.philox` computes the same integers from the same counters.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF

# The uses of random numbers. Streams never share a counter.
TOKEN_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM, DRAFT_STREAM = 0, 1, 2, 3
MINIMA = 4  # added to a stream to get the stream of its groups' minima
GROUP = 8  # adjacent ids whose exponential numbers are drawn through their minimum
_SPAN = 128  # groups served by 32 counters


def on_host(device: torch.device) -> bool:
    """True if values are on the host, so that numpy does not wait for a device."""
    return device.type == "cpu"


def philox4x32(c0, c1, c2, c3, k0, k1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten Philox rounds on int64 tensors of 32-bit words (counters c0..c3, keys k0 and k1, of broadcastable shapes)."""
    for _ in range(10):
        product0, product1 = c0 * _M0, c2 * _M1  # int64 wraps around, which keeps the bits of the 64-bit product
        high0, high1 = (product0 >> 32) & _MASK, (product1 >> 32) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _MASK, high0 ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def philox4x32_of_arrays(c0, c1, c2, c3, k0, k1) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`philox4x32` on uint32 arrays: on a CPU twice as fast as torch, which lacks unsigned words."""
    low, high = (0, 1) if sys.byteorder == "little" else (1, 0)
    for i in range(10):
        halves0, halves1 = (
            np.multiply(c, np.uint64(factor), dtype=np.uint64).view(np.uint32) for c, factor in ((c0, _M0), (c2, _M1))
        )
        key0, key1 = k0 + np.uint32(i * _W0 & _MASK), k1 + np.uint32(i * _W1 & _MASK)
        c0, c2 = halves1[..., high::2] ^ (c1 ^ key0), halves0[..., high::2] ^ (c3 ^ key1)
        c1, c3 = halves1[..., low::2], halves0[..., low::2]
    return c0, c1, c2, c3


def _random_words(seeds, positions, steps, stream: int, count: int) -> torch.Tensor:
    """32-bit words [R, count] (int64) of the rows; word i of a row is counter i // 4, lane i % 4."""
    counters = torch.arange((count + 3) // 4, device=seeds.device)[None, :]
    return _words_of(counters, seeds, positions, steps, stream).flatten(1)[:, :count]


def _words_of(counters, seeds, positions, steps, stream: int) -> torch.Tensor:
    """The words int64 [R, C, 4] of `counters` int64 [R or 1, C]."""
    inputs = (counters, (positions & _MASK)[:, None], (steps & _MASK)[:, None], counters.new_full((1, 1), stream))
    keys = ((seeds & _MASK)[:, None], ((seeds >> 32) & _MASK)[:, None])
    if on_host(seeds.device):
        lanes = philox4x32_of_arrays(*(word.numpy().astype(np.uint32) for word in (*inputs, *keys)))
        return torch.from_numpy(np.stack(np.broadcast_arrays(*lanes), axis=-1).astype(np.int64))
    return torch.stack(torch.broadcast_tensors(*philox4x32(*inputs, *keys)), dim=-1)


def uniform(seeds, positions, steps, stream: int, count: int = 1) -> torch.Tensor:
    """Uniform numbers in (0, 1), float32 [R, count]; `seeds`, `positions`, `steps`: int64 [R]."""
    return _uniform_of(_random_words(seeds, positions, steps, stream, count))


def _uniform_of(words: torch.Tensor) -> torch.Tensor:
    # The centres of cells of width 2^-32. float32 keeps the resolution near 0, where -log1p(-u) needs it.
    return ((words.to(torch.float64) + 0.5) * 2.0**-32).to(torch.float32).clamp_(max=1.0 - 2.0**-24)


def minima(seeds, positions, steps, stream: int, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The uniform number that gives each group's smallest exponential number, float32 [R, num_groups], and the id that has it, int64.

    One word per group: 29 bits give the minimum, the low 3 bits the id. The four words of a counter go to groups 32 apart, so that
    neighbouring GPU threads, with one counter each, read neighbouring ids.
    """
    if num_groups <= _SPAN // 4:  # only the first word of each counter
        words = _random_words(seeds, positions, steps, stream + MINIMA, num_groups * 4)[:, ::4]
    else:
        spans = -(-num_groups // _SPAN)
        words = _random_words(seeds, positions, steps, stream + MINIMA, spans * _SPAN)
        words = words.view(-1, spans, _SPAN // 4, 4).transpose(2, 3).flatten(1)[:, :num_groups]
    u = (((words >> 3).to(torch.float64) + 0.5) * 2.0**-29).to(torch.float32).clamp_(max=1.0 - 2.0**-24)
    return u, words & 7


def gumbel(seeds, positions, steps, stream: int, vocab_size: int) -> torch.Tensor:
    """Gumbel(0, 1) noise, float32 [R, vocab_size]: `argmax(log p + noise)` is a draw from p (the Gumbel-max trick).

    It is -log of exponential numbers, which are drawn for groups of GROUP adjacent ids: first the smallest of the group, which is
    exponential at GROUP times the rate, and the id that has it, which is uniform. The others exceed it by fresh exponential
    numbers, because exponential numbers are memoryless. So all are independent, and one word bounds the noise of a whole group.
    """
    groups = -(-vocab_size // GROUP)
    u, which = minima(seeds, positions, steps, stream, groups)
    above = uniform(seeds, positions, steps, stream, groups * GROUP)
    return _gumbel_of(u, which, above.view(-1, groups, GROUP)).flatten(1)[:, :vocab_size]


def _gumbel_of(u: torch.Tensor, which: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    """The noise of groups [R, G, GROUP] from their `minima` [R, G] and uniform numbers `above` [R, G, GROUP], which it overwrites."""
    above = above.neg_().log1p_().neg_().scatter_(2, which[:, :, None], 0.0)
    return above.add_(u.neg().log1p_().div_(-GROUP)[:, :, None]).log().neg_()


def noisy_argmax(scores, seeds, positions, steps, stream: int, rows=None) -> torch.Tensor:
    """argmax(scores + gumbel(..)), the lowest id among equals: int64 [R].

    Args:
        scores: float32 [R, V].
        seeds, positions, steps: int64 [U].
        rows: int64 [R], which of the U keys each row of scores uses; None: its own.
    """
    noise = gumbel(seeds, positions, steps, stream, scores.shape[1])
    return (scores + (noise if rows is None else noise[rows])).argmax(1)
