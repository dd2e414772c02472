"""Every operation of the loop in plain torch: the definition, and the CPU path."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class AttentionRow(NamedTuple):
    """One row of a ragged batch, as attention sees it.

    `start:end` are its queries among the packed tokens; its keys are the slots `first_slot .. first_slot+length` when
    `slots` is None (a contiguous run: no copy), else the slots listed in `slots` [length].
    """

    start: int
    end: int
    length: int
    first_slot: int
    slots: torch.Tensor | None


class PaddedRows(NamedTuple):
    """B rows with one query each, their keys padded to one length S.

    `slots` int64 [B * S] are the rows' slots, any written one where a row has fewer; `mask` is additive, float [B, 1, 1, S],
    or None where every row has S keys and sees all of them.
    """

    slots: torch.Tensor
    mask: torch.Tensor | None


# ---- cache ----------------------------------------------------------------------------------------------------------


def write_slots(pool: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Write `values` [T, heads, width] into `pool` [slots, heads, width] at `slots` [T]."""
    pool.index_copy_(0, slots, values)


def read_row(pool: torch.Tensor, row: AttentionRow) -> torch.Tensor:
    """The row's keys or values [1, heads, length, width]: a view of `pool` when contiguous, a gathered copy otherwise."""
    if row.slots is None:
        per_slot, per_head, _ = pool.stride()  # one operation where narrow, transpose and index would be three
        shape, strides = (1, pool.shape[1], row.length, pool.shape[2]), (per_slot, per_head, per_slot, 1)
        return pool.as_strided(shape, strides, pool.storage_offset() + row.first_slot * per_slot)
    return pool.index_select(0, row.slots).transpose(0, 1)[None]


def move_slots(pool: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy slots `source` [n] to `target` [n]; the two may overlap (all are read before any is written)."""
    pool.index_copy_(0, target, pool.index_select(0, source))


# ---- attention ------------------------------------------------------------------------------------------------------


def paged_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    rows: list[AttentionRow],
    masks: list[torch.Tensor | None],
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    padded: PaddedRows | None = None,
) -> torch.Tensor:
    """Attention of a ragged batch over a paged cache.

    Args:
        query: [T, H, D], the queries of all rows, packed.
        key_pool, value_pool: [slots, Hkv, D] and [slots, Hkv, Dv]; the batch's own keys are already written.
        rows, masks: per row, where its queries and keys are, and an additive float mask [G * t, S] for its t queries,
            repeated for the G = H / Hkv heads of a group (None: every query sees every key).
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2).
        sinks: [H] one more logit per head that takes part in the softmax and has no value (gpt-oss).
        padded: the rows once more, where they are short and have one query each: one product is then faster than one a row.

    Returns: [T, H, Dv].
    """
    _, num_heads, width = query.shape
    num_kv_heads, value_width = key_pool.shape[1], value_pool.shape[2]
    group = num_heads // num_kv_heads
    plain = softcap is None and sinks is None
    if plain and padded is not None:
        return _attention_of_short_rows(query, key_pool, value_pool, padded, scaling)
    few = _MATRIX_VECTOR_QUERIES // group if plain and query.dtype == torch.bfloat16 and not query.is_cuda else 0
    outs = []
    for row, mask in zip(rows, masks, strict=True):
        count = row.end - row.start
        q = query if len(rows) == 1 else query[row.start : row.end]
        k, v = read_row(key_pool, row), read_row(value_pool, row)
        if count <= few:
            outs.append(_attention_query_by_query(q, k, v, mask, scaling))
            continue
        # Heads of a group become extra queries of their KV head: keys and values are never expanded.
        q = q.view(count, num_kv_heads, group, width)
        q = q if count == 1 else q.permute(1, 2, 0, 3).reshape(1, num_kv_heads, -1, width)
        if plain:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        else:
            attended = _attention_with_softcap_or_sinks(q, k, v, mask, scaling, softcap, sinks)
        if count > 1:
            attended = attended.view(num_kv_heads, group, count, value_width).permute(2, 0, 1, 3)
        outs.append(attended.reshape(count, num_heads, value_width))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attention_of_short_rows(query, key_pool, value_pool, padded: PaddedRows, scaling):
    """query [B, H, D], one of each row → [B, H, Dv]."""
    batch, num_heads, width = query.shape
    k, v = (
        pool.index_select(0, padded.slots).view(batch, -1, pool.shape[1], pool.shape[2]).transpose(1, 2)
        for pool in (key_pool, value_pool)
    )
    q = query.reshape(batch, k.shape[1], -1, width)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=padded.mask, scale=scaling)
    return attended.reshape(batch, num_heads, -1)


# torch's CPU attention multiplies single bfloat16 queries by matrix-vector products, which read keys in place; for several it
# repacks them into tiles first. Measured: up to so many queries (tokens x heads of a group) the former is faster.
_MATRIX_VECTOR_QUERIES = 4


def _attention_query_by_query(query, k, v, mask, scaling):
    """query [t, H, D], each a batch entry of its own, with k and v [1, Hkv, S, D]; mask [G * t, S] → [t, H, Dv]."""
    count = query.shape[0]
    k, v = k.expand(count, -1, -1, -1), v.expand(count, -1, -1, -1)
    mask = None if mask is None else mask[:count, None, None]  # heads of a group have the same
    attended = F.scaled_dot_product_attention(
        query[:, :, None], k, v, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != k.shape[1]
    )
    return attended.squeeze(2)


def _attention_with_softcap_or_sinks(q, k, v, mask, scaling, softcap, sinks):
    scores = torch.matmul(q, k.transpose(2, 3)) * scaling  # [1, Hkv, G * t, S]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        per_group = sinks.view(k.shape[1], -1).repeat_interleave(q.shape[2] * k.shape[1] // sinks.numel(), dim=1)
        scores = torch.cat([scores, per_group[None, :, :, None].to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights[..., : k.shape[2]], v)


# ---- trees ----------------------------------------------------------------------------------------------------------


def ancestor_matrix(parents: torch.Tensor) -> torch.Tensor:
    """Which nodes are on the path from the root to each node, itself included.

    Args:
        parents: int64 [B, N], the index of each node's parent (-1: the root, i.e. the last accepted token).

    Returns: bool [B, N + 1, N + 1] over (root, node 0, .. node N-1): `out[b, i, j]` is True if j is i or an ancestor of i.
    """
    batch, num_nodes = parents.shape
    reach = torch.eye(num_nodes + 1, device=parents.device).repeat(batch, 1, 1)
    reach[:, 1:].scatter_(2, (parents + 1)[:, :, None], 1.0)
    for _ in range(max(num_nodes, 1).bit_length()):  # each squaring doubles the path length covered
        reach = torch.bmm(reach, reach).clamp_(max=1.0)
    return reach > 0


def accepted_nodes(tokens, valid, parents, ancestors, choices) -> torch.Tensor:
    """Walk each tree along the target's own choices.

    Args:
        tokens, valid, parents: [B, N], the drafted tokens, which entries are nodes, and their parents.
        ancestors: [B, N + 1, N + 1] from `ancestor_matrix`.
        choices: [B, N + 1], the token the target chooses after the root and after each node.

    Returns: bool [B, N], the nodes on the accepted path (at most one per depth, also if siblings repeat a token).
    """
    match = valid & (tokens == choices.gather(1, parents + 1))
    reached = ~(ancestors[:, 1:, 1:] & ~match[:, None, :]).any(2)  # the node and all its ancestors match
    depth = ancestors[:, 1:, 1:].sum(2) * reached
    if depth.shape[1] == 0:
        return reached
    deepest = depth.argmax(1)  # the first of the deepest
    path = ancestors[:, 1:, 1:].gather(1, deepest[:, None, None].expand(-1, 1, depth.shape[1])).squeeze(1)
    return path & reached.any(1, keepdim=True)


def rejection_walk(tokens, valid, parents, probs, prob_index, target_probs, accept_uniform, residual_gumbel):
    """Speculative sampling over trees: Leviathan et al. 2023 / Chen et al. 2023 for chains; siblings are tried in order,
    each against what the rejected ones left over (multi-candidate without replacement, as in EAGLE and SpecInfer).

    Args:
        tokens, valid, parents: [B, N].
        probs, prob_index: draft distributions [B, M, V] and, per node, which of them it was drawn from [B, N]
            (its siblings drawn before it removed); None for drafts that are points (accepted with probability p(x)).
        target_probs: callable (node index [B], 0 = root) -> the target's distribution there, float [B, V].
        accept_uniform: [B, N] uniform numbers, one per test.
        residual_gumbel: callable (depth [B]) -> Gumbel noise [B, V] for the last draw.

    Returns: accepted path, bool [B, N], and the token after it, int64 [B].
    """
    batch, num_nodes = tokens.shape
    rows = torch.arange(batch, device=tokens.device)
    current = torch.zeros_like(rows)  # node index + 1; 0 is the root
    depth = torch.zeros_like(rows)
    accepted = torch.zeros_like(valid)
    residual = target_probs(current)
    proposal = None
    proposal_of = torch.full_like(rows, -1)  # the node whose children `proposal` describes
    for node in range(num_nodes):
        tested = valid[:, node] & (parents[:, node] + 1 == current)
        token = tokens[:, node]
        if probs is None:
            proposal = F.one_hot(token, residual.shape[1]).to(residual.dtype)
        else:
            drawn_from = probs[rows, prob_index[:, node]].to(residual.dtype)
            proposal = (
                drawn_from if proposal is None else torch.where((proposal_of == current)[:, None], proposal, drawn_from)
            )
            proposal_of = torch.where(tested, current, proposal_of)
        p, q = residual[rows, token], proposal[rows, token]
        accept = tested & (q > 0) & (accept_uniform[:, node] * q < p)
        reject = tested & ~accept
        accepted[:, node] = accept
        depth = depth + accept
        current = torch.where(accept, node + 1, current)
        left_over = (residual - proposal).clamp_(min=0.0)
        mass = left_over.sum(1, keepdim=True)
        left_over = torch.where(mass > 0, left_over / mass.clamp(min=1e-38), residual)
        residual = torch.where(reject[:, None], left_over, residual)
        residual = torch.where(accept[:, None], target_probs(current), residual)
        if probs is not None:
            without = proposal.scatter(1, token[:, None], 0.0)
            without = without / without.sum(1, keepdim=True).clamp(min=1e-38)
            proposal = torch.where(reject[:, None], without, proposal)
    return accepted, (residual.log() + residual_gumbel(depth)).argmax(1)


def block_walk(tokens, valid, probs, prob_index, target_probs, accept_uniform, residual_gumbel):
    """Block verification of chains (Sun et al. 2024, arXiv 2403.10444, algorithm 2): exact, and no exact rule that tests
    one drafted path accepts more tokens in expectation.

    With p the target's and q the drafter's distributions after i drafted tokens x_1 .. x_i,

        w_0 = 1,  w_i = min(1, w_(i-1) p(x_i) / q(x_i))             P(at least i tokens are accepted | x_1 .. x_i)
        R_i = sum over x of max(w_i p(x) - q(x), 0),                with q = 0 after the last drafted token: R_n = w_n
        h_i = R_i / (R_i + 1 - w_i)

    all of x_1 .. x_i are accepted for the largest i with u_i < h_i (h_0 = 1); the next token is drawn from
    max(w_i p - q, 0) / R_i. All prefixes are tested: one that fails does not stop longer ones.

    Args:
        tokens, valid: [B, N], a chain per row.
        probs, prob_index: as in `rejection_walk`; None: points (q is 1 at the drafted token).
        target_probs: callable (node index [B], 0 = root) -> the target's distribution there, float [B, V].
        accept_uniform: [B, N] uniform numbers u_1 .. u_N.
        residual_gumbel: callable (depth [B]) -> Gumbel noise [B, V] for the last draw.

    Returns: accepted path, bool [B, N], and the token after it, int64 [B].
    """
    length, left_over = block_acceptance(tokens, valid, probs, prob_index, target_probs, accept_uniform)
    accepted = torch.arange(tokens.shape[1], device=tokens.device) < length[:, None]
    return accepted, (left_over.log() + residual_gumbel(length)).argmax(1)


def block_acceptance(tokens, valid, probs, prob_index, target_probs, accept_uniform):
    """How many tokens of each chain are accepted, int64 [B], and what the next one is drawn from, not normalised [B, V].

    Arguments and rule: see `block_walk`.
    """
    num_nodes = tokens.shape[1]
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    length, left_over = torch.zeros_like(rows), accept_uniform.new_zeros(())
    drafted = torch.ones_like(rows, dtype=torch.bool)  # whether the row has the i-th drafted token
    weight = torch.ones_like(rows, dtype=accept_uniform.dtype)
    for i in range(num_nodes + 1):
        target = target_probs(torch.full_like(rows, i))
        over, next_weight, goes_on = target * weight[:, None], weight, drafted
        if i < num_nodes:
            token, goes_on = tokens[:, i], valid[:, i]
            if probs is None:
                q = torch.ones_like(weight)
                over[rows, token] -= goes_on.to(over.dtype)
            else:
                drawn_from = probs[rows, prob_index[:, i]].to(over.dtype)
                q = drawn_from[rows, token]
                over -= drawn_from.masked_fill(~goes_on[:, None], 0.0)  # what no draft was drawn from may be anything
            over.clamp_(min=0.0)
            ratio = torch.where(q > 0, target[rows, token] / q.clamp(min=1e-38), 0.0)
            next_weight = (weight * ratio).clamp(max=1.0)
        mass = over.sum(1)
        # No mass is left only where w = 1 and p = q, or in paths that cannot be accepted; or by rounding.
        over = torch.where((mass > 0)[:, None], over, target)
        # No token is always an accepted block; u < h is tested without dividing.
        accept = drafted & (accept_uniform[:, i - 1] * (mass + (1.0 - weight)) < mass) if i else drafted
        length = torch.where(accept, i, length)
        left_over = torch.where(accept[:, None], over, left_over)
        weight, drafted = next_weight, goes_on
    return length, left_over


def typical_limits(scores: torch.Tensor, threshold: float, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What a token's probability must exceed to be typical, [R], and log-probabilities [R, V] (Cai et al. 2024, "Medusa").

    The limit is min(threshold, alpha * exp(-H)) with the entropy H = -sum p log(p + 1e-5) of scores [R, V]: the flatter the
    distribution, the lower.
    """
    log_probs = torch.log_softmax(scores, dim=-1, dtype=torch.float32)
    probs = log_probs.exp()
    entropy = -torch.linalg.vecdot(probs, (probs + 1e-5).log())
    return (alpha * torch.exp(-entropy)).clamp(max=threshold), log_probs


def likeliest_longest_path(candidates, ancestors, log_likelihood) -> torch.Tensor:
    """The longest path from the root over candidate nodes; of equally long ones the one with the largest summed likelihood.

    Args:
        candidates: bool [B, N].
        ancestors: [B, N + 1, N + 1] from `ancestor_matrix`.
        log_likelihood: [B, N], of each node given its parent.

    Returns: bool [B, N].
    """
    if candidates.shape[1] == 0:
        return candidates
    lines = ancestors[:, 1:, 1:]
    reached = ~(lines & ~candidates[:, None, :]).any(2)  # the node and all its ancestors are candidates
    depth = lines.sum(2) * reached
    # Nodes off the candidates may have a likelihood of -inf, and -inf * 0 is no number.
    summed = (lines * log_likelihood.masked_fill(~candidates, 0.0)[:, None, :]).sum(2)
    deepest = reached & (depth == depth.amax(1, keepdim=True))
    best = summed.masked_fill(~deepest, float("-inf")).argmax(1)
    path = lines.gather(1, best[:, None, None].expand(-1, 1, lines.shape[2])).squeeze(1)
    return path & reached.any(1, keepdim=True)


# ---- dynamic trees --------------------------------------------------------------------------------------------------


def next_frontier(
    frontier_values: torch.Tensor,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    keep: int,
    limits: torch.Tensor | None = None,
    depth: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One level of a dynamic tree: children's path log-probabilities, and the `keep` best of them (EAGLE-2, Li et al. 2024).

    Args:
        frontier_values: float32 [R, F], log-probabilities of the paths to the nodes that were expanded.
        tokens: int64 [R, F, k], their children; log_probs: float32 [R, F, k], of each child after its parent.
        keep: size of the next frontier, at most F * k.
        limits, depth: int32 [R], how deep each row's tree may be, and the children's depth: children of rows with a
            smaller limit get -inf, as do NaNs.

    Returns: children's values float32 [R, F * k]; and of the best, greatest first and of equals the first: values float32,
        indices among the children int64, tokens int64 and parents among the frontier int64, [R, keep] each.
    """
    children = (frontier_values[:, :, None] + log_probs).flatten(1)
    children = children.masked_fill(children.isnan(), float("-inf"))
    if limits is not None:
        children = children.masked_fill(limits[:, None] < depth, float("-inf"))
    values, order = children.sort(dim=1, descending=True, stable=True)
    best = order[:, :keep]
    return children, values[:, :keep], best, tokens.flatten(1).gather(1, best), best // tokens.shape[2]


def prune_tree(
    tokens: torch.Tensor, values: torch.Tensor, parents: torch.Tensor, expanded: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keep the `count` likeliest nodes of each pool, in their order, and renumber their parents (EAGLE-2's last step).

    Equally likely nodes keep their order, so parents, which are at least as likely as their children and stand before them,
    are never left out.

    Args:
        tokens, parents, expanded: int64 [B, P] (parents: -1 is the root).
        values: float32 [B, P], path log-probabilities, -inf where there is no node.

    Returns: see `keep_nodes`.
    """
    order = values.sort(dim=1, descending=True, stable=True).indices[:, :count]
    keep = torch.zeros_like(values, dtype=torch.bool).scatter_(1, order, True) & (values > float("-inf"))
    return keep_nodes(tokens, parents, expanded, keep, count)


def keep_nodes(
    tokens: torch.Tensor, parents: torch.Tensor, expanded: torch.Tensor, keep: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Trees of the nodes of `keep` bool [B, P], at most `count` of them, in their order; kept nodes' parents are kept.

    Returns: tokens, parents, expanded and places in the pool, int64 [B, count], and lengths int32 [B]. Padding has token 0,
        the entry before it as parent, and -1 for the other two.
    """
    missing = count - keep.shape[1]
    nodes = (~keep).to(torch.uint8).sort(dim=1, stable=True).indices[:, :count]  # kept ones first, in order
    places = keep.cumsum(1) - 1
    above = parents.gather(1, nodes)
    moved = torch.where(above < 0, -1, places.gather(1, above.clamp(min=0)))
    found = [tokens.gather(1, nodes), moved, expanded.gather(1, nodes), nodes]
    if missing > 0:
        found = [torch.nn.functional.pad(each, (0, missing)) for each in found]
    index = torch.arange(count, device=keep.device)
    lengths = keep.sum(1, dtype=torch.int32)
    valid = index < lengths[:, None]
    padding = (0, index - 1, -1, -1)
    kept = [torch.where(valid, each, other) for each, other in zip(found, padding, strict=True)]
    return kept[0], kept[1], kept[2], kept[3], lengths


def gather_features(layers: list[torch.Tensor], index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Hidden states of chosen tokens, layer beside layer.

    Args:
        layers: L of [T, H].
        index: int64 [n], which of the T tokens.

    Returns: [n, L * H] in `dtype`.
    """
    picked = [layer[index].to(dtype) for layer in layers]
    return picked[0] if len(picked) == 1 else torch.cat(picked, dim=-1)
