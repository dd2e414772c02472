"""Rounds of drafts: all depths of all rows as one call of the native library."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...cache import PagedStaticCache
from ...kernels.native import TYPES, Round, Sampling, library
from ...kernels.random_bits import DRAFT_STREAM, TOKEN_STREAM
from ...kernels.sampling.native import sampling_of
from ...kernels.sampling.reference import DRAWS_PER_ROUND, RowParameters
from .program import Program, addresses


@dataclass
class DraftRound:
    """What a round is to make, and room for it: tensors have a row for each of the batch's B rows, and N nodes.

    Attributes:
        nodes: int64 numpy [N, 4], the shape's, in order of depth: the depth, the parent's place in the frontier, the rank among its
            children, and whether the node is in the next frontier.
        keep, most: the next frontier is the `keep` likeliest nodes of a depth, and the `most` likeliest of all are kept, in their order.
            0, 0: `nodes` say what the frontier is, and all are kept.
        widest: the most nodes of a frontier.
        least: a row's draft ends where no path has this log-probability.
        rows, limits: which R rows of the batch draft, and how deep: int64 [R]. Limits are lowered where drafts end before.
        sampling: how the B rows take tokens, on the CPU; None: they take the likeliest.
        lengths: int64 [B] of zeros: how many nodes are kept, if `keep`.
        tokens: int64 [B, N] of zeros.
        values: float32 [B, N] of minus infinities: log-probabilities of the paths, before nodes are dropped; None: not asked for.
        parents, expanded: int64 [B, N] of -1: parents' indices, and indices among the row's expanded nodes; None: not asked for.
        probs: float32 [B, M, V] of zeros: what the root's children, and then those of expanded nodes, were drawn from. Then every node
            has noise of its own. None: nodes of one depth share the target's.
    """

    nodes: np.ndarray
    keep: int
    most: int
    widest: int
    least: float
    rows: torch.Tensor
    limits: torch.Tensor
    sampling: RowParameters | None
    lengths: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor | None
    parents: torch.Tensor | None
    expanded: torch.Tensor | None
    probs: torch.Tensor | None


def draft_round(
    forward: Program,
    head: Program | None,
    cache: PagedStaticCache,
    seq_ids: list[int],
    logits: torch.Tensor,
    features: torch.Tensor | None,
    vocabulary: Any,
    made: DraftRound,
) -> None:
    """Draft after texts that the cache has, into `made`. Tokens are read into the slots after the texts' own, which are reserved.

    Args:
        forward: makes logits of ids, or hidden states of ids and the last hidden states.
        head: makes logits of those; None: `forward` does.
        logits: [R, Vd], after the texts. Their memory is used again.
        features: [R, H], the hidden states that the first forward reads, whose memory is used again; None: it reads ids only.
        vocabulary: a `DraftVocabulary`.

    Raises:
        IndexError: an id or a position has no embedding.
    """
    loaded, scoring = library(), head or forward
    assert loaded is not None
    output, count, lines = scoring.outputs[0], len(seq_ids), len(seq_ids) * made.widest
    logits = _with_room(logits.to(output.dtype), lines)
    tables = [cache.tables[seq_id] for seq_id in seq_ids]
    # see `Row` in `abi.h`
    rows = torch.tensor([[0, 0, table.length + 1, table.slots_at, 0, 0, 0, 0] for table in tables])
    states = None if features is None else (features.new_empty(lines, features.shape[1]), _with_room(features, lines))
    pools, of_head, nodes = addresses(forward, cache), (0, 0, 0), made.nodes
    by_round = made.probs is not None
    with contextlib.ExitStack() as held:
        for program in sorted({forward, scoring}, key=id):  # all threads take locks in one order
            held.enter_context(program.lock)
        forward.make_room(max(table.length for table in tables) + int(made.limits.max()))
        if head is not None and states is not None:
            forward.slots[forward.features], forward.slots[forward.outputs[0].slot] = (s.data_ptr() for s in states)
            head.slots[head.features] = states[1].data_ptr()
            of_head = head.ops_at, head.num_ops(1), head.slots_at
        scoring.slots[output.slot] = logits.data_ptr()
        call = Round(
            forward.ops_at, forward.num_ops(1), forward.slots_at, *of_head,
            *((0, 0, 0) if states is None else (states[0].data_ptr(), states[1].data_ptr(), states[0][0].nbytes)),
            logits.data_ptr(), TYPES[output.dtype], output.elements, min(output.elements, vocabulary.vocab_size),
            _address(vocabulary.target_ids), count, rows.data_ptr(), made.limits.data_ptr(), made.rows.data_ptr(), pools.at,
            pools.scales_at, nodes.ctypes.data, len(nodes), made.keep, made.most, made.least,
            *map(_address, (made.lengths, made.tokens, made.values, made.parents, made.expanded, made.probs)),
            0 if made.probs is None else made.probs.shape[1], vocabulary.vocab_size,
            DRAFT_STREAM if by_round else TOKEN_STREAM, DRAWS_PER_ROUND,
            Sampling() if made.sampling is None else sampling_of(made.sampling, by_round),
        )  # fmt: skip
        if loaded.specdec_round(ctypes.byref(call), max(forward.num_threads, scoring.num_threads)) >= 0:
            raise IndexError("index out of range: an id or a position that the model has no embedding for")


def _with_room(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The rows [R, ..] as the first of `count`, which no others follow in memory."""
    if len(rows) == count:
        return rows.contiguous()
    out = rows.new_empty(count, *rows.shape[1:])
    out[: len(rows)] = rows
    return out


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
