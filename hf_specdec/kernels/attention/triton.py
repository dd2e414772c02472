"""Launch paged attention over a ragged batch with trees (definition: `reference.paged_attention`)."""

# pyright: reportCallIssue=false
from __future__ import annotations

import torch
import triton

from ..launching import next_power_of_two
from .inputs import AttentionInputs
from .launch import (
    AttentionLaunch,
    AttentionShape,
    choose_launch,
    device_limits,
    head_widths,
    merge_tile,
    num_tiles,
)
from .triton_kernels import LOG2E, attention_kernel, merge_kernel


def paged_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    inputs: AttentionInputs,
    scaling: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    invariant: bool = False,
    launch: AttentionLaunch | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a ragged batch over a paged cache, in one launch (two if keys are split).

    Memory traffic: keys and values once per row, S * Hkv * (D + Dv) elements (S * Hkv * D if the value pool is the front of the
    key pool), and each query and output once, T * H * (D + Dv). A tile holds `block_m` queries of a key head. A row with more
    queries reads its keys once per tile, again from the L2 cache if they fit. Splits add 2 * 4 * num_splits * T * H * Dv bytes.

    Args:
        query: [T, H, D] float16, bfloat16 or float32, any strides of tokens and heads.
        key_pool, value_pool: [slots, Hkv, D] and [slots, Hkv, Dv] of query's dtype; the batch's own keys must already be
            written. They may be views of one pool (MLA: values are the first Dv elements of the keys, and are read once).
        inputs: see AttentionInputs.
        scaling: factor of the scores; must be above 0.
        window: a query at position p sees only keys at positions above p - window.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2).
        sinks: [H], one more logit per head, without a value (gpt-oss).
        alibi_slopes: [H], `slope * (key position - query position)` is added to the scores (Press et al. 2022).
        invariant: see `choose_launch`.
        launch: tile sizes, for measurements; None: `choose_launch`.
        out: [T, H, Dv] of query's dtype, last dimension contiguous.

    Returns: [T, H, Dv]. A query that sees no key gives zeros.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    num_tokens, num_heads, width = query.shape
    _, num_kv_heads, value_width = value_pool.shape
    if out is None:
        out = query.new_empty(num_tokens, num_heads, value_width)
    _check(query, key_pool, value_pool, inputs, scaling, window, alibi_slopes, out)
    if num_tokens == 0 or inputs.max_query_length == 0 or inputs.block_tables.shape[0] == 0:
        return out
    shape = _shape_of(query, key_pool, value_pool, inputs, window is not None or alibi_slopes is not None)
    if launch is None:
        launch = choose_launch(shape, device_limits(query.device), invariant)
    tiles, tiles_per_row = num_tiles(shape, launch.block_m)
    splits = launch.num_splits
    split = splits > 1 or launch.fixed_splits
    partial = lse = None
    if split:
        partial = query.new_empty(num_tokens, num_heads, splits, value_width, dtype=torch.float32)
        lse = query.new_empty(num_tokens, num_heads, splits, dtype=torch.float32)
    log2e = LOG2E.value
    width1, width2 = head_widths(width)
    with torch.cuda.device_of(query):  # a model may be spread over several devices; on a CPU this does nothing
        attention_kernel[num_kv_heads, tiles, splits](
            out, partial, lse, query, key_pool, value_pool, inputs.block_tables, inputs.query_starts, inputs.key_lengths,
            inputs.visibility, inputs.region_lengths, inputs.positions, inputs.region_positions, sinks, alibi_slopes,
            out.stride(0), out.stride(1), query.stride(0), query.stride(1), key_pool.stride(0), key_pool.stride(1),
            value_pool.stride(0), value_pool.stride(1), inputs.block_tables.stride(0),
            shape.num_rows, tiles_per_row, splits, launch.keys_per_split, window or 0,
            scaling * log2e if softcap is None else 2 * scaling / softcap * log2e, (softcap or 0.0) * log2e,
            GROUP=shape.group, WIDTH=width, WIDTH1=width1, WIDTH2=width2,
            VALUE_WIDTH=value_width, VALUE_BLOCK=max(next_power_of_two(value_width), 16),
            BLOCK_SIZE=inputs.block_size, WORDS=_words(inputs), HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
            VALUES_IN_KEYS=shape.values_in_keys, SPLIT=split, FIXED_SPLITS=launch.fixed_splits,
            BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, STAGES=launch.num_stages, PEEL=launch.peel,
            LATE_SUMS=launch.late_sums, EARLY_MERGE=split and launch.early_merge, UPCAST=not query.is_cuda,
            num_warps=launch.num_warps,
        )  # fmt: skip
        if split:
            _merge(out, partial, lse, inputs, sinks, launch)
    return out


def _merge(out, partial, lse, inputs: AttentionInputs, sinks, launch: AttentionLaunch) -> None:
    """Merge the splits' results [T, H, splits, Dv] into `out` [T, H, Dv]."""
    num_tokens, num_heads, value_width = out.shape
    block_v, block_s = merge_tile(value_width, launch)
    options = {"launch_pdl": True} if launch.early_merge else {}
    merge_kernel[num_tokens, num_heads, triton.cdiv(value_width, block_v)](
        out, partial, lse, inputs.query_starts, sinks, out.stride(0), out.stride(1), inputs.block_tables.shape[0],
        launch.num_splits, VALUE_WIDTH=value_width, BLOCK_V=block_v, BLOCK_S=block_s, EARLY=launch.early_merge, num_warps=2,
        **options,
    )  # fmt: skip


def _words(inputs: AttentionInputs) -> int:
    """Words of visibility per token."""
    return 0 if inputs.visibility is None else inputs.visibility.shape[1]


def _shape_of(query, key_pool, value_pool, inputs: AttentionInputs, biased: bool) -> AttentionShape:
    """The shapes that tile sizes depend on; `biased`: with a window or ALiBi, which read positions."""
    num_tokens, num_heads, width = query.shape
    _, num_kv_heads, value_width = value_pool.shape
    return AttentionShape(
        num_rows=inputs.block_tables.shape[0],
        num_tokens=num_tokens,
        max_query_length=inputs.max_query_length,
        max_key_length=inputs.max_key_length,
        num_kv_heads=num_kv_heads,
        group=num_heads // num_kv_heads,
        key_width=width,
        value_width=value_width,
        itemsize=query.element_size(),
        values_in_keys=_values_in_keys(key_pool, value_pool, head_widths(width)[0]),
        masks_load=_words(inputs) > 1 or (biased and inputs.region_positions is not None),
    )


def _values_in_keys(key_pool: torch.Tensor, value_pool: torch.Tensor, width1: int) -> bool:
    """True if the values are the first elements of the keys, so that one load serves both."""
    same_place = key_pool.data_ptr() == value_pool.data_ptr() and key_pool.stride() == value_pool.stride()
    return same_place and value_pool.shape[2] == width1


def _check(query, key_pool, value_pool, inputs, scaling, window, alibi_slopes, out):
    num_tokens, num_heads, width = query.shape
    kv_heads, value_width = value_pool.shape[1:]
    if key_pool.shape[1:] != (kv_heads, width) or num_heads % kv_heads or key_pool.shape[0] != value_pool.shape[0]:
        raise ValueError(
            f"query {tuple(query.shape)}, keys {tuple(key_pool.shape)} and values {tuple(value_pool.shape)} do not fit together."
        )
    if not query.dtype == key_pool.dtype == value_pool.dtype == out.dtype:
        raise ValueError(f"dtypes differ: {query.dtype}, {key_pool.dtype}, {value_pool.dtype}, {out.dtype}.")
    if tuple(out.shape) != (num_tokens, num_heads, value_width):
        raise ValueError(f"`out` must have shape {(num_tokens, num_heads, value_width)}, not {tuple(out.shape)}.")
    if any(tensor.stride(2) != 1 for tensor in (query, key_pool, value_pool, out)):
        raise ValueError("the last dimension of query, pools and out must be contiguous.")
    if scaling <= 0:
        raise ValueError(f"`scaling` must be above 0, not {scaling}.")
    if (window is not None or alibi_slopes is not None) and inputs.positions is None:
        raise ValueError("sliding windows and ALiBi need `inputs.positions`.")
    for name in ("visibility", "positions"):
        tensor = getattr(inputs, name)
        if tensor is not None and tensor.shape[0] < num_tokens:
            raise ValueError(f"`{name}` has {tensor.shape[0]} of {num_tokens} tokens.")
