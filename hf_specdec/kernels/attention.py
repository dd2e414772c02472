"""Paged attention over a ragged batch with trees, on the GPU (definition: `reference.paged_attention`)."""

# pyright: reportCallIssue=false
from __future__ import annotations

import torch
import triton

from .attention_inputs import AttentionInputs
from .attention_kernels import LOG2E, attention_kernel, merge_kernel
from .attention_launch import (
    H200,
    AttentionLaunch,
    AttentionShape,
    choose_launch,
    device_limits,
    head_widths,
    merge_tile,
    next_power_of_two,
    num_tiles,
)
from .compiling import CompileCase


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
    """Attention of a ragged batch over a paged cache, in one launch (two where keys are split).

    Bytes it must move: per row its keys and values once, S * Hkv * (D + Dv) elements, (S * Hkv * D where the value pool is
    the front of the key pool), and each query and output once, T * H * (D + Dv). A tile holds `block_m` queries of a key
    head; a row with more reads its keys once per tile, the second time from the L2 cache if they fit there. Splits add
    2 * 4 * num_splits * T * H * Dv bytes.

    Args:
        query: [T, H, D] float16, bfloat16 or float32, any strides of tokens and heads.
        key_pool, value_pool: [slots, Hkv, D] and [slots, Hkv, Dv] of query's dtype; the batch's own keys are written. They may
            be views of one pool (MLA: values are the first Dv elements of the keys, then read once).
        inputs: see AttentionInputs.
        scaling: factor of the scores, above 0.
        window: a query at position p sees keys at positions above p - window only.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2).
        sinks: [H], one more logit per head, without a value (gpt-oss).
        alibi_slopes: [H], `slope * (key position - query position)` is added to the scores (Press et al. 2022).
        invariant: see `choose_launch`.
        launch: tile sizes, for measurements; None: `choose_launch`.
        out: [T, H, Dv] of query's dtype, last dimension contiguous.

    Returns: [T, H, Dv]. A query that sees no key gives zeros.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    num_tokens, num_heads, width = query.shape
    _, num_kv_heads, value_width = value_pool.shape
    if out is None:
        out = query.new_empty(num_tokens, num_heads, value_width)
    _check(query, key_pool, value_pool, inputs, scaling, window, alibi_slopes, out)
    if num_tokens == 0 or inputs.max_query_length == 0 or inputs.block_tables.shape[0] == 0:
        return out
    words = 0 if inputs.visibility is None else inputs.visibility.shape[1]
    biased = window is not None or alibi_slopes is not None
    shape = AttentionShape(
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
        masks_load=words > 1 or (biased and inputs.region_positions is not None),
    )
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
    with torch.cuda.device_of(query):  # a model may be spread over several; on the CPU this does nothing
        attention_kernel[num_kv_heads, tiles, splits](
            out, partial, lse, query, key_pool, value_pool, inputs.block_tables, inputs.query_starts, inputs.key_lengths,
            inputs.visibility, inputs.region_lengths, inputs.positions, inputs.region_positions, sinks, alibi_slopes,
            out.stride(0), out.stride(1), query.stride(0), query.stride(1), key_pool.stride(0), key_pool.stride(1),
            value_pool.stride(0), value_pool.stride(1), inputs.block_tables.stride(0),
            shape.num_rows, tiles_per_row, splits, launch.keys_per_split, window or 0,
            scaling * log2e if softcap is None else 2 * scaling / softcap * log2e, (softcap or 0.0) * log2e,
            GROUP=shape.group, WIDTH=width, WIDTH1=width1, WIDTH2=width2,
            VALUE_WIDTH=value_width, VALUE_BLOCK=max(next_power_of_two(value_width), 16),
            BLOCK_SIZE=inputs.block_size, WORDS=words, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
            VALUES_IN_KEYS=shape.values_in_keys, SPLIT=split, FIXED_SPLITS=launch.fixed_splits,
            BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, STAGES=launch.num_stages, PEEL=launch.peel,
            LATE_SUMS=launch.late_sums, EARLY_MERGE=split and launch.early_merge, UPCAST=not query.is_cuda,
            num_warps=launch.num_warps,
        )  # fmt: skip
        if split:
            block_v, block_s = merge_tile(value_width, launch)
            options = {"launch_pdl": True} if launch.early_merge else {}
            merge_kernel[num_tokens, num_heads, triton.cdiv(value_width, block_v)](
                out, partial, lse, inputs.query_starts, sinks, out.stride(0), out.stride(1), shape.num_rows, splits,
                VALUE_WIDTH=value_width, BLOCK_V=block_v, BLOCK_S=block_s, EARLY=launch.early_merge, num_warps=2,
                **options,
            )  # fmt: skip
    return out


def _values_in_keys(key_pool: torch.Tensor, value_pool: torch.Tensor, width1: int) -> bool:
    """Whether the values are the first elements of the keys, so that one load serves both."""
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


def compile_cases() -> list[CompileCase]:
    """Shapes of well-known models, with the tiles an H200 is given."""
    # name, dtype, rows, tokens per row, keys, key heads, group, widths, options
    trees, windowed = {"trees": True}, {"trees": True, "window": True}
    shapes: list[tuple] = [
        ("decode llama-8b 32k", "bf16", 1, 1, 32768, 8, 4, 128, 128, {}),
        ("decode llama-8b 512", "bf16", 1, 1, 512, 8, 4, 128, 128, {}),
        ("decode llama-8b 64x2k", "bf16", 64, 1, 2048, 8, 4, 128, 128, {}),
        ("verify tree of 8 llama-8b", "bf16", 1, 8, 32768, 8, 4, 128, 128, trees),
        ("verify tree of 64 llama-8b", "fp16", 8, 64, 4096, 8, 4, 128, 128, trees),
        ("prompt chunk llama-8b", "bf16", 2, 1024, 8192, 8, 4, 128, 128, {}),
        ("verify gemma-2 (256, softcap, window)", "bf16", 1, 8, 8192, 8, 2, 256, 256, {**windowed, "softcap": True}),
        ("verify gpt-oss (64, sinks, window)", "bf16", 8, 8, 8192, 8, 8, 64, 64, {**windowed, "sinks": True}),
        ("decode phi-3 (96)", "fp16", 1, 1, 4096, 32, 1, 96, 96, {}),
        ("verify bloom (80, alibi)", "fp16", 4, 8, 2048, 16, 1, 80, 80, {**trees, "slopes": True}),
        ("verify mla absorbed (576/512)", "bf16", 8, 4, 8192, 1, 128, 576, 512, {**trees, "values_in_keys": True}),
        ("verify mla absorbed, two pools", "bf16", 8, 4, 8192, 1, 128, 576, 512, trees),
        ("prompt chunk mla (192/128)", "bf16", 1, 1024, 4096, 16, 1, 192, 128, {}),
        ("verify float32 (128)", "fp32", 1, 8, 4096, 8, 4, 128, 128, trees),
        ("verify float32 (256)", "fp32", 1, 8, 4096, 8, 2, 256, 256, trees),
        ("invariant llama-8b", "bf16", 8, 8, 8192, 8, 4, 128, 128, {**trees, "invariant": True}),
    ]
    cases = [_attention_case(*shape) for shape in shapes]
    for name, width, block_s in (
        ("merge 8 of 128", 128, 8),
        ("merge 64 of 128", 128, 64),
        ("merge 64 of 512", 512, 64),
    ):
        pointers = {
            "out": "*bf16",
            "partial": "*fp32",
            "partial_lse": "*fp32",
            "query_starts": "*i32",
            "sinks": "*bf16",
        }
        integers = dict.fromkeys(("out_token", "out_head", "num_rows", "num_splits"), "i32")
        constants = {"VALUE_WIDTH": width, "BLOCK_V": 128, "BLOCK_S": block_s, "EARLY": True}
        unaligned = ("num_rows", "num_splits")
        signature = {**pointers, **integers}
        cases.append(CompileCase(name, merge_kernel, signature, constants, 2, 3, unaligned, ("EARLY",)))
    return cases


def _attention_case(name, dtype, rows, tokens, keys, kv_heads, group, width, value_width, options) -> CompileCase:
    itemsize = 4 if dtype == "fp32" else 2
    in_keys = options.get("values_in_keys", False)
    trees, windowed, biased = (options.get(key, False) for key in ("trees", "window", "slopes"))
    masks_load = trees and (tokens > 32 or windowed or biased)
    shape = AttentionShape(
        rows, rows * tokens, tokens, keys, kv_heads, group, width, value_width, itemsize, in_keys, masks_load
    )
    launch = choose_launch(shape, H200, options.get("invariant", False))
    split = launch.num_splits > 1 or launch.fixed_splits
    optional = {
        "partial": ("*fp32", split), "partial_lse": ("*fp32", split), "visibility": ("*i32", trees),
        "region_lengths": ("*i32", trees), "positions": ("*i32", windowed or biased),
        "region_positions": ("*i32", trees and (windowed or biased)),
        "sinks": (f"*{dtype}", options.get("sinks", False) and not split), "slopes": ("*fp32", biased),
    }  # fmt: skip
    signature = {key: kind for key, (kind, there) in optional.items() if there}
    signature |= dict.fromkeys(("out", "query", "keys", "values"), f"*{dtype}")
    signature |= dict.fromkeys(("block_tables", "query_starts", "key_lengths"), "*i32")
    unaligned = ("num_rows", "tiles_per_row", "num_splits", "keys_per_split", "window", "table_row")
    strides = ("out_token", "out_head", "query_token", "query_head", "key_slot", "key_head", "value_slot", "value_head")
    signature |= dict.fromkeys((*unaligned, *strides), "i32")
    signature |= {"score_factor": "fp32", "softcap_factor": "fp32"}
    width1, width2 = head_widths(width)
    constants = {key: None for key, (_, there) in optional.items() if not there}
    constants |= {
        "GROUP": group, "WIDTH": width, "WIDTH1": width1, "WIDTH2": width2, "VALUE_WIDTH": value_width,
        "VALUE_BLOCK": next_power_of_two(value_width), "BLOCK_SIZE": 16, "WORDS": max(tokens // 32, 1) if trees else 0,
        "HAS_WINDOW": windowed, "HAS_SOFTCAP": options.get("softcap", False),
        "VALUES_IN_KEYS": in_keys, "SPLIT": split, "FIXED_SPLITS": launch.fixed_splits,
        "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n, "STAGES": launch.num_stages, "UPCAST": False,
        "PEEL": launch.peel, "LATE_SUMS": launch.late_sums, "EARLY_MERGE": split and launch.early_merge,
    }  # fmt: skip
    tile = launch.num_warps, launch.num_stages
    return CompileCase(name, attention_kernel, signature, constants, *tile, unaligned, ("EARLY_MERGE",))
