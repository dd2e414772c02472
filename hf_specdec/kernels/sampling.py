"""Temperature, top-k, top-p and min-p in Triton, without sorting (definition: `sampling_reference.sampling_scores`).

What these parameters keep of a row is everything above a score, and of the tokens with just that score those from some id
on: the definition sorts ascending and stably and removes from the front. `sampling_limits` finds the score and the id, two
numbers a row, and the verification kernels apply them while they read the logits. Where scores are needed themselves,
drafted trees for one, `sampling_scores` writes them, with Gumbel noise if tokens are to be drawn.

The score is found by a radix search over the ordered bits of float32: three bits a pass, eight thresholds at once, counts
for top-k, masses for top-p. It is deterministic, and exact up to the rounding of the masses.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from . import random_bits
from .compiling import CompileCase
from .triton_random import gumbel_of_uniform, uniform_block
from .verification import as_bytes, load_scores, sampling_of

BLOCK = 2048  # ids per step of a program


@triton.jit
def _ordered(scores):
    """uint32 keys in the order of float32 scores; both zeros have one key."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _score_of(key):
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _search(
    row, vocab, temperature, top, floor, target, HAS_TEMPERATURE: tl.constexpr, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The greatest key below which lies no more than `target`, and what lies below it.

    MASS: exp(score - top) of tokens with keys from `floor` on; else their number, all tokens.
    """
    key = tl.full([], 0, tl.uint32)
    under = tl.full([], 0.0, tl.float32)
    digits = tl.arange(0, 8)
    for level in range(11):
        shift = tl.full([], 30, tl.int32) - 3 * level
        thresholds = key + (digits.to(tl.uint32) << shift.to(tl.uint32))
        below = tl.zeros([8, BLOCK], tl.float32)
        for first in range(0, vocab, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            scores = load_scores(row, ids, vocab, temperature, 0.0, 0, HAS_TEMPERATURE, False)
            keys = _ordered(scores)
            if MASS:
                weight = tl.where((keys >= floor) & (ids < vocab), tl.exp(scores - top), 0.0)
            else:
                weight = (ids < vocab).to(tl.float32)
            below += tl.where(keys[None, :] < thresholds[:, None], weight[None, :], 0.0)
        sums = tl.sum(below, 1)
        fits = (sums <= target) & ((level > 0) | (digits < 4))  # the first level has two bits
        digit = tl.max(tl.where(fits, digits, 0), 0)
        under = tl.where(digit > 0, tl.sum(tl.where(digits == digit, sums, 0.0), 0), under)
        key += digit.to(tl.uint32) << shift.to(tl.uint32)
    return key, under


@triton.jit
def _limits_kernel(
    logits, owners, temperatures, top_ks, top_ps, min_ps, limits, limit_ids, vocab, row_stride,
    HAS_OWNERS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    owner = place
    if HAS_OWNERS:
        owner = tl.load(owners + place).to(tl.int64)
    row = logits + place * row_stride
    temperature = 1.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperatures + owner)
    top_k = 0
    top_p = 1.0
    min_p = 0.0
    if HAS_TOP_K:
        top_k = tl.minimum(tl.load(top_ks + owner).to(tl.int32), vocab)
    if HAS_TOP_P:
        top_p = tl.load(top_ps + owner)
    if HAS_MIN_P:
        min_p = tl.load(min_ps + owner)
    lanes = tl.arange(0, BLOCK)
    limit = tl.full([], float("-inf"), tl.float32)
    limit_id = tl.full([], 0, tl.int32)
    if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
        tops = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(0, vocab, BLOCK):
            scores = load_scores(row, first + lanes, vocab, temperature, 0.0, 0, HAS_TEMPERATURE, False)
            tops = tl.maximum(tops, scores)
        top = tl.max(tops, 0)
        floor = tl.full([], 0, tl.uint32)
        if HAS_TOP_K and top_k > 0:
            floor, under = _search(
                row, vocab, temperature, top, floor, (vocab - top_k).to(tl.float32), HAS_TEMPERATURE, False, BLOCK
            )
            limit = _score_of(floor)
        if HAS_TOP_P and top_p < 1.0:
            masses = tl.zeros([BLOCK], tl.float32)
            for first in range(0, vocab, BLOCK):
                scores = load_scores(row, first + lanes, vocab, temperature, 0.0, 0, HAS_TEMPERATURE, False)
                masses += tl.where(_ordered(scores) >= floor, tl.exp(scores - top), 0.0)
            target = (1.0 - top_p) * tl.sum(masses, 0)
            key, under = _search(row, vocab, temperature, top, floor, target, HAS_TEMPERATURE, True, BLOCK)
            limit = tl.minimum(_score_of(tl.maximum(key, floor)), top)
            # Of the tokens with this score so many are removed, lowest ids first, at least one is kept.
            removed = tl.minimum(tl.floor((target - under) / tl.exp(limit - top)), 1e9).to(tl.int32)
            seen = tl.full([], 0, tl.int32)
            last = tl.full([], 0, tl.int32)
            for first in range(0, vocab, BLOCK):
                ids = first + lanes
                scores = load_scores(row, ids, vocab, temperature, 0.0, 0, HAS_TEMPERATURE, False)
                equal = (scores == limit) & (ids < vocab)
                if tl.max(equal.to(tl.int32), 0) > 0:
                    rank = seen + tl.cumsum(equal.to(tl.int32), 0)
                    last = tl.maximum(last, tl.max(tl.where(equal & (rank <= removed + 1), ids, 0), 0))
                    seen += tl.sum(equal.to(tl.int32), 0)
            limit_id = last
        if HAS_MIN_P and min_p > 0.0:
            least = top + tl.log(min_p)
            limit_id = tl.where(least > limit, 0, limit_id)
            limit = tl.maximum(limit, least)
    tl.store(limits + place, limit)
    tl.store(limit_ids + place, limit_id)


@triton.jit
def _scores_kernel(
    logits, owners, temperatures, limits, limit_ids, seeds, positions, steps, do_sample, out, vocab, row_stride,
    HAS_OWNERS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_LIMITS: tl.constexpr, STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    owner = place
    if HAS_OWNERS:
        owner = tl.load(owners + place).to(tl.int64)
    temperature, limit, limit_id = sampling_of(  # pyright: ignore[reportGeneralTypeIssues]
        owner, place, temperatures, limits, limit_ids, HAS_TEMPERATURE, HAS_LIMITS
    )
    start = tl.program_id(1) * BLOCK
    ids = start + tl.arange(0, BLOCK)
    scores = load_scores(
        logits + place * row_stride, ids, vocab, temperature, limit, limit_id, HAS_TEMPERATURE, HAS_LIMITS
    )
    if STREAM >= 0 and tl.load(do_sample + place) != 0:
        seed, position, step = tl.load(seeds + place), tl.load(positions + place), tl.load(steps + place)
        scores += gumbel_of_uniform(uniform_block(seed, position, step, STREAM, start, BLOCK))
    tl.store(out + place * vocab + ids, scores, mask=ids < vocab)


def sampling_limits(
    logits: torch.Tensor,
    owners: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    block: int = BLOCK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What sampling parameters keep of each row of logits, as a score and an id.

    With scores = logits / temperature, token i of row r is kept if scores[r, i] > limit[r], or if it equals limit[r] and
    i >= id[r]. Order and ties are those of `sampling_reference.sampling_scores`: top-k keeps all that equal the k-th, top-p removes
    equals from the lowest id on, min-p is relative to the likeliest token; a token whose mass lies within rounding of
    1 - top_p may fall to either side.

    Args:
        logits: float32, bfloat16 or float16 [R, V], without NaN; ids adjacent.
        owners: int64 [R], which parameters each row has; None: its own index.
        temperature: float32 [B], above 0; top_k: int32 [B], 0: off; top_p: float32 [B], 1: off; min_p: float32 [B], 0: off.
        out: float32 [R] and int32 [R] to write to.

    Returns: limits float32 [R], ids int32 [R]. Rows with everything off get -inf, which keeps all, and are not read.

    Floor: one read of the logits. The search reads them 12 times for top-k and 13 for top-p, mostly from cache where few
    rows run: one program a row.
    """
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be [R, V] with adjacent ids, not {tuple(logits.shape)} by {logits.stride()}.")
    rows, vocab = logits.shape
    if out is None:
        out = (
            torch.empty(rows, dtype=torch.float32, device=logits.device),
            torch.empty(rows, dtype=torch.int32, device=logits.device),
        )
    if rows:
        _limits_kernel[(rows,)](
            logits, owners, temperature, top_k, top_p, min_p, *out, vocab, logits.stride(0),
            HAS_OWNERS=owners is not None, HAS_TEMPERATURE=temperature is not None, HAS_TOP_K=top_k is not None,
            HAS_TOP_P=top_p is not None, HAS_MIN_P=min_p is not None, BLOCK=block, num_warps=16,
        )  # fmt: skip
    return out


@dataclass
class Noise:
    """Which of `random_bits.gumbel`'s noise is added to rows of logits.

    Attributes:
        seeds, positions, steps: int64 [R].
        do_sample: bool [R], rows that get any.
        stream: one of `random_bits`.
    """

    seeds: torch.Tensor
    positions: torch.Tensor
    steps: torch.Tensor
    do_sample: torch.Tensor
    stream: int


def sampling_scores(
    logits: torch.Tensor,
    limits: tuple[torch.Tensor, torch.Tensor] | None = None,
    owners: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    noise: Noise | None = None,
    out: torch.Tensor | None = None,
    block: int = BLOCK,
) -> torch.Tensor:
    """logits / temperature with removed tokens at -inf, plus noise, float32 [R, V]; other arguments: see `sampling_limits`.

    Args:
        limits: as `sampling_limits` returns them; None: nothing is removed.
        noise: Gumbel noise, so that a row's argmax is a draw; None: none.

    Floor: one read of the logits and one write of float32 [R, V]; with noise also about 20 instructions an id.
    """
    rows, vocab = logits.shape
    if logits.stride(1) != 1 or (limits is not None and any(each.shape != (rows,) for each in limits)):
        raise ValueError("logits must be [R, V] with adjacent ids, limits two tensors [R].")
    out = out if out is not None else torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    given = (None, None, None, None)
    if noise is not None:
        given = noise.seeds, noise.positions, noise.steps, as_bytes(noise.do_sample)
    if rows and vocab:
        _scores_kernel[(rows, triton.cdiv(vocab, block))](
            logits, owners, temperature, *(limits or (None, None)), *given, out, vocab, logits.stride(0),
            HAS_OWNERS=owners is not None, HAS_TEMPERATURE=temperature is not None, HAS_LIMITS=limits is not None,
            STREAM=-1 if noise is None else noise.stream, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out


def compile_cases() -> list[CompileCase]:
    """Each kernel with everything on."""
    types = {
        "logits": "*bf16", "owners": "*i64", "temperatures": "*fp32", "top_ks": "*i32", "top_ps": "*fp32",
        "min_ps": "*fp32", "limits": "*fp32", "limit_ids": "*i32", "seeds": "*i64", "positions": "*i64", "steps": "*i64",
        "do_sample": "*u8", "out": "*fp32", "vocab": "i32", "row_stride": "i32",
    }  # fmt: skip
    cases = []
    of_noise = {"seeds", "positions", "steps", "do_sample"}
    for name, kernel, warps, stream in (
        ("sampling limits", _limits_kernel, 16, 0),
        ("sampling scores", _scores_kernel, 8, -1),
        ("sampling scores, drawn", _scores_kernel, 8, random_bits.DRAFT_STREAM),
    ):
        names = kernel.arg_names
        flags: dict[str, Any] = {"BLOCK": BLOCK, "STREAM": stream}
        constants = {n: flags.get(n, True) for n in names if n.isupper()}
        left_out = [n for n in names if n in of_noise and stream < 0]
        constants.update((n, None) for n in left_out)
        signature = {n: types[n] for n in names if n in types and n not in left_out}
        cases.append(CompileCase(name, kernel, signature, constants, warps))
    return cases
