"""Compile cases of rejection verification."""

from __future__ import annotations

from typing import Any

from hf_specdec.kernels.rejection.triton import BLOCK, chain_kernel, draw_kernel, rejection_walk_kernel, sums_kernel

from .compiling import CompileCase


def compile_cases() -> list[CompileCase]:
    """All kernels, for chains of points, without parameters and with all, and for trees with everything on."""
    types = {
        **dict.fromkeys(("index", "tokens", "parents", "prob_index", "seeds", "starts", "steps", "next_tokens"), "*i64"),
        **dict.fromkeys(("probs", "temperatures", "thresholds", "maxima", "sums", "masses", "kept", "scales"), "*fp32"),
        **dict.fromkeys(("threshold_ids", "ends", "lengths", "best_ids"), "*i32"),
        **dict.fromkeys(("valid", "path"), "*u8"),
        **dict.fromkeys(("vocab", "row_stride", "num_nodes", "num_blocks", "num_probs"), "i32"),
        **dict.fromkeys(("blocks_per_split", "splits"), "i32"),
        "logits": "*bf16", "best_scores": "*fp32",
    }  # fmt: skip
    unaligned = ("num_nodes", "num_blocks", "num_probs", "blocks_per_split", "splits")
    chain: dict[str, Any] = dict(STEPS=4, LANES=BLOCK // 32, DRAWN=True, BLOCK=1024, BLOCK_N=8, BLOCK_S=8)
    tree: dict[str, Any] = dict(DRAWN=False, BLOCK=BLOCK, BLOCK_N=64, BLOCK_S=32)
    cases = []
    for kind, kernel, full, warps, flags in (
        ("chain points", chain_kernel, False, 4, chain),
        ("chain points fp32", chain_kernel, True, 4, chain),
        ("walk chain points", rejection_walk_kernel, False, 1, chain),
        ("sums tree probs", sums_kernel, True, 8, tree),
        ("walk tree probs", rejection_walk_kernel, True, 16, tree),
        ("draw tree probs", draw_kernel, True, 8, {**tree, "MERGE": False}),
        ("merge tree probs", draw_kernel, True, 8, {**tree, "MERGE": True}),
    ):
        absent = () if full else ("probs", "prob_index", "temperatures", "thresholds", "threshold_ids")
        names = kernel.arg_names
        given = dict(TREE=full, POINTS=not full, **flags)
        constants = {n: given.get(n) for n in names if n.isupper() or n in absent}
        signature = {n: types[n] for n in names if n not in constants}
        if "fp32" in kind:
            signature["logits"] = "*fp32"
        skewed = tuple(n for n in unaligned if n in names)
        cases.append(CompileCase(f"rejection {kind}", kernel, signature, constants, warps, unaligned=skewed))
    return cases
