"""Compile cases of sampling parameters."""

from __future__ import annotations

from typing import Any

from hf_specdec.kernels import random_bits
from hf_specdec.kernels.sampling.triton import BLOCK, candidates_kernel, scores_kernel, thresholds_kernel

from .compiling import CompileCase


def compile_cases() -> list[CompileCase]:
    """Each kernel with everything on."""
    types = {
        "logits": "*bf16", "owners": "*i64", "temperatures": "*fp32", "top_ks": "*i32", "top_ps": "*fp32",
        "min_ps": "*fp32", "scores_out": "*fp32", "ids_out": "*i32", "ids_of": "*i32", "counts": "*i32",
        "outside": "*fp32", "capacity": "i32",
        "thresholds": "*fp32", "threshold_ids": "*i32", "seeds": "*i64", "positions": "*i64", "steps": "*i64",
        "do_sample": "*u8", "out": "*fp32", "vocab": "i32", "row_stride": "i32",
    }  # fmt: skip
    cases = []
    of_noise = {"seeds", "positions", "steps", "do_sample"}
    for name, kernel, warps, stream in (
        ("sampling candidates", candidates_kernel, 16, 0),
        ("sampling thresholds", thresholds_kernel, 16, 0),
        ("sampling scores", scores_kernel, 8, -1),
        ("sampling scores, drawn", scores_kernel, 8, random_bits.DRAFT_STREAM),
    ):
        names = kernel.arg_names
        flags: dict[str, Any] = {"BLOCK": BLOCK, "STREAM": stream}
        constants = {n: flags.get(n, True) for n in names if n.isupper()}
        left_out = [n for n in names if n in of_noise and stream < 0]
        constants.update((n, None) for n in left_out)
        signature = {n: types[n] for n in names if n in types and n not in left_out}
        cases.append(CompileCase(name, kernel, signature, constants, warps))
    return cases
