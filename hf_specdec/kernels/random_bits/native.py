"""Choices with noise in the native library for CPUs."""

from __future__ import annotations

import ctypes

import torch

from ..native import Choice, Sampling, library_of

_SCORES_PER_THREAD = 1 << 17  # waking a thread takes as long as reading some


def num_threads(scores: torch.Tensor) -> int:
    """Number of threads that share the rows of these scores."""
    return min(torch.get_num_threads(), 1 + scores.numel() // _SCORES_PER_THREAD)


def choose(scores: torch.Tensor, keys: torch.Tensor, sampling: Sampling, ahead: int, stream: int) -> torch.Tensor:
    """The token int64 [R] that each row of scores float32 [R, V] takes with the parameters `keys` int64 [R] of `sampling`."""
    scores, keys = scores.float().contiguous(), keys.contiguous()
    out = torch.empty(len(scores), dtype=torch.long)
    pointers = scores.data_ptr(), keys.data_ptr(), out.data_ptr()
    library_of().specdec_choices(
        ctypes.byref(Choice(*pointers, *scores.shape, ahead, stream, sampling)), num_threads(scores)
    )
    return out


def noisy_argmax(scores, seeds, positions, steps, stream: int, rows=None) -> torch.Tensor:
    """See `reference.noisy_argmax`. Noise is drawn only where it can matter; its last bits differ from the definition's."""
    held = seeds.contiguous(), positions.contiguous(), steps.contiguous(), torch.ones(len(seeds), dtype=torch.bool)
    keys = torch.arange(len(scores)) if rows is None else rows
    return choose(scores, keys, Sampling(*(tensor.data_ptr() for tensor in held)), 0, stream)
