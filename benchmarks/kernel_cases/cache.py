"""Compile cases of cache writes and moves."""

from __future__ import annotations

import triton

from hf_specdec.kernels.cache.triton import move_kernel, write_kernel

from .compiling import CompileCase


def compile_cases() -> list[CompileCase]:
    """Shapes of well-known models."""
    cases = []
    for name, dtype, heads, kv_heads, width, value_width, rotary in (
        ("write llama-8b", "bf16", 0, 8, 128, 128, 0),
        ("rotate and write llama-8b", "bf16", 32, 8, 128, 128, 128),
        ("rotate and write phi-2 (80, partial)", "fp16", 32, 32, 80, 80, 32),
        ("write mla (192/128)", "bf16", 0, 16, 192, 128, 0),
        ("rotate and write float32", "fp32", 32, 8, 128, 128, 128),
        ("rotate and write llama-8b in int8", "bf16", 32, 8, 128, 128, 128),
    ):
        queries = ("query_out", "query") if heads else ()
        angles = ("cos", "sin") if rotary else ()
        pointers = ("keys", "values", "key_pool", "value_pool", *queries, *angles)
        signature = {**dict.fromkeys(pointers, f"*{dtype}"), "slots": "*i64"}
        if is_quantized := name.endswith("int8"):
            pools = {"key_pool": "*i8", "value_pool": "*i8", "key_scales": "*fp32", "value_scales": "*fp32"}
            signature |= pools
        signature |= dict.fromkeys(write_kernel.arg_names[11:23], "i32")
        block_d, block_dv = triton.next_power_of_2(width), triton.next_power_of_2(value_width)
        constants = {
            **{key: None for key in ("query_out", "query", "cos", "sin") if key not in pointers},
            **({} if is_quantized else {"key_scales": None, "value_scales": None}),
            "QUERY_HEADS": heads, "KEY_HEADS": kv_heads, "VALUE_HEADS": kv_heads, "WIDTH": width,
            "VALUE_WIDTH": value_width, "ROTARY": rotary, "BLOCK_D": block_d, "BLOCK_DV": block_dv,
            "BLOCK_H": max(min(2048 // max(block_d, block_dv), 16), 1),
        }  # fmt: skip
        cases.append(CompileCase(name, write_kernel, signature, constants))
    signature = {"addresses": "*i64", "row_words": "*i32", "source": "*i64", "target": "*i64", "num_moves": "i32"}
    for name, word, aligned in (("move", 4, True), ("move, unaligned", 2, False)):
        constants = {"WORD_BYTES": word, "ALIGNED": aligned, "BLOCK": 128 * 16 // word, "MOVES": 8}
        cases.append(CompileCase(name, move_kernel, signature, constants, unaligned=("num_moves",)))
    return cases
