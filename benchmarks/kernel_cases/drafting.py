"""Compile cases of the drafting operations."""

from __future__ import annotations

from hf_specdec.kernels.drafting.triton import (
    LAYERS_PER_LAUNCH,
    frontier_kernel,
    gather_kernel,
    prune_kernel,
    widen_kernel,
)

from .compiling import CompileCase


def compile_cases() -> list[CompileCase]:
    """One case a kernel, at the sizes of EAGLE-2's default tree (10 children, depth 6, 60 nodes)."""
    i64 = (
        "tokens", "parents", "expanded", "best_indices", "best_tokens", "best_parents", "out_tokens", "out_parents",
        "out_expanded", "out_nodes", "index",
    )  # fmt: skip
    i32 = ("limits", "lengths", "places")
    numbers = ("depth", "frontier", "width", "keep", "size", "count", "draft_size", "vocab", "hidden",
               "out_stride")  # fmt: skip
    types = {**dict.fromkeys(i64, "*i64"), **dict.fromkeys(i32, "*i32"), **dict.fromkeys(numbers, "i32")}
    types |= {"scores": "*bf16", "fill": "fp32", **{f"layer{i}": "*bf16" for i in range(LAYERS_PER_LAUNCH)}}
    cases = []
    for name, kernel, constants in (
        ("next frontier", frontier_kernel, {"HAS_LIMITS": True, "BLOCK": 128}),
        ("prune tree", prune_kernel, {"BLOCK": 512}),
        ("widen vocabulary", widen_kernel, {"BLOCK": 2048}),
        ("gather features", gather_kernel, {"BLOCK": 2048}),
    ):
        names = [n for n in kernel.arg_names if n not in constants]
        signature = {n: types.get(n, "*fp32") for n in names}
        if kernel is gather_kernel:
            signature["out"] = "*bf16"
        skewed = tuple(n for n in names if n in numbers and n not in ("vocab", "draft_size", "hidden", "out_stride"))
        warps = 8 if name == "widen vocabulary" else 4
        cases.append(CompileCase(f"draft {name}", kernel, signature, constants, warps, unaligned=skewed))
    return cases
