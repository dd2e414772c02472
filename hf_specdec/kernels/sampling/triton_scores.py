"""Device functions over one row of logits: its greatest score, its best score with noise, and its softmax sum.

A program works on tiles of LANES x 32 ids. Each lane has four groups of 8 adjacent ids, 256 ids apart, whose minima are the four
words of one Philox counter (see `random_bits`). So neighbouring lanes read neighbouring ids, threads exchange nothing until the
end, and one counter serves 32 ids.
"""

# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from ..random_bits.triton import (
    GROUP,
    MOST_GUMBEL,
    gumbel_block,
    gumbel_of_ids,
    minimum_words,
    most_noise,
    words_of_groups,
)

NO_ID = tl.constexpr(2**31 - 1)
MOST_BOUND = tl.constexpr(3e38)
NO_BOUND = tl.constexpr(-2.9e38)  # groups without an id to choose have at most this bound
SPAN = tl.constexpr(1024)  # ids of 32 lanes
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_scores(row, ids, vocab, sampling, KIND: tl.constexpr):
    """Float32 scores of some ids: logits over temperature, with tokens below the thresholds at -inf; `sampling`: see `sampling_of`.

    KIND: (there is a temperature, there are thresholds).
    """
    temperature, threshold, threshold_id = sampling
    scores = tl.load(row + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    if KIND[0]:
        scores = tl.div_rn(scores, temperature)
    if KIND[1]:
        kept = (scores > threshold) | ((scores == threshold) & (ids >= threshold_id))
        scores = tl.where(kept, scores, float("-inf"))
    return scores


@triton.jit
def sampling_of(row, source, temperatures, thresholds, threshold_ids):
    """The temperature of a sequence and the thresholds (score, id) of one of its rows of logits, for `load_scores`."""
    temperature = 1.0
    threshold = 0.0
    threshold_id = 0
    if temperatures is not None:
        temperature = tl.load(temperatures + row)
    if thresholds is not None:
        threshold = tl.load(thresholds + source)
        threshold_id = tl.load(threshold_ids + source)
    return temperature, threshold, threshold_id


@triton.jit
def _group_starts(first, LANES: tl.constexpr):
    """The first id of each lane's first group in the tile at `first`, int32 [LANES, 1]; its other groups: + 256, 512, 768."""
    lanes = tl.arange(0, LANES)
    return (first + lanes // 32 * SPAN + lanes % 32 * GROUP)[:, None]


@triton.jit
def _group_ids(row, first, LANES: tl.constexpr):
    """The ids int32 [LANES, GROUP] of the scores of `_load_groups`; for float32 logits, two interleaved halves.

    A thread reads 16 bytes at a time, and so holds a whole group.
    """
    starts = _group_starts(first, LANES)
    if row.dtype.element_ty == tl.float32:
        ids = starts + tl.arange(0, GROUP // 2)[None, :]
        return tl.interleave(ids, ids + GROUP // 2)
    else:
        return starts + tl.arange(0, GROUP)[None, :]


@triton.jit
def _load_groups(row, first, vocab, sampling, KIND: tl.constexpr, LANES: tl.constexpr):
    """The scores float32 [LANES, GROUP] of `_group_ids`."""
    if row.dtype.element_ty == tl.float32:
        ids = _group_starts(first, LANES) + tl.arange(0, GROUP // 2)[None, :]
        return tl.interleave(
            load_scores(row, ids, vocab, sampling, KIND),
            load_scores(row, ids + GROUP // 2, vocab, sampling, KIND),
        )
    else:
        ids = _group_ids(row, first, LANES)
        return load_scores(row, ids, vocab, sampling, KIND)


@triton.jit
def greatest(row, start, steps, vocab, sampling, KIND: tl.constexpr, LANES: tl.constexpr):
    """The greatest score of `steps` tiles from id `start` on, and the lowest id that has it.

    Lanes remember only the tile of their maximum; the id is then found among the 1024 ids that contain it.
    """
    tops = tl.full([LANES], float("-inf"), tl.float32)
    spans = start // SPAN + tl.arange(0, LANES) // 32
    at = spans
    for _ in range(steps):
        ids = (spans * SPAN + tl.arange(0, LANES) % 32 * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
        a = load_scores(row, ids, vocab, sampling, KIND)
        b = load_scores(row, ids + 256, vocab, sampling, KIND)
        c = load_scores(row, ids + 512, vocab, sampling, KIND)
        d = load_scores(row, ids + 768, vocab, sampling, KIND)
        tile = tl.max(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)), 1)
        at = tl.where(tile > tops, spans, at)
        tops = tl.maximum(tops, tile)
        spans += LANES // 32
    best = tl.max(tops, 0)
    ids = tl.min(tl.where(tops == best, at, NO_ID), 0) * SPAN + tl.arange(0, SPAN)
    scores = load_scores(row, ids, vocab, sampling, KIND)
    best_id = tl.min(tl.where(scores == best, ids, NO_ID), 0)
    return best, tl.where(best_id == NO_ID, start, best_id)


@triton.jit
def _unless_removed(tops, sampling, KIND: tl.constexpr):
    """The greatest logits of groups, or -inf if the whole group is removed."""
    scores = tops
    if KIND[0]:
        scores = tl.div_rn(tops, sampling[0])
    return tl.where(scores < sampling[1], float("-inf"), tops)


@triton.jit
def reach_of(best):
    """The bound from which noise must be drawn; the margin exceeds the errors of rounding and of `_coded`."""
    return tl.minimum(tl.where(best == float("-inf"), best, best - 0.01 - 2e-5 * tl.abs(best)), MOST_BOUND)


@triton.jit
def _coded(bounds, codes):
    """Finite bounds within 2**-16, whose last 7 bits encode their place: so the greatest is found with its place, and none tie."""
    finite = tl.minimum(tl.maximum(bounds, -MOST_BOUND), MOST_BOUND)
    return ((finite.to(tl.int32, bitcast=True) & -128) | codes).to(tl.float32, bitcast=True)


@triton.jit
def _for_lanes(values, LANES: tl.constexpr):
    """Repeat each of [LANES / 8] values for 8 lanes: [LANES]."""
    return tl.reshape(tl.broadcast_to(values[:, None], [LANES // 8, 8]), [LANES])


@triton.jit
def _greatest_below(bounds, ceilings, SLOTS: tl.constexpr, LANES: tl.constexpr):
    """The greatest bound of every 8 lanes below their ceiling [LANES / 8], or -inf; `bounds`: SLOTS tensors [LANES]."""
    of_lanes = _for_lanes(ceilings, LANES)
    below = tl.full([LANES], float("-inf"), tl.float32)
    for slot in tl.static_range(SLOTS):
        below = tl.maximum(below, tl.where(bounds[slot] < of_lanes, bounds[slot], float("-inf")))
    return tl.max(tl.reshape(below, [LANES // 8, 8]), 1)


@triton.jit
def best_within(
    bounds, row, start, vocab, without, sampling, seed, position, step, stream: tl.constexpr,
    KIND: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The best noisy score of the groups with coded bounds (SLOTS tensors [LANES]), and the lowest id that has it.

    Draws the noise of the most promising group of every 8 lanes, one id per thread, until no other group can win: usually once or
    twice. `without`: an id to leave out, or -1.
    """
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0, tl.int32) + start
    threads = tl.arange(0, LANES)
    candidates = _greatest_below(bounds, tl.full([LANES // 8], float("inf"), tl.float32), SLOTS, LANES)
    highest = tl.max(candidates, 0)
    while (highest > NO_BOUND) & (highest >= reach_of(best)):
        # 8 lanes for 8 ids: one id per thread from here on
        codes = _for_lanes(candidates, LANES).to(tl.int32, bitcast=True) & 127
        lanes = threads // 8 * 8 + codes // 16
        word = codes % 4
        spans = start // SPAN + codes % 16 // 4 * (LANES // 32) + lanes // 32
        # xor hides that the 8 ids are adjacent; otherwise the compiler gives all 8 to every thread
        ids = ((spans * 128 + word * 32 + lanes % 32) * GROUP) ^ (threads % 8)
        scores = load_scores(row, ids, vocab, sampling, KIND)
        scores = tl.where(ids == without, float("-inf"), scores)
        a, b, c, d = minimum_words(seed, position, step, stream, spans * 32 + lanes % 32)
        words = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
        noisy = scores + gumbel_of_ids(seed, position, step, stream, ids, words)
        top = tl.max(noisy, 0)
        top_id = tl.min(tl.where(noisy == top, ids, NO_ID), 0)
        better = (top > best) | ((top == best) & (top > float("-inf")) & (top_id < best_id))
        best_id = tl.where(better, top_id, best_id)
        best = tl.where(better, top, best)
        candidates = _greatest_below(bounds, candidates, SLOTS, LANES)
        highest = tl.max(candidates, 0)
    return best, best_id


@triton.jit
def best_noisy(
    row, start, vocab, without, sampling, seed, position, step, stream: tl.constexpr,
    SUMS: tl.constexpr, KIND: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The best score with Gumbel noise of STEPS (up to 4) tiles from id `start` on, and the lowest id that has it.

    One word per group of 8 ids bounds the noise of all of them, so the noise of most ids is never drawn. SUMS: also the greatest
    score and the sum of exp(score - greatest). `without`: an id to leave out of everything, or -1.
    """
    lanes = tl.arange(0, LANES)
    codes = lanes % 8 * 16  # + slot (4 per step): identifies a group among those of 8 lanes
    bounds = ()
    tops = tl.full([LANES], float("-inf"), tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    exact: tl.constexpr = SUMS and KIND[1]  # otherwise bounds and sums need no division
    LOADS: tl.constexpr = (KIND[0] and exact, exact)
    scale = 1.0
    if KIND[0] and not exact:
        scale = 1.0 / sampling[0]
    for i in tl.static_range(STEPS):
        first = start + i * LANES * 32
        a = _load_groups(row, first, vocab, sampling, LOADS, LANES)
        b = _load_groups(row, first + 256, vocab, sampling, LOADS, LANES)
        c = _load_groups(row, first + 512, vocab, sampling, LOADS, LANES)
        d = _load_groups(row, first + 768, vocab, sampling, LOADS, LANES)
        if SUMS:  # noqa: SIM102 (one is of constants)
            if (without >= first) & (without < first + LANES * 32):
                ids = _group_ids(row, first, LANES)
                a = tl.where(ids == without, float("-inf"), a)
                b = tl.where(ids + 256 == without, float("-inf"), b)
                c = tl.where(ids + 512 == without, float("-inf"), c)
                d = tl.where(ids + 768 == without, float("-inf"), d)
        top_a, top_b, top_c, top_d = tl.max(a, 1), tl.max(b, 1), tl.max(c, 1), tl.max(d, 1)
        if SUMS:
            greater = tl.maximum(tl.maximum(tops, tl.maximum(top_a, top_b)), tl.maximum(top_c, top_d))
            shift = tl.where(greater == float("-inf"), 0.0, greater * (scale * _LOG2_E))[:, None]
            parts = tl.exp2(a * (scale * _LOG2_E) - shift) + tl.exp2(b * (scale * _LOG2_E) - shift)
            parts += tl.exp2(c * (scale * _LOG2_E) - shift) + tl.exp2(d * (scale * _LOG2_E) - shift)
            less = tl.where(tops == float("-inf"), 0.0, tl.exp2((tops - greater) * (scale * _LOG2_E)))
            sums = sums * less + tl.sum(parts, 1)
            tops = greater
        if KIND[1] and not exact:
            top_a = _unless_removed(top_a, sampling, KIND)
            top_b = _unless_removed(top_b, sampling, KIND)
            top_c = _unless_removed(top_c, sampling, KIND)
            top_d = _unless_removed(top_d, sampling, KIND)
        of_a, of_b, of_c, of_d = minimum_words(seed, position, step, stream, first // 32 + lanes)
        bounds = bounds + (
            _coded(top_a * scale + most_noise(of_a), codes + 4 * i),
            _coded(top_b * scale + most_noise(of_b), codes + 4 * i + 1),
            _coded(top_c * scale + most_noise(of_c), codes + 4 * i + 2),
            _coded(top_d * scale + most_noise(of_d), codes + 4 * i + 3),
        )
    best, best_id = best_within(
        bounds, row, start, vocab, without, sampling, seed, position, step, stream,
        KIND, 4 * STEPS, LANES,
    )  # fmt: skip
    greatest_score = tl.full([], 0.0, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    if SUMS:
        top = tl.max(tops, 0)
        shift = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(sums * tl.exp2((tops - shift) * (scale * _LOG2_E)), 0)
        greatest_score = top
        if KIND[0] and not exact:
            greatest_score = tl.div_rn(top, sampling[0])
    return best, best_id, greatest_score, total


@triton.jit
def noisy_better(scores, ids, start, best, best_id, seed, position, step, stream: tl.constexpr, BLOCK: tl.constexpr):
    """The best of `best` and the noisy scores of one block (a multiple of 1024 ids); ties go to the lowest id.

    Blocks that no noise could lift to `best` draw none; blocks that their groups' minima rule out draw only the minima.
    """
    reach = reach_of(best)
    if tl.max(scores, 0) + MOST_GUMBEL >= reach:
        tops = tl.max(tl.reshape(scores, [BLOCK // GROUP, GROUP]), 1)
        words = words_of_groups(seed, position, step, stream, start // GROUP, BLOCK // GROUP)
        if tl.max(tops + most_noise(words), 0) >= reach:
            noisy = scores + gumbel_block(seed, position, step, stream, start, BLOCK)
            top = tl.max(noisy, 0)
            if top > best:
                best = top
                best_id = tl.min(tl.where(noisy == top, ids, NO_ID), 0)
    return best, best_id
