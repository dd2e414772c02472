"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A number is a pure function of (seed, position, token id, step, stream): the same on CPU and GPU, in any batch, in any
order. Triton's `tl.philox` computes the same integers from the same counters.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF

# What a number is used for; streams never share a counter.
TOKEN_STREAM, ACCEPT_STREAM, RESIDUAL_STREAM, DRAFT_STREAM = 0, 1, 2, 3
MINIMA = 4  # is added to a stream for the minima of its groups
GROUP = 8  # ids whose exponential numbers are drawn by way of their minimum
_SPAN = 128  # groups of 32 counters


def philox4x32(c0, c1, c2, c3, k0, k1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten Philox rounds over int64 tensors holding 32-bit words (counters c0..c3, key k0, k1; any broadcastable shapes)."""
    for _ in range(10):
        product0, product1 = c0 * _M0, c2 * _M1  # int64 wraps, its bits are those of the 64-bit product
        high0, high1 = (product0 >> 32) & _MASK, (product1 >> 32) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _MASK, high0 ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def philox4x32_of_arrays(c0, c1, c2, c3, k0, k1) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`philox4x32` over uint32 arrays: on a CPU twice as fast as torch, which has no unsigned words."""
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
    """32-bit words [R, count] (int64) for rows with `seeds`, `positions`, `steps` [R]; word i of a row is counter i // 4, lane i % 4."""
    blocks = torch.arange((count + 3) // 4, device=seeds.device)[None, :]
    counters = (blocks, (positions & _MASK)[:, None], (steps & _MASK)[:, None], torch.full_like(blocks[:, :1], stream))
    keys = ((seeds & _MASK)[:, None], ((seeds >> 32) & _MASK)[:, None])
    if seeds.device.type == "cpu":
        lanes = philox4x32_of_arrays(*(each.numpy().astype(np.uint32) for each in (*counters, *keys)))
        words = torch.from_numpy(np.stack(np.broadcast_arrays(*lanes), axis=-1).astype(np.int64))
    else:
        words = torch.stack(torch.broadcast_tensors(*philox4x32(*counters, *keys)), dim=-1)
    return words.flatten(1)[:, :count]


def uniform(seeds, positions, steps, stream: int, count: int = 1) -> torch.Tensor:
    """Uniform numbers in (0, 1), float32 [R, count]; `seeds`, `positions`, `steps`: int64 [R]."""
    words = _random_words(seeds, positions, steps, stream, count)
    # Half-open cells of 2^-32; float32 keeps the resolution near 0, which is where -log1p(-u) needs it.
    return ((words.to(torch.float64) + 0.5) * 2.0**-32).to(torch.float32).clamp_(max=1.0 - 2.0**-24)


def minima(seeds, positions, steps, stream: int, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The uniform number behind each group's least exponential number, float32 [R, num_groups], and which of its ids has it, int64.

    One word a group: 29 bits are the minimum, the low 3 the id. The four words of a counter go to groups 32 apart, so that
    neighbouring threads of a GPU, with one counter each, read neighbouring ids.
    """
    if num_groups <= _SPAN // 4:  # the first words of so many counters
        words = _random_words(seeds, positions, steps, stream + MINIMA, num_groups * 4)[:, ::4]
    else:
        spans = -(-num_groups // _SPAN)
        words = _random_words(seeds, positions, steps, stream + MINIMA, spans * _SPAN)
        words = words.view(-1, spans, _SPAN // 4, 4).transpose(2, 3).flatten(1)[:, :num_groups]
    u = (((words >> 3).to(torch.float64) + 0.5) * 2.0**-29).to(torch.float32).clamp_(max=1.0 - 2.0**-24)
    return u, words & 7


def gumbel(seeds, positions, steps, stream: int, vocab_size: int) -> torch.Tensor:
    """Gumbel(0, 1) noise, float32 [R, vocab_size]: `argmax(log p + noise)` is a draw from p (the Gumbel-max trick).

    It is -log of exponential numbers, drawn by groups of GROUP adjacent ids: first the least of a group, which is
    exponential at GROUP times the rate, and which id has it, which is uniform; the others exceed it by fresh exponential
    numbers, as these have no memory. So all are independent, and one word bounds the noise of a whole group.
    """
    groups = -(-vocab_size // GROUP)
    u, which = minima(seeds, positions, steps, stream, groups)
    above = uniform(seeds, positions, steps, stream, groups * GROUP).neg_().log1p_().neg_().view(-1, groups, GROUP)
    above.scatter_(2, which[:, :, None], 0.0)
    return above.add_(u.neg_().log1p_().div_(-GROUP)[:, :, None]).flatten(1)[:, :vocab_size].log().neg_()
