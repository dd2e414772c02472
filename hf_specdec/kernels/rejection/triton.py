"""Rejection verification of chains and trees in Triton (definition: `reference.rejection_walk`).

Deterministic chains take two launches: (1) for every root and node, compute the sum of exp(score) and the token that would be drawn
if the walk ended there, both without the drafted child; (2) one program per row walks its chain with these.

Other drafts take four launches: (1) for every root and inner node, compute sums of exp(score) per block of the vocabulary, without
drafted children; (2) one program per row walks its tree with these sums and single logits; (3) draw the next token from the
residual at the walk's end, split over the vocabulary; (4) merge the splits. Only (3) reads leaves, and it reads one row of logits
per sequence.

The sums exclude children because the residual after a rejected child is rest + later siblings, a sum of positive numbers: 1 - p
would lose all digits when p is near 1. If siblings were drawn from distributions (`probs`), the walking program reads the
vocabulary once per rejection that is followed by another sibling. Chains never need this.
"""

# pyright: reportCallIssue=false, reportAssignmentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..dispatch import as_bytes, ceil_div, next_power_of_two
from ..drafts import prob_index_on, upload_drafts, upload_streams
from ..random_bits.triton import ACCEPT_STREAM, RESIDUAL_STREAM, uniform_at
from ..sampling.triton_scores import NO_ID, best_noisy, load_scores, noisy_better, sampling_of
from ..verification.triton import empty_verdict, split_vocabulary

_LEAST = tl.constexpr(1.2e-38)  # the smallest normal float32; a smaller constant would become a float64


@triton.jit
def _without_children(scores, first, ids, tokens, children, num_nodes, BLOCK: tl.constexpr):
    """Set the tokens of `children` (bool over the row's nodes) to -inf in one block's scores; `tokens`: those of the row."""
    slots = tl.arange(0, children.shape[0])
    drafted = tl.load(tokens + slots, mask=children, other=-1).to(tl.int32)
    inside = children & (drafted >= first) & (drafted < first + BLOCK)
    if tl.max(inside.to(tl.int32), 0) > 0:
        for node in range(num_nodes):
            token = tl.sum(tl.where(inside & (slots == node), drafted + 1, 0), 0) - 1
            scores = tl.where(ids == token, float("-inf"), scores)
    return scores


@triton.jit
def _children_of(slot, parents, valid, num_nodes, TREE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The children of a slot, bool [BLOCK_N] over a row's nodes. Slot 0 is the root, slot i + 1 is node i; pointers are the row's."""
    nodes = tl.arange(0, BLOCK_N)
    exists = tl.load(valid + nodes, mask=nodes < num_nodes, other=0) != 0
    if TREE:
        above = tl.load(parents + nodes, mask=nodes < num_nodes, other=-2).to(tl.int32)
    else:
        above = nodes - 1
    return exists & (above + 1 == slot)


@triton.jit
def sums_kernel(
    logits, index, tokens, parents, valid, temperatures, thresholds, threshold_ids, maxima, sums, vocab, row_stride, num_nodes,
    num_blocks, blocks_per_split,
    TREE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of exp(score - maximum) of every block of the vocabulary, without drafted children.

    Programs: (row, slot) x splits; those of slots without children read nothing. Writes maxima and sums, float32 [B, N + 1, blocks].
    Arguments as in `verify_rejection`.
    """
    KIND: tl.constexpr = (temperatures is not None, thresholds is not None)
    place = tl.program_id(0).to(tl.int64)
    row = place // (num_nodes + 1)
    slot = (place % (num_nodes + 1)).to(tl.int32)
    children = _children_of(slot, parents + row * num_nodes, valid + row * num_nodes, num_nodes, TREE, BLOCK_N)
    wanted = tl.max(children.to(tl.int32), 0) > 0
    if wanted:
        source = tl.load(index + place).to(tl.int64)
        sampling = sampling_of(row, source, temperatures, thresholds, threshold_ids)
        begin = tl.program_id(1) * blocks_per_split
        for block in range(begin, tl.minimum(begin + blocks_per_split, num_blocks)):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            scores = load_scores(logits + source * row_stride, ids, vocab, sampling, KIND)
            scores = _without_children(scores, block * BLOCK, ids, tokens + row * num_nodes, children, num_nodes, BLOCK)
            top = tl.max(scores, 0)
            shift = tl.where(top == float("-inf"), 0.0, top)
            tl.store(maxima + place * num_blocks + block, top)
            tl.store(sums + place * num_blocks + block, tl.sum(tl.exp(scores - shift), 0))


@triton.jit
def chain_kernel(
    logits, index, tokens, valid, seeds, starts, steps, temperatures, thresholds, threshold_ids, maxima, sums,
    best_scores, best_ids, vocab, row_stride, num_nodes,
    STEPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """For deterministic chains: the sums of `sums_kernel` and the draws of `draw_kernel` at every root and node, in one read.

    Programs: (row, slot) x splits. The draw after a slot's child was rejected does not depend on the walk, because its noise
    depends only on the slot. Writes maxima, sums, best_scores, best_ids [B, N + 1, splits].
    """
    KIND: tl.constexpr = (temperatures is not None, thresholds is not None)
    place = tl.program_id(0)
    row = place // (num_nodes + 1)
    slot = place % (num_nodes + 1)
    # Issue all loads before the first branch, so that they overlap.
    source = tl.load(index + place).to(tl.int64)
    wanted = tl.load(valid + row * num_nodes + slot - 1, mask=slot > 0, other=1) != 0
    has_child = tl.load(valid + row * num_nodes + slot, mask=slot < num_nodes, other=0) != 0
    child = tl.load(tokens + row * num_nodes + slot, mask=slot < num_nodes, other=-1).to(tl.int32)
    seed, position, step = tl.load(seeds + row), tl.load(starts + row) + slot, tl.load(steps + row)
    if wanted:
        sampling = sampling_of(row, source, temperatures, thresholds, threshold_ids)
        best, best_id, top, total = best_noisy(
            logits + source * row_stride, tl.program_id(1) * STEPS * LANES * 32, vocab, tl.where(has_child, child, -1),
            sampling, seed, position, step, RESIDUAL_STREAM, True, KIND, STEPS, LANES,
        )  # fmt: skip
        at = place.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(maxima + at, top)
        tl.store(sums + at, total)
        tl.store(best_scores + at, best)
        tl.store(best_ids + at, best_id)


@triton.jit
def _nodes_of(row, num_nodes, tokens, parents, valid, masses, kept):
    """Pointers to a row's tokens, parents, valid, masses and kept; the last two are the normalisers of each rejection."""
    first = row * num_nodes
    return tokens + first, parents + first, valid + first, masses + first, kept + first


@triton.jit
def _left_over(
    scores, ids, shift, total, draft, vocab, row_nodes, slot, before, TREE: tl.constexpr
):  # fmt: skip
    """Residual target and draft distributions of one block after the children of `slot` before node `before` were rejected.

    `draft` is the distribution they were drawn from. row_nodes: see `_nodes_of`.
    """
    tokens, parents, valid, masses, kept = row_nodes
    residual = tl.exp(scores - shift) / total
    proposal = tl.load(draft + ids, mask=ids < vocab, other=0.0).to(tl.float32)
    for node in range(before):
        above = node - 1
        if TREE:
            above = tl.load(parents + node).to(tl.int32)
        if (above + 1 == slot) & (tl.load(valid + node) != 0):
            mass = tl.load(masses + node)
            left = tl.maximum(residual - proposal, 0.0)
            residual = tl.where(mass > 0, left / tl.maximum(mass, _LEAST), residual)
            token = tl.load(tokens + node)
            proposal = tl.where(ids == token, 0.0, proposal) / tl.maximum(tl.load(kept + node), _LEAST)
    return residual, proposal


@triton.jit
def _masses_left(
    logits, vocab, sampling, shift, total, draft, row_nodes, slot, node, token, KIND: tl.constexpr, TREE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The normalisers (mass, kept) of the two distributions of `_left_over` after `node` was rejected, too; reads the vocabulary."""
    left = tl.zeros([BLOCK], tl.float32)
    without = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        scores = load_scores(logits, ids, vocab, sampling, KIND)
        residual, proposal = _left_over(scores, ids, shift, total, draft, vocab, row_nodes, slot, node, TREE)
        left += tl.maximum(residual - proposal, 0.0)
        without += tl.where(ids == token, 0.0, proposal)
    return tl.sum(left, 0), tl.sum(without, 0)


@triton.jit
def _accepts(
    logits, vocab, sampling, u, shift, total, draft, row_nodes, slot, node, children, KIND: tl.constexpr, TREE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """int32: whether `node`, drawn from `draft`, is accepted (u * q < p); if not, the masses for its later siblings are stored."""
    tokens, _, _, masses, kept = row_nodes
    token = tl.load(tokens + node).to(tl.int32)
    only = token + tl.arange(0, 1)
    score = load_scores(logits, only, vocab, sampling, KIND)
    p, q = _left_over(score, only, shift, total, draft, vocab, row_nodes, slot, node, TREE)
    accept = tl.max(((q > 0) & (u * q < p)).to(tl.int32), 0)
    later = children & (tl.arange(0, children.shape[0]) > node)
    if TREE and (accept == 0) & (tl.max(later.to(tl.int32), 0) > 0):
        mass, left = _masses_left(
            logits, vocab, sampling, shift, total, draft, row_nodes, slot, node, token, KIND, TREE, BLOCK
        )
        tl.store(masses + node, mass)
        tl.store(kept + node, left)
        tl.debug_barrier()  # later siblings read what other threads wrote
    return accept


@triton.jit
def _drawn_token(
    logits, vocab, best_scores, best_ids, splits, seed, position, step, row, source, temperatures, thresholds,
    threshold_ids, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best draw of a slot's splits; if the rejected child had all the mass, a draw from the full distribution."""
    KIND: tl.constexpr = (temperatures is not None, thresholds is not None)
    at = tl.arange(0, BLOCK_S)
    drawn = tl.load(best_scores + at, mask=at < splits, other=float("-inf"))
    drawn_ids = tl.load(best_ids + at, mask=at < splits, other=NO_ID)
    best = tl.max(drawn, 0)
    best_id = tl.min(tl.where(drawn == best, drawn_ids, NO_ID), 0)
    if best == float("-inf"):
        sampling = sampling_of(row, source, temperatures, thresholds, threshold_ids)
        for begin in range(0, vocab, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            scores = load_scores(logits, ids, vocab, sampling, KIND)
            best, best_id = noisy_better(
                scores, ids, begin, best, best_id, seed, position, step, RESIDUAL_STREAM, BLOCK
            )
    return best_id


@triton.jit
def _arrive(
    logits, vocab, sampling, maxima, sums, drafted, children, tokens, node, num_nodes, num_blocks, KIND: tl.constexpr,
    TREE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Prepare the tests at a node that the walk has reached, from its block sums and its children's scores.

    Returns the largest score, the sum of exp(score - largest) without the children, and the children's terms. Siblings that repeat a
    token count once, as the first of them; `node` is the first child.
    """
    scores = load_scores(logits, tl.where(children, drafted, vocab), vocab, sampling, KIND)
    blocks = tl.arange(0, BLOCK_S)
    tops = tl.load(maxima + blocks, mask=blocks < num_blocks, other=float("-inf"))
    parts = tl.load(sums + blocks, mask=blocks < num_blocks, other=0.0)
    shift = tl.maximum(tl.max(tops, 0), tl.max(scores, 0))
    rest = tl.sum(parts * tl.exp(tops - shift), 0)
    chances = tl.exp(scores - shift)
    if TREE:
        nodes = tl.arange(0, children.shape[0])
        for other in range(node, num_nodes):
            same = (drafted == tl.load(tokens + other).to(tl.int32)) & (nodes > other)
            is_child = tl.sum(tl.where(children & (nodes == other), 1, 0), 0) > 0
            chances = tl.where(same & is_child, 0.0, chances)
    return shift, rest, chances


@triton.jit
def rejection_walk_kernel(
    logits, index, tokens, parents, valid, probs, prob_index, seeds, starts, steps, temperatures, thresholds,
    threshold_ids, maxima, sums, best_scores, best_ids, masses, kept, ends, scales, path, lengths, next_tokens, vocab,
    row_stride, num_nodes, num_blocks, num_probs, DRAWN: tl.constexpr, TREE: tl.constexpr, POINTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row walks the tree from its root and tests each node against the residual of rejected siblings.

    It reads only the scores of drafted tokens and the sums of the nodes it reaches; in trees with `probs`, also the vocabulary once
    per rejection that is followed by another sibling. Arguments as in `verify_rejection`;
    maxima, sums: float32 [B, N + 1, blocks]. Writes path [B, N] and lengths [B], and for `draw_kernel` masses and kept
    float32 [B, N] (see `_left_over`), ends int32 [B, 2] (last node + 1, its first child), scales float32 [B, 2] (shift, total).
    DRAWN: instead, it takes next_tokens [B] from the draws of `chain_kernel`.
    """
    KIND: tl.constexpr = (temperatures is not None, thresholds is not None)
    row = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, BLOCK_N)
    row_nodes = _nodes_of(row, num_nodes, tokens, parents, valid, masses, kept)
    tokens, parents, valid, _, _ = row_nodes
    drafted = tl.load(tokens + nodes, mask=nodes < num_nodes, other=-1).to(tl.int32)
    seed, start, step = tl.load(seeds + row), tl.load(starts + row), tl.load(steps + row)
    slot = tl.full([], 0, tl.int32)
    length = tl.full([], 0, tl.int32)
    first_child = tl.full([], 0, tl.int32)
    arrived = tl.full([], 1, tl.int32)  # 1 if the sums of `slot` must still be loaded
    shift = tl.full([], 0.0, tl.float32)
    rest = tl.full([], 0.0, tl.float32)
    total = tl.full([], 1.0, tl.float32)
    chances = tl.zeros([BLOCK_N], tl.float32)  # exp(score - shift) of the children, counting each token once
    source = tl.load(index + row * (num_nodes + 1)).to(tl.int64)
    for node in range(num_nodes):
        above = node - 1
        if TREE:
            above = tl.load(parents + node).to(tl.int32)
        accept = tl.full([], 0, tl.int32)
        if (above + 1 == slot) & (tl.load(valid + node) != 0):
            sampling = sampling_of(row, source, temperatures, thresholds, threshold_ids)
            children = _children_of(slot, parents, valid, num_nodes, TREE, BLOCK_N)
            if arrived > 0:
                arrived = tl.full([], 0, tl.int32)
                first_child = tl.full([], 0, tl.int32) + node
                at = (row * (num_nodes + 1) + slot) * num_blocks
                shift, rest, chances = _arrive(
                    logits + source * row_stride, vocab, sampling, maxima + at, sums + at, drafted, children, tokens,
                    node, num_nodes, num_blocks, KIND, TREE, BLOCK_S,
                )  # fmt: skip
                total = rest + tl.sum(chances, 0)
            u = uniform_at(seed, start, step, ACCEPT_STREAM, node)
            if POINTS:
                chance = tl.sum(tl.where(nodes == node, chances, 0.0), 0)
                accept = (u < chance / (rest + tl.sum(chances, 0))).to(tl.int32)
                chances = tl.where(drafted == tl.load(tokens + node).to(tl.int32), 0.0, chances)
            else:
                draft = probs + (row * num_probs + tl.load(prob_index + row * num_nodes + first_child)) * vocab
                accept = _accepts(
                    logits + source * row_stride, vocab, sampling, u, shift, total, draft, row_nodes, slot, node,
                    children, KIND, TREE, BLOCK,
                )  # fmt: skip
            if accept > 0:
                slot = tl.full([], 0, tl.int32) + node + 1
                length += 1
                arrived = tl.full([], 1, tl.int32)
                source = tl.load(index + row * (num_nodes + 1) + slot).to(tl.int64)
        tl.store(path + row * num_nodes + node, accept.to(tl.int8))
    tl.store(lengths + row, length)
    if DRAWN:
        at = (row * (num_nodes + 1) + slot) * num_blocks
        best_id = _drawn_token(
            logits + source * row_stride, vocab, best_scores + at, best_ids + at, num_blocks, seed, start + length, step,
            row, source, temperatures, thresholds, threshold_ids, BLOCK_S, BLOCK,
        )  # fmt: skip
        tl.store(next_tokens + row, best_id.to(tl.int64))
    else:
        tl.store(ends + row * 2, slot)
        tl.store(ends + row * 2 + 1, first_child)
        tl.store(scales + row * 2, shift)
        tl.store(scales + row * 2 + 1, total)


@triton.jit
def draw_kernel(
    logits, index, tokens, parents, valid, probs, prob_index, seeds, starts, steps, temperatures, thresholds,
    threshold_ids, masses, kept, ends, scales, lengths, best_scores, best_ids, next_tokens, vocab, row_stride, num_nodes,
    num_probs, blocks_per_split, splits, MERGE: tl.constexpr, TREE: tl.constexpr, POINTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find one split's best token; with MERGE, the best of all splits, or a draw from the full distribution if nothing is left."""
    KIND: tl.constexpr = (temperatures is not None, thresholds is not None)
    row = tl.program_id(0).to(tl.int64)
    wanted = True
    start_id = tl.program_id(1) * blocks_per_split * BLOCK
    end_id = tl.minimum(start_id + blocks_per_split * BLOCK, vocab)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0, tl.int32) + start_id
    if wanted and MERGE:
        for split in range(splits):
            score = tl.load(best_scores + row * splits + split)
            if score > best:
                best = score
                best_id = tl.load(best_ids + row * splits + split)
        wanted = best == float("-inf")
        end_id = vocab
    if wanted:
        row_nodes = _nodes_of(row, num_nodes, tokens, parents, valid, masses, kept)
        tokens, parents, valid, _, _ = row_nodes
        slot = tl.load(ends + row * 2)
        children = _children_of(slot, parents, valid, num_nodes, TREE, BLOCK_N)
        last = tl.max(tl.where(children, tl.arange(0, BLOCK_N), -1), 0)  # the last rejected node, or -1
        source = tl.load(index + row * (num_nodes + 1) + slot).to(tl.int64)
        sampling = sampling_of(row, source, temperatures, thresholds, threshold_ids)
        seed = tl.load(seeds + row)
        step = tl.load(steps + row)
        position = tl.load(starts + row) + tl.load(lengths + row)
        for begin in range(start_id, end_id, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            scores = load_scores(logits + source * row_stride, ids, vocab, sampling, KIND)
            if POINTS:
                if not MERGE:
                    scores = _without_children(scores, begin, ids, tokens, children, num_nodes, BLOCK)
            elif last >= 0:
                at = tl.load(prob_index + row * num_nodes + tl.load(ends + row * 2 + 1))
                p, q = _left_over(
                    scores, ids, tl.load(scales + row * 2), tl.load(scales + row * 2 + 1),
                    probs + (row * num_probs + at) * vocab, vocab, row_nodes, slot, last, TREE,
                )  # fmt: skip
                if not MERGE:
                    p = tl.maximum(p - q, 0.0)
                scores = tl.log(p)
            best, best_id = noisy_better(
                scores, ids, begin, best, best_id, seed, position, step, RESIDUAL_STREAM, BLOCK
            )
    if MERGE:
        tl.store(next_tokens + row, best_id.to(tl.int64))
    else:
        tl.store(best_scores + row * splits + tl.program_id(1), best)
        tl.store(best_ids + row * splits + tl.program_id(1), best_id)


# ---- launches ----

BLOCK = 4096  # ids per tile of a program, and per sum


def verify_rejection(
    logits: torch.Tensor,
    index: torch.Tensor,
    tokens: torch.Tensor,
    valid: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    steps: torch.Tensor,
    parents: torch.Tensor | None = None,
    probs: torch.Tensor | None = None,
    prob_index: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    thresholds: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    block: int = BLOCK,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Speculative sampling of chains and trees, with the numbers of `random_bits`.

    Chains follow Leviathan et al. 2023 and Chen et al. 2023; siblings are tried in order without replacement.

    Args:
        logits: float32, bfloat16 or float16 [R, V], without NaN; ids adjacent, rows may be strided.
        index: int64 [B, N + 1], contiguous, the row of logits after the root and each node.
        tokens, valid, parents: int64, bool, int64 [B, N]; parents None: chains.
        seeds, positions, steps: int64 [B], each row's stream, the index of the token after its root, and its round.
        probs: float32 [B, M, V], contiguous, the distributions of the drafts; None: deterministic drafts.
        prob_index: int64 [B, N], which of them each node was drawn from; siblings share one. Required with probs.
        temperature: float32 [B]; None: 1.
        thresholds: float32 [R] and int32 [R] from `sampling.triton.sampling_thresholds`.
        out: bool [B, N], int32 [B], int64 [B] to write to.

    Returns: accepted path bool [B, N], its length int32 [B], and the token after it int64 [B].

    Memory traffic: for deterministic chains each row of logits once, in 2 launches; otherwise those of inner nodes and one more per
    sequence, in 4 launches. With probs, also one of their rows per sequence.
    """
    out, (batch, num_nodes) = out if out is not None else empty_verdict(tokens), tokens.shape
    vocab, stride = logits.shape[1], logits.stride(0)
    if not batch:
        return out
    valid = valid.view(torch.uint8)
    noise, scores = (seeds, positions, steps), (temperature, *(thresholds or (None, None)))
    is_tree, points, places = parents is not None, probs is None, batch * (num_nodes + 1)
    drawn = points and not is_tree  # deterministic chains: `chain_kernel` draws the next token at every node
    above = parents if parents is not None else tokens  # not read for chains
    splits, per_split = split_vocabulary(places, vocab, block)
    num_blocks = splits if drawn else ceil_div(vocab, block)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    (maxima, sums, best_scores), best_ids = empty(3, places, num_blocks), empty(places, num_blocks, dtype=torch.int32)
    (masses, kept), scales = empty(2, batch, max(num_nodes, 1)), empty(batch, 2)
    ends, shape = empty(batch, 2, dtype=torch.int32), {"TREE": is_tree, "BLOCK_N": next_power_of_two(num_nodes)}
    flags = {**shape, "BLOCK": block, "num_warps": 8}
    if drawn:
        chain_kernel[(places, splits)](
            logits, index, tokens, valid, *noise, *scores, maxima, sums, best_scores, best_ids, vocab, stride, num_nodes,
            STEPS=per_split, LANES=block // 32, num_warps=ceil_div(block, 1024),
        )  # fmt: skip
    elif num_nodes:
        sums_kernel[(places, splits)](
            logits, index, tokens, above, valid, *scores, maxima, sums, vocab, stride, num_nodes, num_blocks, per_split, **flags,
        )  # fmt: skip
    (path, lengths, next_tokens), num_probs = out, 0 if probs is None else probs.shape[1]
    rejection_walk_kernel[(batch,)](
        logits, index, tokens, above, valid, probs, prob_index, *noise, *scores, maxima, sums, best_scores, best_ids, masses,
        kept, ends, scales, as_bytes(path), lengths, next_tokens, vocab, stride, num_nodes, num_blocks, num_probs, DRAWN=drawn,
        POINTS=points, BLOCK_S=next_power_of_two(num_blocks), BLOCK=1024 if drawn else block,
        num_warps=1 if not is_tree else 4 if points else 16, **shape,
    )  # fmt: skip
    if not drawn:
        splits, per_split = split_vocabulary(batch, vocab, block)
        for merge in (False, True):
            draw_kernel[(batch, 1 if merge else splits)](
                logits, index, tokens, above, valid, probs, prob_index, *noise, *scores, masses, kept, ends, scales, lengths,
                best_scores, best_ids, next_tokens, vocab, stride, num_nodes, num_probs, per_split, splits, MERGE=merge,
                POINTS=points, **flags,
            )  # fmt: skip
    return out


def verify_tokens(drafts, scores, score_rows, streams, temperature=None, thresholds=None):
    """See `reference.verify_tokens`."""
    index, tokens, valid, parents = upload_drafts(drafts, score_rows, scores.device)
    *keys, _ = upload_streams(streams, scores.device)
    probs = prob_index = None
    if drafts.probs is not None:
        probs, prob_index = drafts.probs.contiguous(), prob_index_on(drafts, scores.device).contiguous()
    given = parents, probs, prob_index, temperature, thresholds
    path, _, next_tokens = verify_rejection(scores, index, tokens, valid, *keys, *given)
    return path, next_tokens
