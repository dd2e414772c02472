"""Compile cases of linear layers of few rows."""

from __future__ import annotations

from hf_specdec.kernels.linear.triton import NARROW, WIDE, few_rows_kernel, gated_kernel

from .compiling import CompileCase


def compile_cases() -> list[CompileCase]:
    """Both tiles, with all that can come to them, and gated units."""
    cases = []
    three = [f"{name}{i}" for name in ("out", "weight") for i in range(3)]
    biases, sizes = [f"bias{i}" for i in range(3)], [f"outputs{i}" for i in range(3)]
    for name, kind, tile, biased, residual, even in (
        ("queries, keys and values", "bf16", WIDE, False, False, True),
        ("queries, keys and values with biases", "fp16", WIDE, True, False, True),
        ("output and residual", "bf16", NARROW, False, True, True),
        ("of odd sizes", "bf16", NARROW, True, False, False),
    ):
        pointers = [*three, "x", *(biases if biased else ()), *(("residual",) if residual else ())]
        signature = {**dict.fromkeys(pointers, f"*{kind}"), **dict.fromkeys(["num_rows", *sizes, "width"], "i32")}
        absent = dict.fromkeys([*(() if biased else biases), *(() if residual else ("residual",))])
        constants = {
            "HAS_BIAS": biased,
            "HAS_RESIDUAL": residual,
            "EVEN_N": even,
            "EVEN_K": even,
            "UPCAST": False,
            **tile,
        }
        unaligned = ("num_rows",) if even else ("num_rows", *sizes, "width")
        cases.append(
            CompileCase(
                f"few rows, {name}, {kind}",
                few_rows_kernel,
                signature,
                {**absent, **constants},
                4,
                tile["STAGES"],
                unaligned,
            )
        )
    for kind in ("bf16", "fp16"):
        signature = {**dict.fromkeys(("out", "x", "gate"), f"*{kind}"), "up_offset": "i64"}
        signature |= dict.fromkeys(("num_rows", "num_outputs", "width"), "i32")
        constants = {"EVEN_N": True, "EVEN_K": True, "UPCAST": False, **WIDE}
        cases.append(
            CompileCase(
                f"few rows, gated, {kind}", gated_kernel, signature, constants, 4, WIDE["STAGES"], ("num_rows",)
            )
        )
    return cases
