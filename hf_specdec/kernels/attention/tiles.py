"""What the programs of paged attention in Triton do with tiles of queries and keys: find them, load them, attend, store."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1e30)  # the maximum before any key; finite, to avoid -inf - -inf


@triton.jit
def locate_tile(tile, query_starts, num_rows, tiles_per_row, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The row of a tile and the tile's first query in it (queries are counted token by token, then by head of the group)."""
    if tiles_per_row > 0:
        row = tile // tiles_per_row
        first = (tile - row * tiles_per_row) * BLOCK_M
    else:
        # Ragged: row b starts at tile start * GROUP // BLOCK_M + b, which leaves every row enough tiles.
        low = 0
        high = num_rows - 1
        while low < high:
            middle = (low + high + 1) // 2
            if tl.load(query_starts + middle) * GROUP // BLOCK_M + middle <= tile:
                low = middle
            else:
                high = middle - 1
        row = low
        first = (tile - (tl.load(query_starts + row) * GROUP // BLOCK_M + row)) * BLOCK_M
    return row, first


@triton.jit
def _load_tile(
    pool, slots, seen, columns, stride, WIDTH: tl.constexpr, FULL: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """[slots, columns] of a pool; zeros after WIDTH columns and, if MASKED, where `seen` is false."""
    pointers = pool + slots[:, None] * stride + columns[None, :]
    if MASKED:
        if FULL:
            tile = tl.load(pointers, mask=seen[:, None], other=0.0)
        else:
            tile = tl.load(pointers, mask=seen[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif FULL:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
    return tile.to(tl.float32) if UPCAST else tile


@triton.jit
def key_range(
    first, num_tokens, length, region_start, query_positions, window, kept, HAS_REGION: tl.constexpr,
    GROUP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_KEPT: tl.constexpr, FIXED_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The keys begin .. end that a tile of queries attends to; `open_end`, before which every query sees all keys (apart from
    windows); and (first_end, gap): `gap` keys from `first_end` on are left out, and keys after them counted without them."""
    open_end = length - num_tokens + first // GROUP + 1
    end = length - num_tokens + tl.minimum(first + BLOCK_M - 1, num_tokens * GROUP - 1) // GROUP + 1
    if HAS_REGION:
        open_end = tl.where(region_start < length, region_start, open_end)
        end = tl.where(region_start < length, length, end)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(tl.min(query_positions, axis=0) - window + 1, 0)
        begin = tl.minimum(begin, tl.minimum(region_start, end)) // BLOCK_N * BLOCK_N
    first_end = 0
    gap = 0
    if HAS_KEPT:
        first_end = tl.cdiv(kept, BLOCK_N) * BLOCK_N
        if not FIXED_SPLITS:  # whose keys are the same in every batch
            gap = tl.maximum(begin - first_end, 0)
        begin = 0
    return begin, end - gap, open_end - gap, (first_end, gap)


@triton.jit
def of_split(split, begin, end, num_splits, keys_per_split, FIXED_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The part of the keys begin .. end that a split attends to: an equal share of the tiles, at least `keys_per_split`.

    The last split, which computes masks, never has more tiles than the others.
    """
    if FIXED_SPLITS:  # at the same keys in every batch
        first = split * keys_per_split
        last = first + keys_per_split
    else:
        tiles = tl.maximum(tl.cdiv(end - begin, BLOCK_N), 1)
        splits = tl.minimum(num_splits, tl.cdiv(tiles, keys_per_split // BLOCK_N))
        first = begin + tl.cdiv(split * tiles, splits) * BLOCK_N
        last = begin + tl.cdiv((split + 1) * tiles, splits) * BLOCK_N
    return tl.maximum(begin, first), tl.minimum(end, last)


@triton.jit
def _with_gap(counted, gaps):
    """Indices of keys that were counted without the gap: `gap` keys from `first_end` on."""
    first_end, gap = gaps
    return counted + tl.where(counted >= first_end, gap, 0)


@triton.jit
def load_blocks(table, counted, end, gaps, BLOCK_SIZE: tl.constexpr, HAS_KEPT: tl.constexpr):
    """The blocks of these keys, before `end`."""
    index = _with_gap(counted, gaps) if HAS_KEPT else counted
    return tl.load(table + index // BLOCK_SIZE, mask=counted < end, other=0)


@triton.jit
def _seen_keys(
    index, exists, last_seen, visibility, only_word, packed, valid, region_start, has_region, WORDS: tl.constexpr
):
    """bool [queries, keys]: causal up to `last_seen`; in rows with a region, all keys before it and those whose bits are set in it.

    `only_word` [queries]: the bits, if a region is one word.
    """
    seen = index[None, :] <= last_seen[:, None]
    if visibility is not None:
        place = index - region_start
        if WORDS == 1:
            words = only_word[:, None]
        else:
            words = tl.load(
                visibility + packed[:, None] * WORDS + (place // 32)[None, :],
                mask=valid[:, None] & (exists & (place >= 0))[None, :],
                other=0,
            )
        in_tree = ((words >> (place & 31)[None, :]) & 1) != 0
        seen = tl.where(has_region, in_tree | (place < 0)[None, :], seen)
    return seen & exists[None, :]


@triton.jit
def _visible_scores(
    scores, index, exists, queries, region, added, window, kept, MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_KEPT: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Scores [queries, keys] with biases, -inf where a query does not see a key: if MASKED, after it or in a region; outside a window."""
    _, _, last_seen, query_positions, packed, valid = queries
    visibility, only_word, region_positions, row, region_start, has_region = region
    key_positions = index
    if MASKED and region_positions is not None:
        of_region = exists & (index >= region_start)
        there = tl.load(region_positions + row * (32 * WORDS) + index - region_start, mask=of_region, other=0)
        key_positions = tl.where(of_region, there, index)
    biases, lines = added
    if biases is not None:
        distances = tl.maximum(query_positions[:, None] - key_positions[None, :], 0)
        there = valid[:, None] & exists[None, :]
        scores += tl.load(biases + lines[:, None] + distances, mask=there, other=0.0)
    if MASKED:
        seen = _seen_keys(
            index, exists, last_seen, visibility, only_word, packed, valid, region_start, has_region, WORDS
        )
        scores = tl.where(seen, scores, float("-inf"))
    if HAS_WINDOW:
        near = query_positions[:, None] - key_positions[None, :] < window
        if HAS_KEPT:
            near = near | (key_positions < kept)[None, :]
        scores = tl.where(near, scores, float("-inf"))
    return scores


@triton.jit
def _softmax_step(scores, factor, state):
    """The online softmax reads a tile of keys: their weights, and the state scaled to the new maximum.

    `factor` turns scores into base-2 logits. It is kept separate so that all tiles use the same fma, bit for bit.
    """
    largest, total, weighted = state
    new_largest = tl.maximum(largest, tl.max(scores, axis=1) * factor)
    weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, factor, tl.float32), -new_largest[:, None]))
    shrink = tl.exp2(largest - new_largest)
    return weights, (new_largest, total * shrink + tl.sum(weights, axis=1), weighted * shrink[:, None])


@triton.jit
def attend_keys(
    state, low, high, end, blocks, queries, region, added, pools, scales, gaps, window, kept, score_factor, softcap_factor,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, SHARED: tl.constexpr, BLOCK_SIZE: tl.constexpr, WORDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_KEPT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The state of the online softmax (largest [M], total [M], weighted values [M, VALUE_BLOCK]) after keys low .. high.

    `blocks`: those of the first tile of keys. `gaps`: see `_with_gap`. `added`: biases, and where those of each query's head begin.
    """
    keys, values, table, key_slot, value_slot = pools
    key_scales, value_scales, kv_head = scales
    q1, q2, _, _, _, _ = queries
    columns1 = tl.arange(0, WIDTH1)
    for key_start in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        counted = key_start + tl.arange(0, BLOCK_N)
        exists = counted < end
        index = _with_gap(counted, gaps) if HAS_KEPT else counted
        slots = blocks.to(tl.int64) * BLOCK_SIZE + index % BLOCK_SIZE
        # Fetch the next tile's blocks now: loads of keys that depend on a load lose one pipeline stage.
        blocks = load_blocks(table, counted + BLOCK_N, high, gaps, BLOCK_SIZE, HAS_KEPT)

        k1 = _load_tile(keys, slots, exists, columns1, key_slot, WIDTH, WIDTH1 <= WIDTH, MASKED, UPCAST)
        scores = tl.dot(q1, tl.trans(k1.to(q1.dtype)), input_precision="ieee")
        if WIDTH2 > 0:
            columns2 = WIDTH1 + tl.arange(0, WIDTH2)
            k2 = _load_tile(keys, slots, exists, columns2, key_slot, WIDTH, WIDTH1 + WIDTH2 == WIDTH, MASKED, UPCAST)
            scores = tl.dot(q2, tl.trans(k2.to(q2.dtype)), scores, input_precision="ieee")
        if key_scales is not None:
            lines = slots * tl.num_programs(0) + kv_head
            scores = scores * tl.load(key_scales + lines, mask=exists, other=0.0)[None, :]
        factor = score_factor
        if HAS_SOFTCAP:
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * score_factor))  # tanh
            factor = softcap_factor
        scores = _visible_scores(
            scores, index, exists, queries, region, added, window, kept, MASKED, HAS_WINDOW, HAS_KEPT, WORDS
        )

        weights, state = _softmax_step(scores, factor, state)
        largest, total, weighted = state
        if not UPCAST:
            weights = weights.to(q1.dtype)
        elif value_scales is None:
            weights = weights.to(values.dtype.element_ty).to(tl.float32)
        if SHARED:  # the values are the keys' first columns (latent attention)
            weighted = tl.dot(weights, k1, weighted, input_precision="ieee")
        else:
            columns = tl.arange(0, VALUE_BLOCK)
            v = _load_tile(
                values, slots, exists, columns, value_slot, VALUE_WIDTH, VALUE_BLOCK == VALUE_WIDTH, MASKED, UPCAST
            )
            if value_scales is not None:
                lines = slots * tl.num_programs(0) + kv_head
                v = v.to(tl.float32) * tl.load(value_scales + lines, mask=exists, other=0.0)[:, None]
            weighted = tl.dot(weights, v.to(weights.dtype), weighted, input_precision="ieee")
        state = largest, total, weighted
    return state


@triton.jit
def load_queries(rows, valid, WIDTH: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, UPCAST: tl.constexpr):
    """COUNT columns of queries from FIRST on; zeros after WIDTH columns and in rows that are not valid. 0 without columns."""
    if COUNT > 0:
        columns = FIRST + tl.arange(0, COUNT)
        tile = tl.load(rows[:, None] + columns[None, :], mask=valid[:, None] & (columns < WIDTH)[None, :], other=0.0)
        return tile.to(tl.float32) if UPCAST else tile
    else:
        return 0


@triton.jit
def store_output(out, lines, state, sinks, head, valid, VALUE_WIDTH: tl.constexpr, VALUE_BLOCK: tl.constexpr):
    """Store normalised outputs at these offsets; a head's sink takes part in the softmax without a value."""
    largest, total, weighted = state
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        with_sink = tl.maximum(largest, sink)
        total = total * tl.exp2(largest - with_sink) + tl.exp2(sink - with_sink)
        weighted = weighted * tl.exp2(largest - with_sink)[:, None]
    weighted = weighted / tl.where(total > 0, total, 1.0)[:, None]
    columns = tl.arange(0, VALUE_BLOCK)
    tl.store(
        out + lines[:, None] + columns[None, :],
        weighted.to(out.dtype.element_ty),
        mask=valid[:, None] & (columns < VALUE_WIDTH)[None, :],
    )


@triton.jit
def partial_lines(packed, head, num_splits, GROUP: tl.constexpr):
    """Where this program's split stores the partial results of its queries."""
    return (packed * (tl.num_programs(0) * GROUP) + head) * num_splits + tl.program_id(2)


@triton.jit
def store_partial(partial, partial_lse, lines, state, valid, VALUE_WIDTH: tl.constexpr, VALUE_BLOCK: tl.constexpr):
    """Store a split's normalised outputs and the base-2 logarithms of its sums, -inf for queries that saw no key."""
    largest, total, weighted = state
    columns = tl.arange(0, VALUE_BLOCK)
    lse = tl.where(total > 0, largest + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(partial_lse + lines, lse, mask=valid)
    tl.store(
        partial + lines[:, None] * VALUE_WIDTH + columns[None, :],
        weighted / tl.where(total > 0, total, 1.0)[:, None],
        mask=(valid & (total > 0))[:, None] & (columns < VALUE_WIDTH)[None, :],
    )
