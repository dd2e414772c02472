"""Verification by the target's own choices in the native library for CPUs: it chooses tokens only along the accepted path."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import torch

from ..drafts import Drafts, RowStreams
from ..native import Drafts as Arguments
from ..native import Sampling, library_of
from ..random_bits.native import num_threads


def verdicts(drafts: Drafts, scores: torch.Tensor, streams: RowStreams) -> torch.Tensor:
    """`reference.follow_choices` as a table int64 [B, 2 N + 2]: accepted nodes, drafted ids, the token after them, and whether that row had
    nothing to sample from: scores without a finite maximum.

    Args:
        scores: float32 [R, V], after the root and the nodes of row 0, then of row 1, ..
    """
    batch, width = drafts.tokens.shape
    scores, tokens = scores.float().contiguous(), drafts.tokens.contiguous()
    counts = np.asarray(drafts.lengths, dtype=np.int64)
    rows = np.array([np.cumsum(counts + 1) - counts - 1, counts, streams.seeds, streams.positions], dtype=np.int64)
    draws = np.array(streams.do_sample, dtype=np.bool_)
    parents = None if drafts.is_chain else np.ascontiguousarray(drafts.parent_index)
    table = torch.empty(batch, 2 * width + 2, dtype=torch.long)
    first, lengths, *noise = (rows[i].__array_interface__["data"][0] for i in range(len(rows)))
    arguments = Arguments(
        scores.data_ptr(), first, lengths, tokens.data_ptr(), 0 if parents is None else parents.ctypes.data, table.data_ptr(),
        batch, width, scores.shape[1], Sampling(*noise, None, draws.ctypes.data),
    )  # fmt: skip
    library_of().specdec_follow_choices(ctypes.byref(arguments), num_threads(scores))
    return table


def greedy_tokens(scores: torch.Tensor) -> torch.Tensor:
    """See `reference.greedy_tokens`: faster than torch, which takes ten times as long in bfloat16."""
    scores = scores.float().contiguous()
    count, vocab = scores.shape
    table = torch.empty(count, 2, dtype=torch.long)
    first, nothing, sampling, _ = _roots(count)
    arguments = Arguments(scores.data_ptr(), first, nothing, 0, 0, table.data_ptr(), count, 0, vocab, sampling)
    library_of().specdec_follow_choices(ctypes.byref(arguments), num_threads(scores))
    return table[:, 0]


@functools.lru_cache(16)
def _roots(count: int) -> tuple[int, int, Sampling, np.ndarray]:
    """Arguments of so many rows without drafts that do not sample: addresses of each row's first score row and of zeros, both in the array
    that follows the sampling parameters."""
    rows = np.array([np.arange(count), np.zeros(count)], dtype=np.int64)
    first, nothing = (row.ctypes.data for row in rows)
    return first, nothing, Sampling(nothing, nothing, None, nothing), rows
