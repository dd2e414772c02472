"""Device functions that go over one row of logits: its greatest score, its best score with noise, its softmax's sum.

A step of a program is a tile of LANES x 32 ids. Lane n has four groups of 8 adjacent ids, 256 ids apart, whose minima are the
four words of one Philox counter (see `random_bits`): neighbouring lanes read neighbouring ids, nothing is exchanged between
threads until the end, and one counter serves 32 ids.
"""

# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .triton_random import GROUP, MOST_GUMBEL, gumbel_block, gumbel_of_ids, minimum_words, most_noise, words_of_groups

NO_ID = tl.constexpr(2**31 - 1)
MOST_BOUND = tl.constexpr(3e38)
NO_BOUND = tl.constexpr(-2.9e38)  # of groups without an id to choose, or less
SPAN = tl.constexpr(1024)  # ids of 32 lanes
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_scores(row, ids, vocab, temperature, limit, limit_id, HAS_TEMPERATURE: tl.constexpr, HAS_LIMITS: tl.constexpr):
    """Float32 scores of some ids: logits over temperature, -inf for what sampling parameters removed (see `sampling`)."""
    scores = tl.load(row + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    if HAS_TEMPERATURE:
        scores = tl.div_rn(scores, temperature)
    if HAS_LIMITS:
        kept = (scores > limit) | ((scores == limit) & (ids >= limit_id))
        scores = tl.where(kept, scores, float("-inf"))
    return scores


@triton.jit
def sampling_of(row, source, temperatures, limits, limit_ids, HAS_TEMPERATURE: tl.constexpr, HAS_LIMITS: tl.constexpr):
    """A row's temperature, and the limits (score, id) of one of its rows of logits: what `load_scores` takes."""
    temperature = 1.0
    limit = 0.0
    limit_id = 0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperatures + row)
    if HAS_LIMITS:
        limit = tl.load(limits + source)
        limit_id = tl.load(limit_ids + source)
    return temperature, limit, limit_id


@triton.jit
def _group_starts(first, LANES: tl.constexpr):
    """The first id of each lane's first group in the tile that begins at `first`, int32 [LANES, 1]; its others: + 256, 512, 768."""
    lanes = tl.arange(0, LANES)
    return (first + lanes // 32 * SPAN + lanes % 32 * GROUP)[:, None]


@triton.jit
def _group_ids(row, first, LANES: tl.constexpr):
    """Ids int32 [LANES, GROUP] of `_load_groups`' scores; of float32 logits two interleaved halves.

    A thread reads 16 bytes at a time, and so has the whole group.
    """
    starts = _group_starts(first, LANES)
    if row.dtype.element_ty == tl.float32:
        ids = starts + tl.arange(0, GROUP // 2)[None, :]
        return tl.interleave(ids, ids + GROUP // 2)
    else:
        return starts + tl.arange(0, GROUP)[None, :]


@triton.jit
def _load_groups(
    row, first, vocab, temperature, limit, limit_id, HAS_TEMPERATURE: tl.constexpr, HAS_LIMITS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Scores float32 [LANES, GROUP] of `_group_ids`."""
    if row.dtype.element_ty == tl.float32:
        ids = _group_starts(first, LANES) + tl.arange(0, GROUP // 2)[None, :]
        return tl.interleave(
            load_scores(row, ids, vocab, temperature, limit, limit_id, HAS_TEMPERATURE, HAS_LIMITS),
            load_scores(row, ids + GROUP // 2, vocab, temperature, limit, limit_id, HAS_TEMPERATURE, HAS_LIMITS),
        )
    else:
        ids = _group_ids(row, first, LANES)
        return load_scores(row, ids, vocab, temperature, limit, limit_id, HAS_TEMPERATURE, HAS_LIMITS)


@triton.jit
def greatest(
    row, start, steps, vocab, temperature, limit, limit_id, HAS_TEMPERATURE: tl.constexpr, HAS_LIMITS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """The greatest score of `steps` tiles from id `start` on, and the lowest id that has it.

    Lanes remember the tile of their maximum only; the id is looked for in the 1024 ids that must hold it.
    """
    tops = tl.full([LANES], float("-inf"), tl.float32)
    spans = start // SPAN + tl.arange(0, LANES) // 32
    at = spans
    for _ in range(steps):
        ids = (spans * SPAN + tl.arange(0, LANES) % 32 * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
        a = load_scores(row, ids, vocab, temperature, limit, limit_id, HAS_TEMPERATURE, HAS_LIMITS)
        b = load_scores(row, ids + 256, vocab, temperature, limit, limit_id, HAS_TEMPERATURE, HAS_LIMITS)
        c = load_scores(row, ids + 512, vocab, temperature, limit, limit_id, HAS_TEMPERATURE, HAS_LIMITS)
        d = load_scores(row, ids + 768, vocab, temperature, limit, limit_id, HAS_TEMPERATURE, HAS_LIMITS)
        tile = tl.max(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)), 1)
        at = tl.where(tile > tops, spans, at)
        tops = tl.maximum(tops, tile)
        spans += LANES // 32
    best = tl.max(tops, 0)
    ids = tl.min(tl.where(tops == best, at, NO_ID), 0) * SPAN + tl.arange(0, SPAN)
    scores = load_scores(row, ids, vocab, temperature, limit, limit_id, HAS_TEMPERATURE, HAS_LIMITS)
    best_id = tl.min(tl.where(scores == best, ids, NO_ID), 0)
    return best, tl.where(best_id == NO_ID, start, best_id)


@triton.jit
def _unless_removed(tops, temperature, limit, HAS_TEMPERATURE: tl.constexpr):
    """Greatest logits of groups; -inf where all of the group is removed."""
    scores = tops
    if HAS_TEMPERATURE:
        scores = tl.div_rn(tops, temperature)
    return tl.where(scores < limit, float("-inf"), tops)


@triton.jit
def reach_of(best):
    """What a bound must reach for its noisy scores to be drawn; the margin is above what rounding and `_coded` can do."""
    return tl.minimum(tl.where(best == float("-inf"), best, best - 0.01 - 2e-5 * tl.abs(best)), MOST_BOUND)


@triton.jit
def _coded(bounds, codes):
    """Bounds whose last 7 bits are a code: the greatest says where it is, and none of 8 lanes are equal. Within 2**-16, and finite."""
    finite = tl.minimum(tl.maximum(bounds, -MOST_BOUND), MOST_BOUND)
    return ((finite.to(tl.int32, bitcast=True) & -128) | codes).to(tl.float32, bitcast=True)


@triton.jit
def _for_lanes(values, LANES: tl.constexpr):
    """[LANES] of [LANES / 8]: each for 8 lanes."""
    return tl.reshape(tl.broadcast_to(values[:, None], [LANES // 8, 8]), [LANES])


@triton.jit
def _greatest_of(bounds, SLOTS: tl.constexpr, LANES: tl.constexpr):
    """The greatest of every 8 lanes' bounds (SLOTS tensors [LANES])."""
    found = bounds[0]
    for slot in tl.static_range(1, SLOTS):
        found = tl.maximum(found, bounds[slot])
    return tl.max(tl.reshape(found, [LANES // 8, 8]), 1)


@triton.jit
def _greatest_below(bounds, ceilings, SLOTS: tl.constexpr, LANES: tl.constexpr):
    """The greatest of every 8 lanes' bounds (SLOTS tensors [LANES]) that are below a ceiling [LANES / 8]; -inf where none is."""
    of_lanes = _for_lanes(ceilings, LANES)
    found = tl.full([LANES], float("-inf"), tl.float32)
    for slot in tl.static_range(SLOTS):
        found = tl.maximum(found, tl.where(bounds[slot] < of_lanes, bounds[slot], float("-inf")))
    return tl.max(tl.reshape(found, [LANES // 8, 8]), 1)


@triton.jit
def best_within(
    bounds, row, start, vocab, without, temperature, limit, limit_id, seed, position, step, stream: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr, HAS_LIMITS: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The best noisy score of the groups with coded bounds (SLOTS tensors [LANES]), and the lowest id that has it.

    Noise of the most promising group of every 8 lanes is drawn, one id per thread, until no other group can do better: that
    is once or twice, mostly. `without`: an id that is left out, or -1.
    """
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0, tl.int32) + start
    threads = tl.arange(0, LANES)
    candidates = _greatest_of(bounds, SLOTS, LANES)
    highest = tl.max(candidates, 0)
    while (highest > NO_BOUND) & (highest >= reach_of(best)):
        # 8 lanes for 8 ids: one id a thread from here
        codes = _for_lanes(candidates, LANES).to(tl.int32, bitcast=True) & 127
        lanes = threads // 8 * 8 + codes // 16
        word = codes % 4
        spans = start // SPAN + codes % 16 // 4 * (LANES // 32) + lanes // 32
        # xor hides that 8 ids are adjacent: the compiler would give all 8 to every thread
        ids = ((spans * 128 + word * 32 + lanes % 32) * GROUP) ^ (threads % 8)
        scores = load_scores(row, ids, vocab, temperature, limit, limit_id, HAS_TEMPERATURE, HAS_LIMITS)
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
    row, start, vocab, without, temperature, limit, limit_id, seed, position, step, stream: tl.constexpr,
    SUMS: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_LIMITS: tl.constexpr, STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The best score with Gumbel noise of STEPS (up to 4) tiles from id `start` on, and the lowest id that has it.

    One word per group of 8 ids bounds the noise of all of them, so that of most ids none is drawn. SUMS: also the greatest
    score, and the sum of exp(score - greatest) of all; `without`: an id that is left out of everything, or -1.
    """
    lanes = tl.arange(0, LANES)
    codes = lanes % 8 * 16  # + slot, 4 of a step: what names a group among those of 8 lanes
    bounds = ()
    tops = tl.full([LANES], float("-inf"), tl.float32)
    sums = tl.zeros([LANES], tl.float32)
    exact: tl.constexpr = SUMS and HAS_LIMITS  # else bounds and sums need no division
    heated: tl.constexpr = HAS_TEMPERATURE and exact
    scale = 1.0
    if HAS_TEMPERATURE and not exact:
        scale = 1.0 / temperature
    for i in tl.static_range(STEPS):
        first = start + i * LANES * 32
        a = _load_groups(row, first, vocab, temperature, limit, limit_id, heated, exact, LANES)
        b = _load_groups(row, first + 256, vocab, temperature, limit, limit_id, heated, exact, LANES)
        c = _load_groups(row, first + 512, vocab, temperature, limit, limit_id, heated, exact, LANES)
        d = _load_groups(row, first + 768, vocab, temperature, limit, limit_id, heated, exact, LANES)
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
        if HAS_LIMITS and not exact:
            top_a = _unless_removed(top_a, temperature, limit, HAS_TEMPERATURE)
            top_b = _unless_removed(top_b, temperature, limit, HAS_TEMPERATURE)
            top_c = _unless_removed(top_c, temperature, limit, HAS_TEMPERATURE)
            top_d = _unless_removed(top_d, temperature, limit, HAS_TEMPERATURE)
        of_a, of_b, of_c, of_d = minimum_words(seed, position, step, stream, first // 32 + lanes)
        bounds = bounds + (
            _coded(top_a * scale + most_noise(of_a), codes + 4 * i),
            _coded(top_b * scale + most_noise(of_b), codes + 4 * i + 1),
            _coded(top_c * scale + most_noise(of_c), codes + 4 * i + 2),
            _coded(top_d * scale + most_noise(of_d), codes + 4 * i + 3),
        )
    best, best_id = best_within(
        bounds, row, start, vocab, without, temperature, limit, limit_id, seed, position, step, stream,
        HAS_TEMPERATURE, HAS_LIMITS, 4 * STEPS, LANES,
    )  # fmt: skip
    greatest_score = tl.full([], 0.0, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    if SUMS:
        top = tl.max(tops, 0)
        shift = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(sums * tl.exp2((tops - shift) * (scale * _LOG2_E)), 0)
        greatest_score = top
        if HAS_TEMPERATURE and not exact:
            greatest_score = tl.div_rn(top, temperature)
    return best, best_id, greatest_score, total


@triton.jit
def noisy_better(scores, ids, start, best, best_id, seed, position, step, stream: tl.constexpr, BLOCK: tl.constexpr):
    """The best of `best` and the noisy scores of one block of a multiple of 1024 ids; of equals the earlier, i.e. the lowest id.

    Blocks out of reach of any noise draw none, those out of reach of their groups' only the minima.
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
