"""Compile cases of attention: shapes of well-known models, with the tiles that an H200 is given."""

from __future__ import annotations

from hf_specdec.kernels.attention.launch import H200, AttentionShape, choose_launch, head_widths
from hf_specdec.kernels.attention.triton import attention_kernel, merge_kernel
from hf_specdec.kernels.dispatch import next_power_of_two

from .compiling import CompileCase


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
        ("draft llama-8b (window, first keys)", "bf16", 8, 8, 8192, 8, 4, 128, 128, {**windowed, "kept": True}),
        ("decode phi-3 (96)", "fp16", 1, 1, 4096, 32, 1, 96, 96, {}),
        ("verify bloom (80)", "fp16", 4, 8, 2048, 16, 1, 80, 80, trees),
        ("verify mla absorbed (576/512)", "bf16", 8, 4, 8192, 1, 128, 576, 512, {**trees, "shared": True}),
        ("decode mla absorbed (576/512)", "bf16", 1, 1, 32768, 1, 16, 576, 512, {"shared": True}),
        ("verify mla absorbed (288/256)", "bf16", 8, 4, 8192, 1, 40, 288, 256, {**trees, "shared": True}),
        ("verify mla absorbed, float32", "fp32", 1, 4, 8192, 1, 16, 576, 512, {**trees, "shared": True}),
        ("prompt chunk mla (192/128)", "bf16", 1, 1024, 4096, 16, 1, 192, 128, {}),
        ("verify float32 (128)", "fp32", 1, 8, 4096, 8, 4, 128, 128, trees),
        ("verify float32 (256)", "fp32", 1, 8, 4096, 8, 2, 256, 256, trees),
        ("decode llama-8b 32k in int8", "bf16", 1, 1, 32768, 8, 4, 128, 128, {"int8": True}),
        ("verify tree of 8 phi-3 in int8", "fp16", 4, 8, 4096, 32, 1, 96, 96, {**trees, "int8": True}),
        ("verify t5 (64, biases)", "bf16", 8, 8, 2048, 16, 1, 64, 64, {**trees, "biases": True}),
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
    trees, windowed, biased = (options.get(key, False) for key in ("trees", "window", "biases"))
    masks_load = trees and (tokens > 32 or windowed or biased)
    shape = AttentionShape(
        rows,
        rows * tokens,
        tokens,
        keys,
        kv_heads,
        group,
        width,
        value_width,
        itemsize,
        masks_load,
        options.get("shared", False),
    )
    launch = choose_launch(shape, H200, options.get("invariant", False))
    split = launch.num_splits > 1 or launch.fixed_splits
    optional = {
        "partial": ("*fp32", split), "partial_lse": ("*fp32", split), "visibility": ("*i32", trees),
        "region_lengths": ("*i32", trees), "positions": ("*i32", windowed or biased),
        "region_positions": ("*i32", trees and (windowed or biased)),
        "sinks": (f"*{dtype}", options.get("sinks", False) and not split),
        "biases": ("*fp32", biased),
        **dict.fromkeys(("key_scales", "value_scales"), ("*fp32", options.get("int8", False))),
    }  # fmt: skip
    signature = {key: kind for key, (kind, there) in optional.items() if there}
    signature |= dict.fromkeys(("out", "query"), f"*{dtype}")
    signature |= dict.fromkeys(("keys", "values"), "*i8" if options.get("int8") else f"*{dtype}")
    signature |= dict.fromkeys(("block_tables", "query_starts", "key_lengths"), "*i32")
    unaligned = ("num_rows", "tiles_per_row", "num_splits", "keys_per_split", "window", "kept")
    unaligned += ("table_row", "bias_head")
    strides = ("out_token", "out_head", "query_token", "query_head", "key_slot", "key_head", "value_slot", "value_head")
    signature |= dict.fromkeys((*unaligned, *strides), "i32")
    signature |= {"score_factor": "fp32", "softcap_factor": "fp32"}
    width1, width2 = head_widths(width)
    constants = {key: None for key, (_, there) in optional.items() if not there}
    constants |= {
        "GROUP": group, "WIDTH": width, "WIDTH1": width1, "WIDTH2": width2, "VALUE_WIDTH": value_width,
        "VALUE_BLOCK": next_power_of_two(value_width), "SHARED": options.get("shared", False),
        "BLOCK_SIZE": 16, "WORDS": max(tokens // 32, 1) if trees else 0,
        "HAS_WINDOW": windowed, "HAS_KEPT": options.get("kept", False), "HAS_SOFTCAP": options.get("softcap", False),
        "SPLIT": split, "FIXED_SPLITS": launch.fixed_splits,
        "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n, "STAGES": launch.num_stages, "UPCAST": False,
        "PEEL": launch.peel, "EARLY_MERGE": split and launch.early_merge,
    }  # fmt: skip
    tile = launch.num_warps, launch.num_stages
    return CompileCase(name, attention_kernel, signature, constants, *tile, unaligned, ("EARLY_MERGE",))
