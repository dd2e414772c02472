"""Choices with noise in the native library for CPUs."""

from __future__ import annotations

import ctypes

import torch

from ..native import Choice, library

_SCORES_PER_THREAD = 1 << 17  # waking a thread takes as long as reading some


def num_threads(scores: torch.Tensor) -> int:
    """Number of threads that share the rows of these scores."""
    return min(torch.get_num_threads(), 1 + scores.numel() // _SCORES_PER_THREAD)


def noisy_argmax(scores, seeds, positions, steps, stream: int, rows=None) -> torch.Tensor:
    """See `reference.noisy_argmax`. Noise is drawn only where it can matter; its last bits differ from the definition's."""
    loaded = library()
    assert loaded is not None
    keys = torch.arange(len(scores)) if rows is None else rows
    scores, *held = (tensor.contiguous() for tensor in (scores.float(), seeds, positions, steps, keys))
    out = torch.empty(len(scores), dtype=torch.long)
    pointers = (tensor.data_ptr() for tensor in (scores, *held, out))
    loaded.specdec_noisy_argmax(ctypes.byref(Choice(*pointers, *scores.shape, stream)), num_threads(scores))
    return out
