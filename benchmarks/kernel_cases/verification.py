"""Compile cases of greedy and coupled verification."""

from __future__ import annotations

from typing import Any

from hf_specdec.kernels.verification.triton import BLOCK, MOST_STEPS, choices_kernel, walk_kernel

from .compiling import CompileCase


def compile_cases() -> list[CompileCase]:
    """Greedy chains, and coupled trees with everything on; the walk over trees and chains."""
    tensors = {
        "logits": "*bf16", "index": "*i64", "parents": "*i64", "valid": "*u8", "seeds": "*i64", "positions": "*i64",
        "do_sample": "*u8", "temperatures": "*fp32", "thresholds": "*fp32", "threshold_ids": "*i32", "best_scores": "*fp32",
        "best_ids": "*i32", "vocab": "i32", "row_stride": "i32", "num_nodes": "i32",
    }  # fmt: skip
    cases = []
    for name, dtype, full in (("greedy", "*bf16", False), ("coupled", "*bf16", True), ("coupled fp32", "*fp32", True)):
        absent = (
            ()
            if full
            else ("parents", "seeds", "positions", "do_sample", "temperatures", "thresholds", "threshold_ids")
        )
        signature = {k: v for k, v in {**tensors, "logits": dtype}.items() if k not in absent}
        constants = {**dict.fromkeys(absent), "STEPS": MOST_STEPS, "LANES": BLOCK // 32}
        cases.append(CompileCase(f"choices {name}", choices_kernel, signature, constants, 4, unaligned=("num_nodes",)))
    signature = {
        "best_scores": "*fp32", "best_ids": "*i32", "tokens": "*i64", "parents": "*i64", "valid": "*u8",
        "choices_out": "*i64", "path": "*u8", "lengths": "*i32", "next_tokens": "*i64", "num_nodes": "i32",
    }  # fmt: skip
    flags: dict[str, Any] = dict(SPLITS=8, BLOCK_N=64)
    cases.append(CompileCase("walk tree", walk_kernel, signature, flags, 4, unaligned=("num_nodes",)))
    signature = {name: kind for name, kind in signature.items() if name != "parents"}
    flags = {**flags, "parents": None, "BLOCK_N": 8}
    cases.append(CompileCase("walk chain", walk_kernel, signature, flags, 1, unaligned=("num_nodes",)))
    return cases
