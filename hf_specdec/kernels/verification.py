"""Greedy and coupled verification in Triton: from the target's logits to accepted paths and next tokens.

Two launches, whatever the trees look like: the target's choice after every root and node, split over the vocabulary, then
one program a row that merges the splits and walks the tree. Nothing crosses to the host, no softmax and no noise is
written to memory. Definitions: `random_bits.gumbel`, `argmax` with the lowest id first, `reference.accepted_nodes`.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .compiling import CompileCase
from .triton_random import TOKEN_STREAM
from .vocabulary import best_noisy, greatest, sampling_of

BLOCK = 4096  # ids per step of a program: 128 lanes
_STEPS = 4  # of a program, at most
_PROGRAMS = 1056  # wanted at least: an H100 has 132 multiprocessors, each takes 8 or more programs of 128 threads


@triton.jit
def _choices_kernel(
    logits, index, parents, valid, seeds, positions, do_sample, temperatures, limits, limit_ids, best_scores, best_ids,
    vocab, row_stride, num_nodes,
    TREE: tl.constexpr, SAMPLE: tl.constexpr, GREEDY_ONLY: tl.constexpr, HAS_TEMPERATURE: tl.constexpr,
    HAS_LIMITS: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    split = tl.program_id(1)
    row = place // (num_nodes + 1)
    slot = place % (num_nodes + 1)  # 0: the root
    # All loads before the first branch, so that they wait together.
    source = tl.load(index + place).to(tl.int64)
    wanted = tl.load(valid + row * num_nodes + slot - 1, mask=slot > 0, other=1) != 0
    sampled = False
    if SAMPLE or GREEDY_ONLY:
        sampled = tl.load(do_sample + row) != 0
    if GREEDY_ONLY:
        wanted = wanted & (not sampled)
    start = split * STEPS * LANES * 32
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0, tl.int32) + start
    if wanted:
        scores_row = logits + source * row_stride
        temperature, limit, limit_id = sampling_of(  # pyright: ignore[reportGeneralTypeIssues]
            row, source, temperatures, limits, limit_ids, HAS_TEMPERATURE, HAS_LIMITS
        )
        if SAMPLE and sampled:
            position = tl.load(positions + row)
            if TREE:
                node = slot - 1
                while node >= 0:
                    position += 1
                    node = tl.load(parents + row * num_nodes + node).to(tl.int32)
            else:
                position += slot
            best, best_id, _top, _sum = best_noisy(
                scores_row, start, vocab, -1, temperature, limit, limit_id, tl.load(seeds + row), position, 0,
                TOKEN_STREAM, False, HAS_TEMPERATURE, HAS_LIMITS, STEPS, LANES,
            )  # fmt: skip
        else:
            best, best_id = greatest(
                scores_row, start, tl.minimum(STEPS, tl.cdiv(vocab - start, LANES * 32)), vocab, temperature, limit,
                limit_id, HAS_TEMPERATURE, HAS_LIMITS, LANES,
            )  # fmt: skip
    at = place * tl.num_programs(1) + split
    tl.store(best_scores + at, best)
    tl.store(best_ids + at, best_id)


@triton.jit
def _walk_kernel(
    best_scores, best_ids, tokens, parents, valid, do_sample, choices_out, path, lengths, next_tokens, num_nodes,
    SPLITS: tl.constexpr, TREE: tl.constexpr, GREEDY_ONLY: tl.constexpr, WALK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, BLOCK_N)
    exists = slots <= num_nodes
    wanted = True
    if GREEDY_ONLY:
        wanted = tl.load(do_sample + row) == 0
    if wanted:
        places = row * (num_nodes + 1) + slots
        choices = tl.load(best_ids + places * SPLITS, mask=exists, other=0).to(tl.int64)
        if SPLITS > 1:
            best = tl.load(best_scores + places * SPLITS, mask=exists, other=0.0)
            for split in range(1, SPLITS):
                score = tl.load(best_scores + places * SPLITS + split, mask=exists, other=0.0)
                split_ids = tl.load(best_ids + places * SPLITS + split, mask=exists, other=0).to(tl.int64)
                choices = tl.where(score > best, split_ids, choices)  # of equals the earlier split: the lower id
                best = tl.maximum(score, best)
        tl.store(choices_out + places, choices, mask=exists)
        if WALK:
            is_node = exists & (slots > 0)
            nodes = row * num_nodes + slots - 1
            if TREE:
                parent_slots = tl.load(parents + nodes, mask=is_node, other=-1).to(tl.int32) + 1
            else:
                parent_slots = tl.maximum(slots - 1, 0)
            drafted = tl.load(tokens + nodes, mask=is_node, other=-1)
            match = is_node & (tl.load(valid + nodes, mask=is_node, other=0) != 0)
            match = (match & (drafted == tl.gather(choices, parent_slots, 0))).to(tl.int32)
            frontier = (slots == 0).to(tl.int32)  # what is reached, depth by depth
            depth = tl.where(slots == 0, 0, -1)
            level = tl.full([], 0, tl.int32)
            alive = tl.full([], 1, tl.int32)
            while alive > 0:
                frontier = tl.gather(frontier, parent_slots, 0) * match
                alive = tl.max(frontier, 0)
                level += alive
                depth = tl.where(frontier > 0, level, depth)
            last = tl.min(tl.where(depth == level, slots, BLOCK_N), 0)  # the first of the deepest
            tl.store(lengths + row, level)
            tl.store(next_tokens + row, tl.sum(tl.where(slots == last, choices, 0), 0))
            on_path = tl.zeros([BLOCK_N], tl.int32)
            while last > 0:
                on_path = tl.where(slots == last, 1, on_path)
                last = tl.sum(tl.where(slots == last, parent_slots, 0), 0)
            tl.store(path + nodes, on_path.to(tl.int8), mask=is_node)


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least n and 1."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def split_vocabulary(num_rows: int, vocab_size: int, block: int) -> tuple[int, int]:
    """How many programs share a row of logits, and how many blocks each of them reads: 1, 2 or 4, as loops are unrolled.

    Few rows are split until the chip is full.
    """
    blocks = max(ceil_div(vocab_size, block), 1)
    steps = _STEPS
    while steps > 1 and num_rows * ceil_div(blocks, steps) < _PROGRAMS:
        steps //= 2
    while steps > 1 and steps >= 2 * blocks:
        steps //= 2
    return ceil_div(blocks, steps), steps


def as_bytes(flags: torch.Tensor | None) -> torch.Tensor | None:
    """Booleans as bytes, without a copy: what Triton loads and stores most plainly."""
    return flags.view(torch.uint8) if flags is not None and flags.dtype == torch.bool else flags


def check_rows(logits: torch.Tensor, index: torch.Tensor, limits: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """Raise ValueError where shapes do not fit."""
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be [R, V] with adjacent ids, not {tuple(logits.shape)} by {logits.stride()}.")
    if index.dim() != 2 or not index.is_contiguous():
        raise ValueError("index must be a contiguous [B, N + 1].")
    if limits is not None and any(each.shape != logits.shape[:1] for each in limits):
        raise ValueError("limits must be two tensors [R].")


def _launch_choices(
    logits, index, parents, valid, seeds, positions, do_sample, temperature, limits, greedy_only, block
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Scores and ids of the best token per (row, slot, split), and the number of splits."""
    check_rows(logits, index, limits)
    batch, width = index.shape
    splits, steps = split_vocabulary(batch * width, logits.shape[1], block)
    scores = torch.empty(batch * width, splits, dtype=torch.float32, device=logits.device)
    ids = torch.empty(batch * width, splits, dtype=torch.int32, device=logits.device)
    sample = do_sample is not None and not greedy_only
    if sample and (seeds is None or positions is None):
        raise ValueError("Rows that sample need seeds and positions.")
    if batch:
        _choices_kernel[(batch * width, splits)](
            logits, index, parents, as_bytes(valid), seeds, positions, as_bytes(do_sample), temperature,
            *(limits or (None, None)), scores, ids, logits.shape[1], logits.stride(0), width - 1,
            TREE=parents is not None, SAMPLE=sample, GREEDY_ONLY=greedy_only, HAS_TEMPERATURE=temperature is not None,
            HAS_LIMITS=limits is not None, STEPS=steps, LANES=block // 32, num_warps=ceil_div(block, 1024),
        )  # fmt: skip
    return scores, ids, splits


def target_choices(
    logits: torch.Tensor,
    index: torch.Tensor,
    valid: torch.Tensor,
    parents: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    do_sample: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    limits: tuple[torch.Tensor, torch.Tensor] | None = None,
    block: int = BLOCK,
) -> torch.Tensor:
    """The target's own token after the root and after each node, int64 [B, N + 1]; 0 after padding.

    Greedy rows take the argmax of their scores, rows that sample the argmax of scores + Gumbel noise of the position (the
    numbers of `random_bits.gumbel`, stream TOKEN_STREAM, step 0); of equals the lowest id.

    Args:
        logits: float32, bfloat16 or float16 [R, V], without NaN; ids adjacent, rows may be strided.
        index: int64 or int32 [B, N + 1], the row of logits after the root and each node.
        valid: bool [B, N], which entries are nodes.
        parents: int64 [B, N], -1: the root; None: chains.
        seeds, positions: int64 [B], each row's stream and the index of the token after its root. Needed with do_sample.
        do_sample: bool [B]; None: all rows are greedy.
        temperature: float32 [B]; None: 1.
        limits: float32 [R] and int32 [R] from `sampling.sampling_limits`; None: nothing is removed.

    Floor: one read of the logits of existing nodes; 2 launches.
    """
    scores, ids, splits = _launch_choices(
        logits, index, parents, valid, seeds, positions, do_sample, temperature, limits, False, block
    )
    batch, width = index.shape
    choices = torch.empty(batch, width, dtype=torch.int64, device=logits.device)
    if batch:
        _walk_kernel[(batch,)](
            scores, ids, None, None, None, None, choices, None, None, None, width - 1,
            SPLITS=splits, TREE=False, GREEDY_ONLY=False, WALK=False, BLOCK_N=next_power_of_two(width), num_warps=4,
        )  # fmt: skip
    return choices


def verify_choices(
    logits: torch.Tensor,
    index: torch.Tensor,
    tokens: torch.Tensor,
    valid: torch.Tensor,
    parents: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    do_sample: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    limits: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    greedy_rows_only: bool = False,
    block: int = BLOCK,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk each tree along the target's own choices (definition: `reference.accepted_nodes`).

    Args:
        tokens: int64 [B, N], the drafted ids. The others: see `target_choices`.
        out: bool [B, N], int32 [B], int64 [B] to write to.
        greedy_rows_only: leave rows that sample alone, logits unread, outputs untouched.

    Returns: accepted path bool [B, N], its length int32 [B], and the token after it int64 [B].

    Floor: one read of the logits of existing nodes, R V itemsize bytes; 2 launches. Coupled rows also compute a fourth of a
    Philox call per 8 ids, which bounds their noise, and the noise of few.
    """
    if tokens.shape != valid.shape or index.shape[1] != tokens.shape[1] + 1 or not tokens.is_contiguous():
        raise ValueError("tokens and valid must be contiguous [B, N], index [B, N + 1].")
    scores, ids, splits = _launch_choices(
        logits, index, parents, valid, seeds, positions, do_sample, temperature, limits, greedy_rows_only, block
    )
    path, lengths, next_tokens = out if out is not None else empty_verdict(tokens)
    if tokens.shape[0]:
        choices = torch.empty(index.shape, dtype=torch.int64, device=logits.device)
        launch_walk(
            scores, ids, splits, tokens, parents, valid, do_sample if greedy_rows_only else None, choices,
            (path, lengths, next_tokens),
        )  # fmt: skip
    return path, lengths, next_tokens


def launch_walk(scores, ids, splits, tokens, parents, valid, only_greedy_of, choices, out) -> None:
    """Merge the splits and walk the trees; `only_greedy_of`: flags of rows to leave out, or None."""
    batch, num_nodes = tokens.shape
    _walk_kernel[(batch,)](
        scores, ids, tokens, parents, as_bytes(valid), as_bytes(only_greedy_of), choices, as_bytes(out[0]), out[1],
        out[2], num_nodes, SPLITS=splits, TREE=parents is not None, GREEDY_ONLY=only_greedy_of is not None, WALK=True,
        BLOCK_N=next_power_of_two(num_nodes + 1), num_warps=1 if parents is None else 4,
    )  # fmt: skip


def accepted_path(
    tokens: torch.Tensor, valid: torch.Tensor, parents: torch.Tensor | None, choices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk each tree along given choices int64 [B, N + 1]; arguments and results as in `verify_choices`.

    Floor: a few bytes a node; one launch.
    """
    out = empty_verdict(tokens)
    if tokens.shape[0]:
        launch_walk(None, choices, 1, tokens, parents, valid, None, torch.empty_like(choices), out)
    return out


def empty_verdict(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs for drafts [B, N], not initialised."""
    batch, device = tokens.shape[0], tokens.device
    return (
        torch.empty(tokens.shape, dtype=torch.bool, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int64, device=device),
    )


def compile_cases() -> list[CompileCase]:
    """Greedy chains, and coupled trees with everything on; the walk over trees and chains."""
    tensors = {
        "logits": "*bf16", "index": "*i64", "parents": "*i64", "valid": "*u8", "seeds": "*i64", "positions": "*i64",
        "do_sample": "*u8", "temperatures": "*fp32", "limits": "*fp32", "limit_ids": "*i32", "best_scores": "*fp32",
        "best_ids": "*i32", "vocab": "i32", "row_stride": "i32", "num_nodes": "i32",
    }  # fmt: skip
    cases = []
    for name, dtype, full in (("greedy", "*bf16", False), ("coupled", "*bf16", True), ("coupled fp32", "*fp32", True)):
        absent = () if full else ("parents", "seeds", "positions", "do_sample", "temperatures", "limits", "limit_ids")
        switches = dict(TREE=full, SAMPLE=full, GREEDY_ONLY=False, HAS_TEMPERATURE=full, HAS_LIMITS=full)
        signature = {k: v for k, v in {**tensors, "logits": dtype}.items() if k not in absent}
        constants = {**dict.fromkeys(absent), **switches, "STEPS": _STEPS, "LANES": BLOCK // 32}
        cases.append(CompileCase(f"choices {name}", _choices_kernel, signature, constants, 4, unaligned=("num_nodes",)))
    signature = {
        "best_scores": "*fp32", "best_ids": "*i32", "tokens": "*i64", "parents": "*i64", "valid": "*u8",
        "choices_out": "*i64", "path": "*u8", "lengths": "*i32", "next_tokens": "*i64", "num_nodes": "i32",
    }  # fmt: skip
    flags: dict[str, Any] = dict(do_sample=None, SPLITS=8, TREE=True, GREEDY_ONLY=False, WALK=True, BLOCK_N=64)
    cases.append(CompileCase("walk tree", _walk_kernel, signature, flags, 4, unaligned=("num_nodes",)))
    signature = {name: kind for name, kind in signature.items() if name != "parents"}
    flags = {**flags, "parents": None, "TREE": False, "BLOCK_N": 8}
    cases.append(CompileCase("walk chain", _walk_kernel, signature, flags, 1, unaligned=("num_nodes",)))
    return cases
