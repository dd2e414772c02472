"""Growing and pruning dynamic trees, and what draft heads read and write, in plain torch: the definitions, and the CPU path."""

from __future__ import annotations

import torch


def next_frontier(
    frontier_values: torch.Tensor,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    keep: int,
    limits: torch.Tensor | None = None,
    depth: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Grow a dynamic tree by one level: path log-probabilities of all children, and the `keep` best (EAGLE-2, Li et al. 2024).

    Args:
        frontier_values: float32 [R, F], log-probabilities of the paths to the expanded nodes.
        tokens: int64 [R, F, k], their children; log_probs: float32 [R, F, k], of each child given its parent.
        keep: size of the next frontier, at most F * k.
        limits, depth: int32 [R], the most depth of each row's tree, and the children's depth. Children in rows with a smaller
            limit get -inf, as do NaNs.

    Returns: values of all children, float32 [R, F * k]. For the best children, in descending order (ties: the first), [R, keep] each:
        values float32, indices among the children int64, tokens int64, and parents among the frontier int64.
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
    """Keep the `count` likeliest nodes of each tree, in their order, and renumber their parents (the last step of EAGLE-2).

    Parents are at least as likely as their children and come before them. Ties keep the first node, so no kept node loses its
    parent.

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
    """Build trees of the nodes in `keep` bool [B, P], at most `count` per row, in their order. Parents of kept nodes must be kept.

    Returns: tokens, parents, expanded and original indices, int64 [B, count], and lengths int32 [B]. Padding has token 0, the entry
        before it as parent, and -1 for the other two.
    """
    missing = count - keep.shape[1]
    nodes = (~keep).to(torch.uint8).sort(dim=1, stable=True).indices[:, :count]  # kept ones first, in order
    places = keep.cumsum(1) - 1
    above = parents.gather(1, nodes)
    moved = torch.where(above < 0, -1, places.gather(1, above.clamp(min=0)))
    sorted_parts = [tokens.gather(1, nodes), moved, expanded.gather(1, nodes), nodes]
    if missing > 0:
        sorted_parts = [torch.nn.functional.pad(part, (0, missing)) for part in sorted_parts]
    index = torch.arange(count, device=keep.device)
    lengths = keep.sum(1, dtype=torch.int32)
    valid = index < lengths[:, None]
    padding = (0, index - 1, -1, -1)
    kept = [torch.where(valid, part, other) for part, other in zip(sorted_parts, padding, strict=True)]
    return kept[0], kept[1], kept[2], kept[3], lengths


def gather_features(layers: list[torch.Tensor], index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Concatenate the hidden states of some tokens over layers.

    Args:
        layers: L tensors [T, H].
        index: int64 [n], which of the T tokens.

    Returns: [n, L * H] in `dtype`.
    """
    if len(index) == len(layers[0]) == 1:  # a step without drafts: picking would take three times as long as joining
        return torch.cat([layer.to(dtype) for layer in layers], dim=-1)
    picked = [layer[index].to(dtype) for layer in layers]
    return picked[0] if len(picked) == 1 else torch.cat(picked, dim=-1)


def to_target_vocabulary(scores: torch.Tensor, target_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Scores [.., Vd] over a draft vocabulary as scores [.., V] over the target's; tokens outside it get -inf.

    Args:
        target_ids: int64 [Vd], the target's id of each draft id.
    """
    out = scores.new_full((*scores.shape[:-1], vocab_size), float("-inf"))
    return out.index_copy_(-1, target_ids, scores)
