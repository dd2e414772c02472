"""Growing chains, static trees and dynamic trees: one call of the drafter per depth, all rows together."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from ...core.draft_trees import DraftTrees
from ...core.sequence import Sequence
from ...kernels import drafting
from ...kernels.transfer import upload
from ...sampling.buffers import SamplingBuffers
from .levels import Draft, Growth, NodeExpander
from .tree_shapes import DynamicTree, TreeDraftingConfig, TreeShape, TreeTemplate


def growth_of(
    expander: NodeExpander,
    config: TreeDraftingConfig,
    shape: TreeShape,
    sequences: list[Sequence],
    limits: list[int],
    sampling: SamplingBuffers | None = None,
    probs: torch.Tensor | None = None,
) -> Growth:
    """A new round of drafting.

    Children are the most likely tokens (greedy), or the best after Gumbel perturbation, which is sampling without replacement;
    with the target's own noise (coupled) they are the tokens the target would choose if it agreed with the drafter. Trees that
    choose nodes by probability are deterministic under the rule "rejection": each draft is a point distribution (EAGLE-2).

    Args:
        sequences, limits: the batch, and how deep each row's draft may be (0: no draft).
        sampling, probs: see `Growth`.
    """
    growth = DynamicGrowth if isinstance(shape, DynamicTree) else StaticGrowth
    return growth(expander, config, shape, sequences, limits, sampling, probs)


def grow(expander: NodeExpander, config, shape, sequences: list[Sequence], limits: list[int], logits) -> Draft:
    """One round of drafting (see `growth_of`) from the logits [R, Vd] after each text with a limit."""
    growth = growth_of(expander, config, shape, sequences, limits)
    return growth.draft(*growth.levels(logits))


class StaticGrowth(Growth):
    """Growth of one template for every row; a row with a smaller limit gets its first levels only."""

    shape: TreeTemplate

    def levels(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Ids int64 [B, N] and, if paths are chosen by probability, log-probabilities float32 [B, N] of the paths to them."""
        shape, device, batch = self.shape, logits.device, len(self.sequences)
        ranked = shape.prunes or self.least is not None
        ids = torch.zeros(batch, shape.level_ends[self.last - 1], dtype=torch.long, device=device)
        path_log_probs = ids.new_zeros(ids.shape, dtype=torch.float32) if ranked else None
        rows = [i for i, limit in enumerate(self.limits) if limit]
        logits, num_parents = logits[:, None], 1
        for depth, level in enumerate(shape.levels_on(device)[: self.last], 1):
            chosen, log_probs = self.choose(logits, rows, depth, num_parents, level.width, ranked)
            tokens = level.nodes_of(chosen)
            at = slice(None) if len(rows) == batch else self.index(rows, device)
            ids[at, level.nodes] = tokens
            if path_log_probs is not None and log_probs is not None:
                added = level.nodes_of(log_probs)
                if depth > 1:
                    added = added + path_log_probs[at][:, level.parents]
                path_log_probs[at, level.nodes] = added
                self.confident(rows, added.amax(1), depth)
            deeper = [i for i in rows if self.limits[i] > depth]
            if not deeper:
                break
            if len(level.inner) < tokens.shape[1]:
                tokens = tokens[:, level.inner]
            parents = level.inner_slots.expand(len(rows), -1)
            ancestors = np.broadcast_to(level.inner_ancestors, (len(rows), *level.inner_ancestors.shape))
            logits = self.expand(rows, deeper, depth, tokens, parents, ancestors)
            rows, num_parents = deeper, len(level.inner)
        return (ids,) if path_log_probs is None else (ids, path_log_probs)

    def draft(self, *tensors: torch.Tensor) -> Draft:
        """Each row's levels as trees; templates that keep the best paths keep those of the row's deepest level."""
        shape, count = self.shape, self.shape.level_ends[self.last - 1]
        ids, *path_log_probs = (each[:, :count] for each in tensors)
        lengths = [shape.level_ends[limit - 1] if limit else 0 for limit in self.limits]
        place = np.full(count, -1, dtype=np.int64)
        order = shape.expanded[shape.expanded < count]
        place[order] = np.arange(len(order))
        expanded = np.where(shape.depths[None, :count] < np.asarray(self.limits)[:, None], place, -1)
        if shape.is_chain:
            return Draft(DraftTrees(ids, lengths, None, self.probs), expanded)
        parents = np.tile(shape.parents[:count], (len(lengths), 1))
        if shape.keep_paths is not None:
            above, at = (upload(each, ids.device) for each in (parents, expanded))
            kept = drafting.keep_nodes(ids, above, at, self._best_paths(path_log_probs[0]), count)
            return _pruned(kept, self.limits)
        index = None if self.probs is None else np.where(parents < 0, 0, place[parents] + 1)
        return Draft(DraftTrees(ids, lengths, parents, self.probs, index), expanded)

    def _best_paths(self, path_log_probs: torch.Tensor) -> torch.Tensor:
        """bool [B, N]: the nodes on the paths to each row's best leaves."""
        count, device = path_log_probs.shape[1], path_log_probs.device
        depths = torch.from_numpy(self.shape.depths[:count]).to(device)
        limits = upload(self.limits, device)
        leaves = path_log_probs.masked_fill(depths[None] != limits[:, None], float("-inf"))
        best = leaves.topk(min(self.shape.keep_paths or count, count), dim=1)
        chosen = torch.zeros_like(leaves).scatter_(1, best.indices, (best.values > float("-inf")).to(leaves.dtype))
        ancestors = torch.from_numpy(self.shape.ancestors[:count, :count]).to(device, leaves.dtype)
        return chosen @ ancestors > 0


class DynamicGrowth(Growth):
    """EAGLE-2: expand the likeliest nodes, keep the likeliest paths. Node indices refer to the pool of all nodes seen.

    Attributes:
        device_limits: int32 [R], each row's limit, if it is known on the device only: all rows then grow to the largest depth,
            and nodes deeper than their row's limit are dropped.
    """

    shape: DynamicTree
    device_limits: torch.Tensor | None = None

    def levels(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The kept nodes, as `kernels.drafting.prune_tree` returns them."""
        shape, batch, device = self.shape, len(self.sequences), logits.device
        rows = [i for i, limit in enumerate(self.limits) if limit]
        tokens, log_probs = self.choose(logits[:, None], rows, 1, 1, shape.top_k, rank=True)
        assert log_probs is not None
        width = tokens.shape[2]  # top_k, or the size of a smaller vocabulary
        size = width + (self.last - 1) * width * width
        pool = torch.zeros(batch, size, dtype=torch.long, device=device)
        values = torch.full((batch, size), float("-inf"), device=device)
        parents, expanded = torch.full_like(pool, -1), torch.full_like(pool, -1)
        index = self.index(rows, device)
        nodes = torch.arange(width, device=device)
        frontier, frontier_tokens, frontier_values = nodes.expand(len(rows), -1), tokens[:, 0], log_probs[:, 0]
        pool[index, :width], values[index, :width] = frontier_tokens, frontier_values
        parent = torch.zeros_like(frontier)
        ancestors = torch.zeros(len(rows), width, 0, dtype=torch.bool, device=device)
        self._end_unlikely(rows, frontier_values, 1, values, slice(0, width))
        for depth in range(2, self.last + 1):
            deeper = [i for i in rows if self.limits[i] >= depth]
            if not deeper:
                break
            first = self.num_expanded
            ancestors = _with_children(ancestors, parent)
            logits = self.expand(rows, deeper, depth - 1, frontier_tokens, parent, ancestors)
            if len(deeper) < len(rows):
                kept = upload([rows.index(i) for i in deeper], device)
                rows, index = deeper, self.index(deeper, device)
                frontier, frontier_values, ancestors = frontier[kept], frontier_values[kept], ancestors[kept]
            expanded[index[:, None], frontier] = first + nodes
            tokens, log_probs = self.choose(logits, rows, depth, width, shape.top_k, rank=True)
            assert log_probs is not None
            tokens, log_probs = (each.expand(-1, width, -1).contiguous() for each in (tokens, log_probs))
            start = width + (depth - 2) * width * width
            new = slice(start, start + width * width)
            children, frontier_values, best, frontier_tokens, parent = drafting.next_frontier(
                frontier_values.contiguous(), tokens, log_probs, width, self.device_limits, depth
            )
            pool[index, new], values[index, new] = tokens.flatten(1), children
            parents[index, new] = frontier.repeat_interleave(width, dim=1)
            frontier = start + best
            self._end_unlikely(rows, frontier_values, depth, values, new)
        return drafting.prune_tree(pool, values, parents, expanded, min(shape.total_tokens - 1, size))

    def draft(self, *tensors: torch.Tensor) -> Draft:
        """The trees. Everything but the tokens is copied to the host."""
        draft = _pruned(tensors, self.limits)
        continued = np.array([self.shape.num_expanded(limit) for limit in self.limits])
        draft.expanded[draft.expanded >= continued[:, None]] = -1  # expanded only because of rows with greater limits
        return draft

    def _end_unlikely(self, rows: list[int], frontier_values: torch.Tensor, depth: int, values, new: slice) -> None:
        if self.least is None:
            return
        self.confident(rows, frontier_values.amax(1), depth)
        ended = [i for i in rows if self.limits[i] < depth]
        if ended:
            values[self.index(ended, values.device), new] = float("-inf")


def _with_children(ancestors: torch.Tensor, parent: torch.Tensor) -> torch.Tensor:
    """bool [R, F, E + F]: the ancestors of F new nodes. `parent` [R, F] are indices into the F nodes above, whose paths are
    `ancestors` [R, F, E]."""
    rows, width, before = ancestors.shape
    own = torch.eye(width, dtype=torch.bool, device=parent.device).expand(rows, -1, -1)
    return torch.cat([ancestors.gather(1, parent[:, :, None].expand(-1, -1, before)), own], dim=2)


def _pruned(kept: Iterable[torch.Tensor], limits: list[int]) -> Draft:
    """Trees from the result of `keep_nodes` or `prune_tree`, which has all rows; rows without a limit get no nodes."""
    tokens, parents, expanded, _, lengths = kept
    host = torch.cat([lengths[:, None], parents, expanded], dim=1).cpu().numpy()
    counts = np.where(np.asarray(limits) > 0, host[:, 0], 0)
    width = int(counts.max(initial=0))
    parents, expanded = host[:, 1:].reshape(len(host), 2, -1)[:, :, :width].swapaxes(0, 1)
    return Draft(DraftTrees(tokens[:, :width], counts.tolist(), np.ascontiguousarray(parents)), expanded)
