"""Paged attention over a ragged batch with trees in Triton (definition: `reference.paged_attention`).

One program computes a tile of queries of one row for one key head. The heads of a group are further queries of the same keys
(GQA packing, Ainslie et al. 2023), so keys and values are read once for all of them. Softmax is computed online over tiles of
keys (Dao et al., "FlashAttention", 2022). With few rows and long contexts, several programs share the keys of a row, and a
second small launch merges their results ("Flash-Decoding", Dao et al. 2023).
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..cache.reference import Scales
from ..dispatch import next_power_of_two
from .inputs import AttentionBatch, AttentionInputs, Biases, Window, window_parts
from .launch import AttentionLaunch, AttentionShape, choose_launch, device_limits, head_widths, merge_tile, num_tiles
from .tiles import (
    LOG2E,
    NOTHING,
    attend_keys,
    key_range,
    load_blocks,
    load_queries,
    locate_tile,
    of_split,
    partial_lines,
    store_output,
    store_partial,
)  # fmt: skip


@triton.jit(
    do_not_specialize=["num_rows", "tiles_per_row", "window", "kept", "keys_per_split", "num_splits", "bias_head"]
)
def attention_kernel(
    out, partial, partial_lse, query, keys, values, key_scales, value_scales, block_tables, query_starts, key_lengths,
    visibility, region_lengths, positions, region_positions, sinks, biases,
    out_token, out_head, query_token, query_head, key_slot, key_head, value_slot, value_head, table_row, bias_head,
    num_rows, tiles_per_row, num_splits, keys_per_split, window, kept, score_factor, softcap_factor,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_BLOCK: tl.constexpr, SHARED: tl.constexpr, BLOCK_SIZE: tl.constexpr, WORDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_KEPT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, FIXED_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PEEL: tl.constexpr, EARLY_MERGE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M flattened (token, head of the group) queries of one row and one key head over one split of its keys.

    Programs: key heads x tiles x splits. Writes out [T, H, Dv], or with SPLIT partial float32 [T, H, splits, Dv] and partial_lse
    float32 [T, H, splits] for `merge_kernel`. Online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) to base 2. For the
    tensors, see `triton.paged_attention` and `AttentionInputs`; their strides follow them, in elements.
    """
    if EARLY_MERGE:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    row, first = locate_tile(tl.program_id(1), query_starts, num_rows, tiles_per_row, GROUP, BLOCK_M)
    start = tl.load(query_starts + row)
    num_tokens = tl.load(query_starts + row + 1) - start
    length = tl.load(key_lengths + row)  # load early: latencies add up when contexts are short
    region_start = length
    if visibility is not None:
        region_start = length - tl.load(region_lengths + row)
    if first >= num_tokens * GROUP:
        return

    lines = first + tl.arange(0, BLOCK_M)
    valid = lines < num_tokens * GROUP
    head = kv_head * GROUP + lines % GROUP
    packed = (start + lines // GROUP).to(tl.int64)
    query_positions = 0
    if HAS_WINDOW or biases is not None:
        query_positions = tl.load(positions + packed, mask=valid, other=2147483647)
    begin, end, open_end, gaps = key_range(
        first, num_tokens, length, region_start, query_positions, window, kept, visibility is not None, GROUP,
        HAS_WINDOW, HAS_KEPT, FIXED_SPLITS, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if SPLIT:
        begin, end = of_split(tl.program_id(2), begin, end, num_splits, keys_per_split, FIXED_SPLITS, BLOCK_N)
        if begin >= end:  # this row is too short for all splits: its bucket allows longer rows
            tl.store(partial_lse + partial_lines(packed, head, num_splits, GROUP), float("-inf"), mask=valid)
            return
    open_end = tl.minimum(open_end // BLOCK_N * BLOCK_N, end)
    table = block_tables + row.to(tl.int64) * table_row
    blocks = load_blocks(table, begin + tl.arange(0, BLOCK_N), end, gaps, BLOCK_SIZE, HAS_KEPT)

    only_word = 0
    if visibility is not None and WORDS == 1:
        only_word = tl.load(visibility + packed, mask=valid, other=0)
    query_rows = query + packed * query_token + head * query_head
    q1 = load_queries(query_rows, valid, WIDTH, 0, WIDTH1, UPCAST)
    q2 = load_queries(query_rows, valid, WIDTH, WIDTH1, WIDTH2, UPCAST)
    queries = q1, q2, length - num_tokens + lines // GROUP, query_positions, packed, valid
    region = visibility, only_word, region_positions, row, region_start, region_start < length
    added = biases, head * bias_head
    scales = key_scales, value_scales, kv_head
    pools = keys + kv_head * key_head, values + kv_head * value_head, table, key_slot, value_slot
    state = (
        tl.full([BLOCK_M], NOTHING, dtype=tl.float32),
        tl.zeros([BLOCK_M], dtype=tl.float32),
        tl.zeros([BLOCK_M, VALUE_BLOCK], dtype=tl.float32),
    )
    for masked in tl.static_range(0 if PEEL else 1, 2):  # peeled: first the keys that all queries see, then the others
        low = tl.maximum(begin, open_end) if PEEL and masked else begin
        high = open_end if PEEL and not masked else end
        if PEEL:
            blocks = load_blocks(table, low + tl.arange(0, BLOCK_N), high, gaps, BLOCK_SIZE, HAS_KEPT)
        # Peeled masked tiles are few, and deeper pipelining would also buffer the words of their masks.
        state = attend_keys(
            state, low, high, end, blocks, queries, region, added, pools, scales, gaps, window, kept, score_factor, softcap_factor,
            masked, WIDTH, WIDTH1, WIDTH2, VALUE_WIDTH, VALUE_BLOCK, SHARED, BLOCK_SIZE, WORDS, HAS_WINDOW, HAS_KEPT,
            HAS_SOFTCAP, BLOCK_N, 2 if PEEL and masked else STAGES, UPCAST,
        )  # fmt: skip
    if SPLIT:
        lines = partial_lines(packed, head, num_splits, GROUP)
        store_partial(partial, partial_lse, lines, state, valid, VALUE_WIDTH, VALUE_BLOCK)
    else:
        store_output(out, packed * out_token + head * out_head, state, sinks, head, valid, VALUE_WIDTH, VALUE_BLOCK)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def merge_kernel(
    out, partial, partial_lse, query_starts, sinks, out_token, out_head, num_rows, num_splits,
    VALUE_WIDTH: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one query, BLOCK_S at a time in order, so that extra empty splits change no bit.

    EARLY: launched while `attention_kernel` runs (programmatic dependent launch), so wait for it here.
    """
    if EARLY:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if token >= tl.load(query_starts + num_rows):
        return
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    line = (token * tl.num_programs(1) + head) * num_splits
    largest = NOTHING
    total = 0.0
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        largest = tl.maximum(largest, sink)
        total = tl.exp2(sink - largest)
    weighted = tl.zeros([BLOCK_V], dtype=tl.float32)
    for first in range(0, num_splits, BLOCK_S):
        splits = first + tl.arange(0, BLOCK_S)
        lse = tl.load(partial_lse + line + splits, mask=splits < num_splits, other=float("-inf"))
        part = tl.load(
            partial + (line + splits)[:, None] * VALUE_WIDTH + columns[None, :],
            mask=(splits < num_splits)[:, None] & (columns < VALUE_WIDTH)[None, :],
            other=0.0,
        )
        part = tl.where((lse > float("-inf"))[:, None], part, 0.0)  # not written if the split saw no key
        new_largest = tl.maximum(largest, tl.max(lse, axis=0))
        weights = tl.exp2(lse - new_largest)
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, axis=0)
        weighted = weighted * shrink + tl.sum(weights[:, None] * part, axis=0)
        largest = new_largest
    weighted = weighted / tl.where(total > 0, total, 1.0)
    tl.store(
        out + token * out_token + head * out_head + columns,
        weighted.to(out.dtype.element_ty),
        mask=columns < VALUE_WIDTH,
    )


# ---- launches ----


def paged_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    inputs: AttentionInputs,
    scaling: float,
    *,
    window: int | Window | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    biases: Biases | None = None,
    invariant: bool = False,
    launch: AttentionLaunch | None = None,
    out: torch.Tensor | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """Attention of a ragged batch over a paged cache, in one launch (two if keys are split).

    Memory traffic: keys and values once per row, S * Hkv * (D + Dv) elements, and each query and output once, T * H * (D + Dv). A
    tile holds `block_m` queries of a key head. A row with more queries reads its keys once per tile, again from the L2 cache if they
    fit. Splits add 2 * 4 * num_splits * T * H * Dv bytes.

    Args:
        query: [T, H, D] float16, bfloat16 or float32, any strides of tokens and heads.
        key_pool, value_pool: [slots, Hkv, D] and [slots, Hkv, Dv] of query's dtype, or int8; the batch's own keys must already be
            written. Values that are a view of the keys' first columns are loaded once, if their number is a power of two.
        scaling: factor of the scores; must be above 0.
        window: a query at position p sees only keys at positions above p - window, and the first ones (see `Window`).
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2).
        sinks: [H], one more logit per head, without a value (gpt-oss).
        biases: added to scores after scaling and capping, by distance; read for every key, in float32.
        launch: tile sizes, for measurements; None: `choose_launch`.
        out: [T, H, Dv] of query's dtype, last dimension contiguous.
        scales: of pools in int8, contiguous.

    Returns: [T, H, Dv]. A query that sees no key gives zeros.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    num_tokens, num_heads, width = query.shape
    _, num_kv_heads, value_width = value_pool.shape
    if out is None:
        out = query.new_empty(num_tokens, num_heads, value_width)
    _check(query, key_pool, value_pool, scaling, out, scales is not None)
    if num_tokens == 0 or inputs.max_query_length == 0 or inputs.block_tables.shape[0] == 0:
        return out
    words = 0 if inputs.visibility is None else inputs.visibility.shape[1]
    shape = _shape_of(query, key_pool, value_pool, inputs, words, window is not None or biases is not None)
    if launch is None:
        launch = choose_launch(shape, device_limits(query.device), invariant)
    tiles, tiles_per_row = num_tiles(shape, launch.block_m)
    splits = launch.num_splits
    split = splits > 1 or launch.fixed_splits
    partial = lse = None
    if split:
        partial = query.new_empty(num_tokens, num_heads, splits, value_width, dtype=torch.float32)
        lse = query.new_empty(num_tokens, num_heads, splits, dtype=torch.float32)
    added = None
    if biases is not None:  # added to scores before these are multiplied by their factor
        added = biases(inputs.max_key_length).to(query.device, torch.float32).T.contiguous() / (softcap or scaling)
    log2e, (size, kept), (width1, width2) = LOG2E.value, window_parts(window), head_widths(width)
    with torch.cuda.device_of(query):  # a model may be spread over several devices; on a CPU this does nothing
        attention_kernel[num_kv_heads, tiles, splits](
            out, partial, lse, query, key_pool, value_pool, *(scales or (None, None)), inputs.block_tables, inputs.query_starts,
            inputs.key_lengths, inputs.visibility, inputs.region_lengths, inputs.positions, inputs.region_positions, sinks, added,
            out.stride(0), out.stride(1), query.stride(0), query.stride(1), key_pool.stride(0), key_pool.stride(1),
            value_pool.stride(0), value_pool.stride(1), inputs.block_tables.stride(0), inputs.max_key_length,
            shape.num_rows, tiles_per_row, splits, launch.keys_per_split, size, kept,
            scaling * log2e if softcap is None else 2 * scaling / softcap * log2e, (softcap or 0.0) * log2e,
            GROUP=shape.group, WIDTH=width, WIDTH1=width1, WIDTH2=width2,
            VALUE_WIDTH=value_width, VALUE_BLOCK=max(next_power_of_two(value_width), 16), SHARED=shape.shared,
            BLOCK_SIZE=inputs.block_size, WORDS=words, HAS_WINDOW=size > 0, HAS_KEPT=kept > 0, HAS_SOFTCAP=softcap is not None,
            SPLIT=split, FIXED_SPLITS=launch.fixed_splits,
            BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, STAGES=launch.num_stages, PEEL=launch.peel,
            EARLY_MERGE=split and launch.early_merge, UPCAST=not query.is_cuda,
            num_warps=launch.num_warps,
        )  # fmt: skip
        if split:
            _merge(out, partial, lse, inputs, sinks, shape, launch)
    return out


def _merge(out, partial, lse, inputs: AttentionInputs, sinks, shape: AttentionShape, launch: AttentionLaunch) -> None:
    """Merge the splits of every query into `out` [T, H, Dv]. Arguments: see `attention_kernel`."""
    num_tokens, num_heads, value_width = out.shape
    block_v, block_s = merge_tile(value_width, launch)
    options = {"launch_pdl": True} if launch.early_merge else {}
    merge_kernel[num_tokens, num_heads, triton.cdiv(value_width, block_v)](
        out, partial, lse, inputs.query_starts, sinks, out.stride(0), out.stride(1), shape.num_rows, launch.num_splits,
        VALUE_WIDTH=value_width, BLOCK_V=block_v, BLOCK_S=block_s, EARLY=launch.early_merge, num_warps=2, **options,
    )  # fmt: skip


def attend(query, key_pool, value_pool, batch: AttentionBatch, scaling, **options) -> torch.Tensor:
    """See `reference.attend`."""
    return paged_attention(query, key_pool, value_pool, batch.attention_inputs(query.device), scaling, **options)


def attend_invariant(query, key_pool, value_pool, batch: AttentionBatch, scaling, **options) -> torch.Tensor:
    """See `reference.attend_invariant`."""
    return attend(query, key_pool, value_pool, batch, scaling, invariant=True, **options)


def _shape_of(query, key_pool, value_pool, inputs: AttentionInputs, words: int, by_position: bool) -> AttentionShape:
    """The shapes that tile sizes depend on."""
    (num_tokens, num_heads, width), (num_kv_heads, value_width) = query.shape, value_pool.shape[1:]
    of_keys = key_pool.data_ptr() == value_pool.data_ptr() and key_pool.stride() == value_pool.stride()
    return AttentionShape(
        inputs.block_tables.shape[0], num_tokens, inputs.max_query_length, inputs.max_key_length, num_kv_heads,
        num_heads // num_kv_heads, width, value_width, query.element_size(),
        masks_load=words > 1 or (by_position and inputs.region_positions is not None),
        shared=of_keys and value_width == head_widths(width)[0] and key_pool.dtype == query.dtype,
    )  # fmt: skip


def _check(query, key_pool, value_pool, scaling, out, is_quantized):
    _, num_heads, width = query.shape
    kv_heads = value_pool.shape[1]
    if key_pool.shape[1:] != (kv_heads, width) or num_heads % kv_heads or key_pool.shape[0] != value_pool.shape[0]:
        raise ValueError(
            f"query {tuple(query.shape)}, keys {tuple(key_pool.shape)} and values {tuple(value_pool.shape)} do not fit together."
        )
    of_pools = torch.int8 if is_quantized else query.dtype
    if query.dtype != out.dtype or not of_pools == key_pool.dtype == value_pool.dtype:
        raise ValueError(f"dtypes differ: {query.dtype}, {key_pool.dtype}, {value_pool.dtype}, {out.dtype}.")
    if any(tensor.stride(2) != 1 for tensor in (query, key_pool, value_pool, out)):
        raise ValueError("the last dimension of query, pools and out must be contiguous.")
    if scaling <= 0:
        raise ValueError(f"`scaling` must be above 0, not {scaling}.")
