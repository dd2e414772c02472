"""Temperature, top-k, top-p and min-p in Triton, without sorting (definition: `reference.sampling_scores`).

These parameters keep all tokens above a score, and of the tokens with exactly that score those from some id on, because the
definition sorts ascending and stably and removes from the front. `sampling_thresholds` finds this score and id per row, and the
verification kernels apply them while they read the logits. If the scores themselves are needed, for example for drafted trees,
`sampling_scores` writes them, with Gumbel noise if tokens are drawn.

A radix search over the ordered bits of float32 finds the score: three bits per pass, by counts for top-k and by masses for top-p.
It searches the row's likeliest tokens, which are copied out first, or all tokens if these are too many. It is deterministic, and
exact up to the rounding of the masses.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..dispatch import as_bytes
from ..random_bits.triton import gumbel_block
from .reference import RowParameters, owners_of
from .triton_scores import load_scores, sampling_of


@triton.jit
def _ordered(scores):
    """uint32 keys in the order of float32 scores; both zeros have the same key."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits ^ -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _score_of(key):
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _search(row, vocab, temperature, top, floor, target, KIND: tl.constexpr, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest key with no more than `target` below it, and the amount below it.

    MASS: the amount is the sum of exp(score - top) over tokens with keys from `floor` on; otherwise the number of tokens.
    """
    key = tl.full([], 0, tl.uint32)
    under = tl.full([], 0.0, tl.float32)
    digits = tl.arange(0, 8)
    for level in range(11):
        shift = tl.full([], 30, tl.int32) - 3 * level
        cuts = key + (digits.to(tl.uint32) << shift.to(tl.uint32))
        below = tl.zeros([8, BLOCK], tl.float32)
        for first in range(0, vocab, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            scores = load_scores(row, ids, vocab, (temperature, 0.0, 0), KIND)
            keys = _ordered(scores)
            if MASS:
                weight = tl.where((keys >= floor) & (ids < vocab), tl.exp(scores - top), 0.0)
            else:
                weight = (ids < vocab).to(tl.float32)
            below += tl.where(keys[None, :] < cuts[:, None], weight[None, :], 0.0)
        sums = tl.sum(below, 1)
        fits = (sums <= target) & ((level > 0) | (digits < 4))  # the first level has only two bits
        digit = tl.max(tl.where(fits, digits, 0), 0)
        under = tl.where(digit > 0, tl.sum(tl.where(digits == digit, sums, 0.0), 0), under)
        key += digit.to(tl.uint32) << shift.to(tl.uint32)
    return key, under


@triton.jit
def _parameters(place, owners, temperatures, top_ks, top_ps, min_ps, vocab):
    """Temperature, top-k, top-p and min-p of a row of logits; 1, 0, 1 and 0 are off."""
    owner = place
    if owners is not None:
        owner = tl.load(owners + place).to(tl.int64)
    temperature = 1.0
    top_k = 0
    top_p = 1.0
    min_p = 0.0
    if temperatures is not None:
        temperature = tl.load(temperatures + owner)
    if top_ks is not None:
        top_k = tl.minimum(tl.load(top_ks + owner).to(tl.int32), vocab)
    if top_ps is not None:
        top_p = tl.load(top_ps + owner)
    if min_ps is not None:
        min_p = tl.load(min_ps + owner)
    return temperature, top_k, top_p, min_p


@triton.jit
def candidates_kernel(
    logits, owners, temperatures, top_ks, top_ps, min_ps, scores_out, ids_out, counts, outside, vocab, row_stride, capacity,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy out a row's likeliest tokens, enough for its top-k or top-p, in the order of their ids.

    Also writes their number, or -1 if they exceed `capacity` or no token is removed, and the sum of exp(score - top) over the others.
    """
    place = tl.program_id(0).to(tl.int64)
    row = logits + place * row_stride
    KIND: tl.constexpr = (temperatures is not None, False)
    temperature, top_k, top_p, min_p = _parameters(place, owners, temperatures, top_ks, top_ps, min_ps, vocab)
    count = tl.full([], -1, tl.int32)
    if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
        lanes = tl.arange(0, BLOCK)
        wide_lanes = tl.arange(0, 4 * BLOCK)
        tops = tl.full([4 * BLOCK], float("-inf"), tl.float32)
        for first in range(0, vocab, 4 * BLOCK):
            scores = load_scores(row, first + wide_lanes, vocab, (temperature, 0.0, 0), KIND)
            tops = tl.maximum(tops, scores)
        top = tl.max(tops, 0)
        steps = tl.arange(0, 8)
        # 0.5, 1, 2, 4, 8, 12, 16 and 24 below the top, for peaked and flat distributions and all vocabulary sizes.
        depth = tl.where(steps < 4, tl.exp2(steps.to(tl.float32) - 1.0), tl.where(steps < 7, steps * 4.0 - 8.0, 24.0))
        cuts = top - depth
        numbers = tl.zeros([8, BLOCK], tl.float32)
        masses = tl.zeros([8, BLOCK], tl.float32)
        everything = tl.zeros([BLOCK], tl.float32)
        for first in range(0, vocab, BLOCK):
            scores = load_scores(row, first + lanes, vocab, (temperature, 0.0, 0), KIND)
            mass = tl.exp(scores - top)
            above = scores[None, :] >= cuts[:, None]
            numbers += tl.where(above, 1.0, 0.0)
            masses += tl.where(above, mass[None, :], 0.0)
            everything += mass
        number = tl.sum(numbers, 1)
        inside = tl.sum(masses, 1)
        total = tl.sum(everything, 0)
        # After top-k, only what it keeps counts. The margin leaves cases within rounding errors to the search over all tokens.
        least_mass = tl.where((top_k > 0) | (top_p >= 1.0), -1.0, (top_p + 1e-4) * total)
        enough = (number >= top_k) & (inside > least_mass) & (number <= capacity)
        step = tl.min(tl.where(enough, steps, 8), 0)
        if step < 8:
            chosen = steps == step
            cut = tl.max(tl.where(chosen, cuts, float("-inf")), 0)
            tl.store(outside + place, total - tl.max(tl.where(chosen, inside, 0.0), 0))
            count = tl.full([], 0, tl.int32)
            for first in range(0, vocab, BLOCK):
                ids = first + lanes
                scores = load_scores(row, ids, vocab, (temperature, 0.0, 0), KIND)
                if tl.max(scores, 0) >= cut:
                    taken = ((scores >= cut) & (ids < vocab)).to(tl.int32)
                    at = place * capacity + count + tl.cumsum(taken, 0) - 1
                    tl.store(scores_out + at, scores, mask=taken > 0)
                    tl.store(ids_out + at, ids, mask=taken > 0)
                    count += tl.sum(taken, 0)
    tl.store(counts + place, count)


@triton.jit
def thresholds_kernel(
    logits, owners, temperatures, top_ks, top_ps, min_ps, ids_of, counts, outside, thresholds, threshold_ids, vocab, row_stride,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Search for thresholds. CANDIDATES: in rows that have candidates, whose scores are in `logits`; otherwise in the other rows."""
    place = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + place)
    if (count >= 0) == CANDIDATES:
        row = logits + place * row_stride
        KIND: tl.constexpr = (temperatures is not None, False)
        temperature, top_k, top_p, min_p = _parameters(place, owners, temperatures, top_ks, top_ps, min_ps, vocab)
        size = vocab
        removed_mass = 0.0  # of tokens that are not candidates
        if CANDIDATES:
            size = count
            if top_ps is not None:
                removed_mass = tl.where(top_k > 0, 0.0, tl.load(outside + place))
        lanes = tl.arange(0, BLOCK)
        threshold = tl.full([], float("-inf"), tl.float32)
        threshold_id = tl.full([], 0, tl.int32)
        if (top_k > 0) | (top_p < 1.0) | (min_p > 0.0):
            tops = tl.full([BLOCK], float("-inf"), tl.float32)
            for first in range(0, size, BLOCK):
                scores = load_scores(row, first + lanes, size, (temperature, 0.0, 0), KIND)
                tops = tl.maximum(tops, scores)
            top = tl.max(tops, 0)
            floor = tl.full([], 0, tl.uint32)
            if top_ks is not None and top_k > 0:
                floor, under = _search(
                    row, size, temperature, top, floor, (size - top_k).to(tl.float32), KIND, False, BLOCK
                )
                threshold = _score_of(floor)
            if top_ps is not None and top_p < 1.0:
                masses = tl.zeros([BLOCK], tl.float32)
                for first in range(0, size, BLOCK):
                    scores = load_scores(row, first + lanes, size, (temperature, 0.0, 0), KIND)
                    masses += tl.where(_ordered(scores) >= floor, tl.exp(scores - top), 0.0)
                target = (1.0 - top_p) * (tl.sum(masses, 0) + removed_mass) - removed_mass
                key, under = _search(row, size, temperature, top, floor, target, KIND, True, BLOCK)
                threshold = tl.minimum(_score_of(tl.maximum(key, floor)), top)
                # So many of the tokens with this score are removed, lowest ids first; at least one is kept.
                removed = tl.minimum(tl.floor((target - under) / tl.exp(threshold - top)), 1e9).to(tl.int32)
                seen = tl.full([], 0, tl.int32)
                last = tl.full([], 0, tl.int32)
                for first in range(0, size, BLOCK):
                    at = first + lanes
                    scores = load_scores(row, at, size, (temperature, 0.0, 0), KIND)
                    equal = (scores == threshold) & (at < size)
                    if tl.max(equal.to(tl.int32), 0) > 0:
                        ids = at
                        if CANDIDATES:
                            ids = tl.load(ids_of + place * row_stride + at, mask=equal, other=0)
                        rank = seen + tl.cumsum(equal.to(tl.int32), 0)
                        last = tl.maximum(last, tl.max(tl.where(equal & (rank <= removed + 1), ids, 0), 0))
                        seen += tl.sum(equal.to(tl.int32), 0)
                threshold_id = last
            if min_ps is not None and min_p > 0.0:
                least = top + tl.log(min_p)
                threshold_id = tl.where(least > threshold, 0, threshold_id)
                threshold = tl.maximum(threshold, least)
        tl.store(thresholds + place, threshold)
        tl.store(threshold_ids + place, threshold_id)


@triton.jit
def scores_kernel(
    logits, owners, temperatures, thresholds, threshold_ids, seeds, positions, steps, do_sample, out, vocab, row_stride,
    STREAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Processed scores of one row of logits, with Gumbel noise where the row samples. A program is a row and BLOCK ids."""
    place = tl.program_id(0).to(tl.int64)
    owner = place
    if owners is not None:
        owner = tl.load(owners + place).to(tl.int64)
    KIND: tl.constexpr = (temperatures is not None, thresholds is not None)
    sampling = sampling_of(owner, place, temperatures, thresholds, threshold_ids)
    start = tl.program_id(1) * BLOCK
    ids = start + tl.arange(0, BLOCK)
    scores = load_scores(logits + place * row_stride, ids, vocab, sampling, KIND)
    if STREAM >= 0 and tl.load(do_sample + place) != 0:
        seed, position, step = tl.load(seeds + place), tl.load(positions + place), tl.load(steps + place)
        scores += gumbel_block(seed, position, step, STREAM, start, BLOCK)
    tl.store(out + place * vocab + ids, scores, mask=ids < vocab)


# ---- launches ----

BLOCK = 2048  # ids per iteration of a program
CAPACITY = 4096  # the most candidates of a row


def sampling_thresholds(
    logits: torch.Tensor,
    owners: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    block: int = BLOCK,
    capacity: int = CAPACITY,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the score and id of each row of logits from which sampling parameters keep tokens.

    With scores = logits / temperature, token i of row r is kept if scores[r, i] > threshold[r], or if it equals threshold[r] and
    i >= id[r]. Order and ties are as in `reference.sampling_scores`: top-k keeps all that equal the k-th, top-p removes
    equals from the lowest id on, min-p is relative to the likeliest token; a token whose mass lies within rounding of
    1 - top_p may fall to either side.

    Args:
        logits: float32, bfloat16 or float16 [R, V], without NaN; ids adjacent.
        owners: int64 [R], which parameters each row uses; None: its own index.
        temperature: float32 [B], above 0; top_k: int32 [B], 0: off; top_p: float32 [B], 1: off; min_p: float32 [B], 0: off.
        out: float32 [R] and int32 [R] to write to.

    Returns: thresholds float32 [R], ids int32 [R]. Rows with all parameters off are not read and get -inf, which keeps all tokens.

    Memory traffic: the logits are read three times to find the likeliest tokens (once is the least possible). The search then reads only
    these, 12 times for top-k and 13 for top-p; if they are more than `capacity`, it reads the logits. One program per row.
    """
    rows, vocab = logits.shape

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    if out is None:
        out = empty(rows, dtype=torch.float32), empty(rows, dtype=torch.int32)
    if not rows:
        return out
    scores, ids = empty(rows, capacity, dtype=torch.float32), empty(rows, capacity, dtype=torch.int32)
    counts, outside = empty(rows, dtype=torch.int32), empty(rows, dtype=torch.float32)
    candidates_kernel[(rows,)](
        logits, owners, temperature, top_k, top_p, min_p, scores, ids, counts, outside, vocab, logits.stride(0), capacity,
        BLOCK=block, num_warps=16,
    )  # fmt: skip
    sources: list[tuple[Any, ...]] = [(scores, None, capacity, True), (logits, temperature, logits.stride(0), False)]
    for source, used, stride, candidates in sources:
        thresholds_kernel[(rows,)](
            source, owners, used, top_k, top_p, min_p, ids, counts, outside, *out, vocab, stride, CANDIDATES=candidates,
            BLOCK=block, num_warps=16,
        )  # fmt: skip
    return out


class Noise(NamedTuple):
    """Gumbel noise for rows of logits: seeds, positions and steps int64 [R], bool [R] rows that get noise, a stream of `random_bits`."""

    seeds: torch.Tensor
    positions: torch.Tensor
    steps: torch.Tensor
    do_sample: torch.Tensor
    stream: int


def sampling_scores(
    logits: torch.Tensor,
    thresholds: tuple[torch.Tensor, torch.Tensor] | None = None,
    owners: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    noise: Noise | None = None,
    out: torch.Tensor | None = None,
    block: int = BLOCK,
) -> torch.Tensor:
    """logits / temperature with removed tokens at -inf, plus noise: float32 [R, V]. Other arguments: see `sampling_thresholds`.

    Args:
        thresholds: from `sampling_thresholds`; None: no token is removed.
        noise: Gumbel noise, which makes a row's argmax a draw; None: no noise.

    Memory traffic: the logits read once and float32 [R, V] written once. Noise adds a Philox call per 4 ids, one per 32, and two
    logarithms per id.
    """
    rows, vocab = logits.shape
    out = out if out is not None else torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    given = (None,) * 4 if noise is None else (*noise[:3], as_bytes(noise.do_sample))
    if rows and vocab:
        scores_kernel[(rows, triton.cdiv(vocab, block))](
            logits, owners, temperature, *(thresholds or (None, None)), *given, out, vocab, logits.stride(0),
            STREAM=-1 if noise is None else noise.stream, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out


def apply_parameters(logits, parameters: RowParameters, rows=None) -> torch.Tensor:
    """See `reference.apply_parameters`."""
    if parameters.are_off:
        return logits
    flat, owners = logits.flatten(0, 1), owners_of(logits, rows)
    thresholds = _thresholds(flat, owners, parameters)
    return sampling_scores(flat, thresholds, owners, parameters.temperature).view(logits.shape)


def noisy_scores(logits, parameters: RowParameters, ahead, stream, shared, rows=None, applied=False) -> torch.Tensor:
    """See `reference.noisy_scores`."""
    flat, owners = logits.flatten(0, 1), owners_of(logits, rows)
    noise = Noise(*parameters.noise_keys(logits, rows, ahead, shared), parameters.do_sample[owners], stream)
    temperature = None if applied else parameters.temperature
    thresholds = None if applied else _thresholds(flat, owners, parameters)
    return sampling_scores(flat, thresholds, owners, temperature, noise).view(logits.shape)


def choices(logits, parameters: RowParameters, ahead, rows=None) -> torch.Tensor:
    """See `reference.choices`."""
    from ..verification.triton import target_choices

    flat, owners = logits.flatten(0, 1), owners_of(logits, rows)
    at = torch.arange(len(flat), device=flat.device)[:, None]
    chosen = target_choices(
        flat, at, at.new_zeros(len(flat), 0, dtype=torch.bool), None, parameters.seeds[owners],
        parameters.positions[owners] + ahead, parameters.do_sample[owners],
        None if parameters.temperature is None else parameters.temperature[owners],
        _thresholds(flat, owners, parameters),
    )  # fmt: skip
    return chosen.view(logits.shape[:2])


def _thresholds(
    flat: torch.Tensor, owners: torch.Tensor, parameters: RowParameters
) -> tuple[torch.Tensor, torch.Tensor] | None:
    given = (parameters.temperature, parameters.top_k, parameters.top_p, parameters.min_p)
    return sampling_thresholds(flat, owners, *given) if parameters.removes else None
