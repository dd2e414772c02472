"""Compile cases of root-mean-square norms."""

from __future__ import annotations

from hf_specdec.kernels.norms.triton import num_warps_of, rms_norm_kernel

from .compiling import CompileCase


def compile_cases() -> list[CompileCase]:
    """Of Llama-3.1-8B and of a head's queries."""
    cases = []
    for kind, width in (("bf16", 4096), ("bf16", 128), ("fp32", 4096)):
        signature = {**dict.fromkeys(("out", "x", "weight"), f"*{kind}"), "eps": "fp32", "width": "i32"}
        cases.append(
            CompileCase(f"rms norm {kind}, {width}", rms_norm_kernel, signature, {"BLOCK": width}, num_warps_of(width))
        )
    return cases
