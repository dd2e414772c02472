"""Compile cases of batch-invariant products and row reductions."""

from __future__ import annotations

import torch

from hf_specdec.kernels.invariant.triton import product_kernel, softmax_kernel, stages_of, sum_kernel, tile_of

from .compiling import CompileCase


def compile_cases() -> list[CompileCase]:
    """The tiles of every dtype, with weights as `nn.Linear` has them and as they are multiplied, and the row reductions."""
    cases = []
    for kind, dtype, transposed, biased in (
        ("bf16", torch.bfloat16, True, False),
        ("bf16", torch.bfloat16, False, True),
        ("fp16", torch.float16, True, True),
        ("fp32", torch.float32, True, False),
        ("fp32", torch.float32, False, True),
    ):
        signature: dict[str, str] = dict.fromkeys(("out", "x", "weights"), f"*{kind}")
        integers = ("num_rows", "tiles_of_rows", "num_outputs", "width", "weight_entry")
        signature |= dict.fromkeys((*integers, "weight_column" if transposed else "weight_row"), "i32")
        constants: dict[str, bool | int | None] = {
            "HAS_BIAS": biased,
            "UPCAST": False,
            "weight_row" if transposed else "weight_column": 1,
        }
        if biased:
            signature["bias"] = f"*{kind}"
        else:
            constants["bias"] = None
        name = f"invariant product {kind}, weights {'[N, K]' if transposed else '[K, N]'}{', bias' if biased else ''}"
        unaligned = ("num_rows", "tiles_of_rows")
        cases.append(
            CompileCase(
                name, product_kernel, signature, {**constants, **tile_of(dtype)}, 4, stages_of(dtype), unaligned
            )
        )
    pointers = {"out": "*fp32", "x": "*fp32"}
    cases.append(CompileCase("invariant sum", sum_kernel, {**pointers, "width": "i32"}, {"BLOCK": 2048}))
    for kind in ("bf16", "fp16", "fp32"):
        pointers = {"out": f"*{kind}", "x": f"*{kind}", "width": "i32"}
        for log in (False, True):
            name = f"invariant {'log_' if log else ''}softmax {kind}"
            cases.append(CompileCase(name, softmax_kernel, pointers, {"LOG": log, "BLOCK": 2048}))
    return cases
