"""Kernels against their floors: the bytes they must move at the bandwidth that this device copies with."""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hf_specdec.kernels.attention.inputs import AttentionInputs, RowDescription, attention_inputs

from . import floors
from .check_cache import random_moves
from .context import Context
from .drafts import Drafts
from .report import Row, at_least

SECTION = "kernels"
HEADS, KV_HEADS, WIDTH, LAYERS = 32, 8, 128, 32  # Llama-3.1-8B
BLOCK_SIZE = 16


def bandwidth(context: Context) -> float:
    """Bytes per second, read and written, of the fastest of several large copies, which the L2 cache holds little of; measured once per
    run."""
    if context.bandwidth is None:
        source = context.randn(2**29 if context.on_gpu and not context.toy else 2**16, dtype=torch.float32)
        target = torch.empty_like(source)
        ways: list[Callable[[], Any]] = [lambda: target.copy_(source), lambda: torch.neg(source, out=target)]
        best = min(context.milliseconds(way, flush=False) for way in ways for _ in range(3))
        context.bandwidth = 2 * source.nbytes / best * 1e3
    return context.bandwidth


def share_row(
    context: Context, name: str, run: Callable[[], Any], num_bytes: int, aim: float | None, note: str = ""
) -> Row:
    """The share of the bandwidth that `run` reaches; value and floor in the note."""
    took, floor = context.milliseconds(run), floors.milliseconds_of(num_bytes, bandwidth(context))
    note = f"{took:.4g} ms, floor {floor:.4g} ms" + (f"; {note}" if note else "")
    if aim is None:
        return Row(SECTION, name, floor / took, "of bandwidth", floor=1.0, note=note)
    return at_least(SECTION, name, floor / took, aim, "of bandwidth", context.judges_times, floor=1.0, note=note)


# ---- attention ------------------------------------------------------------------------------------------------------


def uniform_batch(context: Context, rows: int, queries: int, keys: int, tree: bool) -> AttentionInputs:
    """Rows of equal lengths in scattered blocks; a tree is a full binary one behind the row's last token."""
    per_row = -(-keys // BLOCK_SIZE)
    order = np.random.default_rng(context.number(2**31)).permutation(rows * per_row)
    visibility = depths = None
    if tree:
        parents = [(i - 1) // 2 for i in range(queries)]  # node 0 is the root: the row's last token
        visibility, depths = np.zeros((queries, queries), dtype=bool), np.zeros(queries, dtype=np.int64)
        for i in range(queries):
            if i:
                visibility[i], depths[i] = visibility[parents[i]], depths[parents[i]] + 1
            visibility[i, i] = True
        depths += keys - queries
    described = [
        RowDescription(order[i * per_row : (i + 1) * per_row], queries, keys, visibility, depths, depths)
        for i in range(rows)
    ]
    return attention_inputs(described, BLOCK_SIZE, context.device)


def attention_rows(context: Context) -> Iterator[Row]:
    """Decoding and verification at batch 1 with a long context and at batch 64, beside what else is installed."""
    from hf_specdec.kernels.attention.triton import paged_attention

    heads, kv_heads, width = (HEADS, KV_HEADS, WIDTH) if not context.toy else (4, 2, 16)
    for rows, keys in ((1, 32768), (64, 2048)) if not context.toy else ((1, 40), (3, 20)):
        slots = rows * -(-keys // BLOCK_SIZE) * BLOCK_SIZE
        pools = [context.randn(slots, kv_heads, width, dtype=torch.bfloat16) for _ in range(2)]
        for queries, tree in ((1, False), (8, False), (8, True)):
            inputs = uniform_batch(context, rows, queries, keys, tree)
            query = context.randn(rows * queries, heads, width, dtype=torch.bfloat16)
            out = torch.empty_like(query)
            moved = floors.attention_bytes(rows, queries, keys, heads, kv_heads, width, 2)
            kind = "decode" if queries == 1 else f"verify {'tree' if tree else 'chain'} of {queries}"
            name = f"attention, {kind}, batch {rows} x {keys}"

            def run(query=query, inputs=inputs, out=out, pools=pools):
                paged_attention(query, *pools, inputs, width**-0.5, out=out)

            yield share_row(context, name, run, moved, 0.7)
            if not tree:
                yield torch_attention(context, name, query, rows, queries, keys, kv_heads, moved)


def torch_attention(
    context: Context, name: str, query: torch.Tensor, rows: int, queries: int, keys: int, kv_heads: int, moved: int
) -> Row:
    """torch's attention, on keys and values in one piece."""
    heads, width = query.shape[1:]
    shape = (rows, keys, kv_heads, width)
    key, value = (context.randn(*shape, dtype=torch.bfloat16) for _ in range(2))
    q = query.view(rows, queries, heads, width)
    mask = None
    if queries > 1:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=context.device).tril(keys - queries)

    def sdpa():
        F.scaled_dot_product_attention(
            q.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask=mask, enable_gqa=True
        )

    return share_row(context, f"  torch sdpa, {name}", sdpa, moved, None, "contiguous keys")


# ---- verification ---------------------------------------------------------------------------------------------------


def verification_rows(context: Context) -> Iterator[Row]:
    """Every rule on 64 chains of 7 tokens and their roots, over 128k ids."""
    from hf_specdec.kernels.random_bits import DRAFT_STREAM
    from hf_specdec.kernels.rejection.triton import verify_rejection
    from hf_specdec.kernels.sampling.triton import Noise, sampling_scores, sampling_thresholds
    from hf_specdec.kernels.verification.triton import verify_choices

    batch, width, vocab = (64, 7, 128256) if not context.toy else (2, 3, 300)
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        drafts = Drafts(context, batch, width, vocab, chain=True, dtype=dtype)
        drafts.valid[:] = True
        common = (drafts.logits, drafts.index, drafts.tokens, drafts.valid)
        flags = torch.ones(batch, dtype=torch.bool, device=context.device)
        noise = dict(seeds=drafts.seeds, positions=drafts.positions, do_sample=flags)
        moved = floors.logits_bytes(batch * (width + 1), vocab, dtype.itemsize)
        shape = f"[{batch} x {width + 1}, {vocab}] {name}"

        def greedy(common=common):
            verify_choices(*common)

        def coupled(common=common, noise=noise, drafts=drafts):
            verify_choices(*common, temperature=drafts.temperature, **noise)

        def rejection(common=common, drafts=drafts):
            verify_rejection(*common, drafts.seeds, drafts.positions, drafts.steps, temperature=drafts.temperature)

        for rule, run in (("greedy", greedy), ("coupled", coupled), ("rejection", rejection)):
            yield share_row(context, f"verification, {rule}, {shape}", run, moved, 0.8)
        top_k = torch.full((len(drafts.logits),), 50, dtype=torch.int32, device=context.device)
        top_p = torch.full((len(drafts.logits),), 0.9, device=context.device)

        def limits(drafts=drafts, top_k=top_k, top_p=top_p):
            sampling_thresholds(drafts.logits, None, None, top_k, top_p)

        yield share_row(context, f"sampling limits, top-k and top-p, {shape}", limits, moved, None)
        count = len(drafts.logits)
        keys = (torch.arange(count, device=context.device),) * 3
        drawn = Noise(*keys, torch.ones(count, dtype=torch.bool, device=context.device), DRAFT_STREAM)
        out = torch.empty(drafts.logits.shape, device=context.device)

        def scores(drafts=drafts, drawn=drawn, out=out):
            sampling_scores(drafts.logits, noise=drawn, out=out)

        yield share_row(context, f"drawn scores, {shape}", scores, moved + 4 * count * vocab, None)


# ---- cache ----------------------------------------------------------------------------------------------------------


def cache_rows(context: Context) -> Iterator[Row]:
    """Moves of accepted tree nodes in all layers, and the keys and values of a prompt."""
    from hf_specdec.kernels.cache.triton import PoolTable, move_slots, write_keys_values

    kv_heads, width, layers = (KV_HEADS, WIDTH, LAYERS) if not context.toy else (2, 16, 2)
    rows, nodes = (64, 60) if not context.toy else (2, 6)
    pools = [context.randn(rows * nodes, kv_heads, width, dtype=torch.bfloat16) for _ in range(2 * layers)]
    table = PoolTable.of(pools)
    source, target = random_moves(context, rows * nodes, rows, nodes)
    moves = int((source >= 0).sum())
    moved = floors.moved_bytes(moves, layers, kv_heads, width, 2)
    run = lambda: move_slots(table, source, target)  # noqa: E731
    yield share_row(context, f"cache moves, {moves} slots of {rows} trees in {layers} layers", run, moved, 0.7)
    tokens = 8192 if not context.toy else 8
    keys, values = (context.randn(tokens, kv_heads, width, dtype=torch.bfloat16) for _ in range(2))
    pool = [context.randn(2 * tokens, kv_heads, width, dtype=torch.bfloat16) for _ in range(2)]
    slots = torch.randperm(2 * tokens, generator=context.generator, device=context.device)[:tokens]
    moved = floors.moved_bytes(tokens, 1, kv_heads, width, 2)
    yield share_row(
        context,
        f"cache write, {tokens} tokens of one layer",
        lambda: write_keys_values(keys, values, *pool, slots),
        moved,
        None,
    )


# ---- linear layers --------------------------------------------------------------------------------------------------


def layer_rows(context: Context) -> Iterator[Row]:
    """The products of a Llama-3.1-8B layer for 1 and 8 rows, beside cuBLAS's (one product per weight)."""
    from hf_specdec.kernels.linear import triton as linear

    hidden, keys, inner, vocab = (4096, 1024, 14336, 128256) if not context.toy else (32, 16, 48, 64)

    def weight(outputs: int, inputs: int) -> torch.Tensor:
        return context.randn(outputs, inputs, dtype=torch.bfloat16)

    products: dict[str, list[torch.Tensor]] = {
        "queries, keys and values": [weight(hidden, hidden), weight(keys, hidden), weight(keys, hidden)],
        "output": [weight(hidden, hidden)],
        "gate and up": [weight(inner, hidden), weight(inner, hidden)],
        "down": [weight(hidden, inner)],
        "language-model head": [weight(vocab, hidden)],
    }
    for name, weights in products.items():
        for num_rows in (1, 8):
            x = context.randn(num_rows, weights[0].shape[1], dtype=torch.bfloat16)
            theirs = context.milliseconds(lambda x=x, weights=weights: [x @ each.T for each in weights])
            run = lambda x=x, weights=weights: linear.linears(x, weights)  # noqa: E731
            moved = sum(each.nbytes for each in weights)
            note = f"cuBLAS {theirs:.4g} ms"
            yield share_row(context, f"linear layers, {name}, {num_rows} rows", run, moved, None, note)


def rows(context: Context) -> Iterator[Row]:
    """The bandwidth first, then every kernel's share of it."""
    yield Row(SECTION, "bandwidth of a copy, read and written", bandwidth(context) / 1e9, "GB/s")
    yield from cache_rows(context)
    yield from verification_rows(context)
    yield from attention_rows(context)
    yield from layer_rows(context)
