"""Chains of drafts: all depths of all rows as one call of the native library."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch

from ...cache import PagedStaticCache
from ...kernels.native import TYPES, Chain, Sampling, library
from ...kernels.sampling.native import sampling_of
from ...kernels.sampling.reference import RowParameters
from .program import Program, addresses


def draft_chains(
    forward: Program,
    head: Program | None,
    cache: PagedStaticCache,
    seq_ids: list[int],
    logits: torch.Tensor,
    limits: list[int],
    features: torch.Tensor | None,
    vocabulary: Any,
    sampling: RowParameters | None = None,
    keys: list[int] | None = None,
) -> torch.Tensor:
    """Chains after texts that the cache has, int64 [R, largest limit]: each token is what `kernels.sampling.choices` takes. They are read
    into the slots after the texts' own, which are reserved.

    Args:
        forward: makes logits of ids, or hidden states of ids and the last hidden states.
        head: makes logits of those; None: `forward` does.
        logits: [R, Vd], after the texts. Their memory is used again.
        limits: how many tokens each row gets.
        features: [R, H], the hidden states that the first forward reads, whose memory is used again; None: it reads ids only.
        vocabulary: a `DraftVocabulary`.
        sampling: of B rows, on the CPU; None: the likeliest tokens are taken.
        keys: R of the B rows, the texts' own; None: there is no `sampling`.

    Raises:
        IndexError: an id or a position has no embedding.
    """
    loaded, scoring = library(), head or forward
    assert loaded is not None
    count, most, output = len(limits), max(limits), scoring.outputs[0]
    logits = logits.to(output.dtype).contiguous()
    tables = [cache.tables[seq_id] for seq_id in seq_ids]
    ids = torch.zeros(count, most, dtype=torch.long)
    places = [table.slots.__array_interface__["data"][0] for table in tables]
    rows = torch.tensor(  # see `Row` in `abi.h`
        [[0, 0, table.length + 1, place, 0, 0, 0, 0] for table, place in zip(tables, places, strict=True)]
    )
    given, owners = torch.tensor(limits), None if sampling is None else torch.tensor(keys)
    states = None if features is None else (torch.empty_like(features), features.contiguous())
    pools, of_head = addresses(forward, cache), (0, 0, 0)
    with contextlib.ExitStack() as held:
        for program in sorted({forward, scoring}, key=id):  # all threads take locks in one order
            held.enter_context(program.lock)
        forward.make_room(max(table.length for table in tables) + most)
        if head is not None and states is not None:
            forward.slots[forward.features], forward.slots[forward.outputs[0].slot] = (s.data_ptr() for s in states)
            head.slots[head.features] = states[1].data_ptr()
            of_head = head.ops.ctypes.data, head.num_ops(1), head.slots.ctypes.data
        scoring.slots[output.slot] = logits.data_ptr()
        chain = Chain(
            forward.ops.ctypes.data, forward.num_ops(1), forward.slots.ctypes.data, *of_head,
            *((0, 0, 0) if states is None else (states[0].data_ptr(), states[1].data_ptr(), states[0][0].nbytes)),
            logits.data_ptr(), TYPES[output.dtype], output.elements, min(output.elements, vocabulary.vocab_size),
            0 if vocabulary.target_ids is None else vocabulary.target_ids.data_ptr(), count, most,
            rows.data_ptr(), given.data_ptr(), ids.data_ptr(), pools.ctypes.data, vocabulary.vocab_size,
            0 if owners is None else owners.data_ptr(), Sampling() if sampling is None else sampling_of(sampling),
        )  # fmt: skip
        if loaded.specdec_chain(ctypes.byref(chain), max(forward.num_threads, scoring.num_threads)) >= 0:
            raise IndexError("index out of range: an id or a position that the model has no embedding for")
    return ids
