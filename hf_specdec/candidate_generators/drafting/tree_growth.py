"""Growing drafts, one depth per call of the drafter, all rows together: chains, static trees, dynamic trees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ...kernels.random_bits import DRAFT_STREAM, TOKEN_STREAM
from ...runtime import DraftTrees, Sequence
from ...runtime.logits import add_noise, needs_prefix, process_logits
from .tree_shapes import DynamicTree, TemplateLevel, TreeDraftingConfig, TreeTemplate


@dataclass
class Level:
    """Nodes of one depth that the drafter is to continue: the same number F in each of R rows.

    Attributes:
        depth: of these nodes; 1 for the root's children.
        rows: which rows of the batch, ascending.
        kept: for each, where it stood among the rows of the previous level (of the root's logits at depth 1).
        tokens: int64 [R, F], ids of the target's vocabulary.
        parents: int64 [R, F], each node's parent among the F nodes of the previous level (zeros at depth 1).
        first: nodes given before these in each row: node f is the row's expanded node `first + f`.
        ancestors: bool numpy [R, F, first + F], which expanded nodes are on each node's path, itself included.
        depths: int64 numpy [first + F], depths of the expanded nodes, these last.
    """

    depth: int
    rows: list[int]
    kept: list[int]
    tokens: torch.Tensor
    parents: torch.Tensor
    first: int
    ancestors: np.ndarray
    depths: np.ndarray


class Vocabulary(Protocol):
    """How a drafter's logits become scores of the target's tokens."""

    in_target_vocabulary: bool  # whether they do: processors and noise, which speak of the target's tokens, then apply

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores [R, V] from the drafter's logits [R, Vd]; tokens it does not know get minus infinity."""
        ...


class NodeExpander(Protocol):
    """A drafter, as growth sees it.

    One that can tell how likely its drafts are accepted also has `log_survival() -> [R, F] or None`: for each node the last
    logits followed, the log-probability that its path and what comes next are accepted. `draft_confidence_threshold` is
    then compared with that instead of the drafted tokens' own probabilities.
    """

    vocabulary: Vocabulary

    def expand(self, level: Level) -> torch.Tensor:
        """Logits [R, F, Vd] of what follows each node; [R, 1, Vd] if they are the same for all nodes of a row."""
        ...


@dataclass
class Draft:
    """What was grown.

    Attributes:
        trees: B rows.
        expanded: int64 numpy [B, N], which of the row's expanded nodes each node is; -1: the drafter did not go on from it.
    """

    trees: DraftTrees
    expanded: np.ndarray


def grow(
    expander: NodeExpander,
    config: TreeDraftingConfig,
    shape: TreeTemplate | DynamicTree,
    sequences: list[Sequence],
    limits: list[int],
    logits: torch.Tensor,
) -> Draft:
    """One round of drafting.

    Children are the best tokens (greedy), or the best after Gumbel perturbation, which is sampling without replacement;
    with the loop's own noise (coupled) they are what the target would pick if it agreed with the drafter. Trees that keep
    some nodes for how likely they are are deterministic under the rule "rejection" (their nodes are points: EAGLE-2).

    Args:
        sequences, limits: the batch, and how deep each row's draft may be (0: it is not drafted for).
        logits: [R, Vd] after each row with a limit, in their order.
    """
    growth = _DynamicGrowth if isinstance(shape, DynamicTree) else _StaticGrowth
    return growth(expander, config, shape, sequences, limits, logits.device).grow(logits[:, None])


class _Growth:
    """What both kinds of growth share: from logits to scores, and which rows go deeper."""

    def __init__(self, expander: NodeExpander, config, shape, sequences: list[Sequence], limits: list[int], device):
        self.expander, self.shape, self.sequences, self.device = expander, shape, sequences, device
        self.vocabulary = expander.vocabulary
        self.log_survival = getattr(expander, "log_survival", None)
        self.limits = list(limits)
        self.independent = config.verifies_by_draft_probs
        self.processed = self.vocabulary.in_target_vocabulary
        self.probabilistic = config.draft_sample_method != "greedy" and self.processed
        if self.independent and shape.prunes:
            self.probabilistic = False
        self.keeps_probs = self.independent and self.probabilistic and any(seq.do_sample for seq in sequences)
        self.prefixed = self.processed and needs_prefix(sequences)
        threshold = config.draft_confidence_threshold
        self.least = math.log(threshold) if threshold else None
        self.probs: torch.Tensor | None = None
        self.depths = np.zeros(0, dtype=np.int64)  # of the expanded nodes
        self.paths: torch.Tensor | None = (
            None  # int64 [R, F, depth] ids on the frontier's paths, if processors need them
        )

    @property
    def num_expanded(self) -> int:
        """Nodes per row that were handed to the drafter."""
        return len(self.depths)

    def choose(self, logits: torch.Tensor, rows: list[int], depth: int, frontier: int, width: int, rank: bool):
        """The `width` best children of every frontier node: ids [R, F, width] and, if `rank`, their log-probabilities.

        F is 1 where all nodes of a row share their children.
        """
        if logits.shape[1] < frontier and (self.prefixed or self.keeps_probs):
            logits = logits.expand(-1, frontier, -1)
        count = logits.shape[1]
        owners = [self.sequences[i] for i in rows for _ in range(count)]
        scores = self.vocabulary.scores(logits.flatten(0, 1))
        if self.processed:
            paths = None
            if self.prefixed:
                paths = (
                    list(self.paths.flatten(0, 1))
                    if self.paths is not None
                    else [scores.new_empty(0).long()] * len(owners)
                )
            scores = process_logits(owners, paths, scores)
        noisy = scores
        if self.keeps_probs:
            self._keep_probs(scores.view(len(rows), count, -1), rows)
        if self.probabilistic:
            noisy = self._add_noise(scores, owners, depth, count)
        width = min(width, noisy.shape[1])
        chosen = noisy.argmax(1, keepdim=True) if width == 1 else noisy.topk(width).indices
        chosen = chosen.view(len(rows), count, width)
        if not rank:
            return chosen, None
        log_probs = torch.log_softmax(scores if self.independent else noisy, dim=-1)
        return chosen, log_probs.view(len(rows), count, -1).gather(2, chosen)

    def _add_noise(self, scores: torch.Tensor, owners: list[Sequence], depth: int, count: int) -> torch.Tensor:
        positions = [len(seq.tokens) + depth - 1 for seq in owners]
        if not self.independent:
            return add_noise(scores, owners, positions, TOKEN_STREAM)
        # Independent draws: nodes at one depth may not share noise, so the node's rank joins the key.
        steps = [seq.num_steps * 4096 + i % count for i, seq in enumerate(owners)]
        return add_noise(scores, owners, positions, DRAFT_STREAM, steps)

    def _keep_probs(self, scores: torch.Tensor, rows: list[int]) -> None:
        """Record the distributions children are drawn from: index 0 for the root, then by expanded node."""
        if self.probs is None:
            size = 1 + self.shape.num_expanded(max(self.limits))
            self.probs = scores.new_zeros(len(self.sequences), size, scores.shape[2])
        end = self.num_expanded + 1
        self.probs[self.index(rows), end - scores.shape[1] : end] = torch.softmax(scores, dim=-1)

    def index(self, rows: list[int]) -> torch.Tensor:
        """Row numbers [R], to index [B, N] tensors with."""
        return torch.tensor(rows, device=self.device)

    def expand(self, rows: list[int], deeper: list[int], depth: int, tokens, parents, ancestors) -> torch.Tensor:
        """Hand the rows of `rows` that go `deeper` to the drafter; tokens and parents are [R, F] of `rows`."""
        kept = list(range(len(rows))) if len(deeper) == len(rows) else [rows.index(i) for i in deeper]
        if len(kept) < len(rows):
            index = torch.tensor(kept, device=self.device)
            tokens, parents = tokens[index], parents[index]
            self.paths = None if self.paths is None else self.paths[index]
        if self.prefixed:
            own = tokens[:, :, None]
            if self.paths is not None:
                behind = self.paths.gather(1, parents[:, :, None].expand(-1, -1, self.paths.shape[2]))
                own = torch.cat([behind, own], dim=2)
            self.paths = own
        first, self.depths = self.num_expanded, np.append(self.depths, [depth] * tokens.shape[1])
        return self.expander.expand(Level(depth, deeper, kept, tokens, parents, first, ancestors[kept], self.depths))

    def confident(self, rows: list[int], best: torch.Tensor, depth: int) -> None:
        """End the drafts of rows whose best path is not probable enough before this depth.

        Drawn tokens stay: taking back what was drawn because of what it is would change the distribution.
        """
        if self.least is None:
            return
        survival = self.log_survival() if self.log_survival is not None else None
        if survival is not None:
            best = survival.amax(1)
        for i, enough in zip(rows, (best >= self.least).tolist(), strict=True):
            if not enough:
                self.limits[i] = depth if self.keeps_probs else depth - 1


class _StaticGrowth(_Growth):
    """The same template for every row; a row with a smaller limit has its first levels only."""

    shape: TreeTemplate

    def grow(self, logits: torch.Tensor) -> Draft:
        """Draft from logits [R, 1, Vd] after each text."""
        shape = self.shape
        last = min(max(self.limits), shape.depth)
        self.limits = [min(limit, last) for limit in self.limits]
        ranked = shape.prunes or self.least is not None
        ids = torch.zeros(len(self.sequences), shape.level_ends[last - 1], dtype=torch.long, device=self.device)
        path_log_probs = ids.new_zeros(ids.shape, dtype=torch.float32) if ranked else None
        rows = [i for i, limit in enumerate(self.limits) if limit]
        num_parents = 1
        for depth, level in enumerate(shape.levels[:last], 1):
            chosen, log_probs = self.choose(logits, rows, depth, num_parents, level.width, ranked)
            tokens = self._of_level(chosen, level)
            at = self.at(rows)
            ids[at, level.nodes] = tokens
            if path_log_probs is not None and log_probs is not None:
                added = self._of_level(log_probs, level)
                if depth > 1:
                    added = added + path_log_probs[at][:, level.parents.to(self.device)]
                path_log_probs[at, level.nodes] = added
                self.confident(rows, added.amax(1), depth)
            deeper = [i for i in rows if self.limits[i] > depth]
            if not deeper:
                break
            if len(level.inner) < tokens.shape[1]:
                tokens = tokens[:, level.inner.to(self.device)]
            parents = level.inner_slots.to(self.device).expand(len(rows), -1)
            ancestors = np.broadcast_to(level.inner_ancestors, (len(rows), *level.inner_ancestors.shape))
            logits = self.expand(rows, deeper, depth, tokens, parents, ancestors)
            rows, num_parents = deeper, len(level.inner)
        return self._trees(ids, path_log_probs)

    def at(self, rows: list[int]) -> slice | torch.Tensor:
        """As `index`, cheaper where it is all rows."""
        return slice(None) if len(rows) == len(self.sequences) else self.index(rows)

    def _of_level(self, children: torch.Tensor, level: TemplateLevel) -> torch.Tensor:
        """What belongs to a level's M nodes [R, M], of their parents' children [R, P or 1, width]."""
        if level.is_single:
            return children[:, 0]
        slots = level.slots if children.shape[1] > 1 else torch.zeros_like(level.slots)
        return children[:, slots.to(self.device), level.ranks.to(self.device)]

    def _trees(self, ids: torch.Tensor, path_log_probs: torch.Tensor | None) -> Draft:
        shape, batch, count = self.shape, ids.shape[0], ids.shape[1]
        lengths = [shape.level_ends[limit - 1] if limit else 0 for limit in self.limits]
        order = shape.expanded[: self.num_expanded]
        place = np.full(count, -1, dtype=np.int64)
        place[order] = np.arange(len(order))
        expanded = np.where(shape.depths[None, :count] < np.asarray(self.limits)[:, None], place, -1)
        parents = np.tile(shape.parents[:count], (batch, 1))
        if path_log_probs is not None and shape.keep_paths is not None:
            return _compacted(ids, parents, self._best_paths(path_log_probs), expanded)
        if shape.is_chain:
            return Draft(DraftTrees(ids, lengths, None, self.probs), expanded)
        index = None if self.probs is None else np.where(parents < 0, 0, place[parents] + 1)
        return Draft(DraftTrees(ids, lengths, parents, self.probs, index), expanded)

    def _best_paths(self, path_log_probs: torch.Tensor) -> torch.Tensor:
        """bool [B, N]: the nodes on the paths to each row's best leaves."""
        count = path_log_probs.shape[1]
        depths = torch.from_numpy(self.shape.depths[:count]).to(self.device)
        limits = torch.tensor(self.limits, device=self.device)
        leaves = path_log_probs.masked_fill(depths[None] != limits[:, None], float("-inf"))
        best = leaves.topk(min(self.shape.keep_paths or count, count), dim=1)
        chosen = torch.zeros_like(leaves).scatter_(1, best.indices, (best.values > float("-inf")).to(leaves.dtype))
        ancestors = torch.from_numpy(self.shape.ancestors[:count, :count]).to(self.device, leaves.dtype)
        return chosen @ ancestors > 0


class _DynamicGrowth(_Growth):
    """EAGLE-2: grow where it is likely, keep what is likeliest. Node indices are those of the pool of all nodes seen."""

    shape: DynamicTree

    def grow(self, logits: torch.Tensor) -> Draft:
        """Draft from logits [R, 1, Vd] after each text."""
        shape, batch = self.shape, len(self.sequences)
        last = min(max(self.limits), shape.depth)
        self.limits = [min(limit, last) for limit in self.limits]
        rows = [i for i, limit in enumerate(self.limits) if limit]
        tokens, log_probs = self.choose(logits, rows, 1, 1, shape.top_k, rank=True)
        assert log_probs is not None
        width = tokens.shape[2]  # top_k, or the vocabulary if that is smaller
        size = width + (last - 1) * width * width
        pool = torch.zeros(batch, size, dtype=torch.long, device=self.device)
        values = torch.full((batch, size), float("-inf"), device=self.device)
        parents = torch.full_like(pool, -1)
        expanded = torch.full_like(pool, -1)
        index = self.index(rows)
        pool[index, :width], values[index, :width] = tokens[:, 0], log_probs[:, 0]
        frontier = torch.arange(width, device=self.device).expand(len(rows), -1)
        frontier_values, parent = log_probs[:, 0], torch.zeros_like(frontier)
        ancestors = np.zeros((len(rows), width, 0), dtype=bool)
        self._end_unlikely(rows, frontier_values, 1, values, slice(0, width))
        for depth in range(2, last + 1):
            deeper = [i for i in rows if self.limits[i] >= depth]
            if not deeper:
                break
            ancestors = _with_children(ancestors, parent.cpu().numpy(), self.num_expanded)
            first = self.num_expanded
            logits = self.expand(rows, deeper, depth - 1, pool[index[:, None], frontier], parent, ancestors)
            if len(deeper) < len(rows):
                kept = [rows.index(i) for i in deeper]
                rows, index = deeper, self.index(deeper)
                frontier, frontier_values, ancestors = frontier[kept], frontier_values[kept], ancestors[kept]
            expanded[index[:, None], frontier] = first + torch.arange(width, device=self.device)
            tokens, log_probs = self.choose(logits, rows, depth, width, shape.top_k, rank=True)
            assert log_probs is not None
            children = (frontier_values[:, :, None] + log_probs).flatten(1)  # [R, width * width]
            start = width + (depth - 2) * width * width
            new = slice(start, start + width * width)
            pool[index, new] = tokens.expand(-1, width, -1).flatten(1)
            values[index, new] = children
            parents[index, new] = frontier.repeat_interleave(width, dim=1)
            best = children.topk(width, dim=1)
            frontier, frontier_values, parent = start + best.indices, best.values, best.indices // width
            self._end_unlikely(rows, frontier_values, depth, values, new)
        keep = _likeliest(values, shape.total_tokens - 1)
        return _compacted(pool, parents.cpu().numpy(), keep, expanded.cpu().numpy())

    def _end_unlikely(self, rows: list[int], frontier_values: torch.Tensor, depth: int, values, new: slice) -> None:
        self.confident(rows, frontier_values.amax(1), depth)
        ended = [i for i in rows if self.limits[i] < depth]
        if ended:
            values[self.index(ended), new] = float("-inf")


def _with_children(ancestors: np.ndarray, parent: np.ndarray, num_before: int) -> np.ndarray:
    """bool [R, F, E + F]: paths of F new nodes, whose parents are given among the F nodes that `ancestors` describes."""
    rows, width = parent.shape
    out = np.zeros((rows, width, num_before + width), dtype=bool)
    out[:, :, : ancestors.shape[2]] = np.take_along_axis(ancestors, parent[:, :, None], axis=1)
    out[:, :, num_before:] = np.eye(width, dtype=bool)
    return out


def _likeliest(values: torch.Tensor, count: int) -> torch.Tensor:
    """bool [B, P]: the `count` nodes with the greatest values. Equals keep their order, so parents (which are at least as
    likely as their children and stand before them) are never left out."""
    order = values.sort(dim=1, descending=True, stable=True).indices[:, :count]
    keep = torch.zeros_like(values, dtype=torch.bool).scatter_(1, order, True)
    return keep & (values > float("-inf"))


def _compacted(ids: torch.Tensor, parents: np.ndarray, keep: torch.Tensor, expanded: np.ndarray) -> Draft:
    """Trees of the nodes of `keep` [B, P], in their order; kept nodes' parents are kept."""
    kept = keep.cpu().numpy()
    lengths = kept.sum(1)
    width = int(lengths.max(initial=0))
    order = np.argsort(~kept, axis=1, kind="stable")[:, :width]  # kept ones first, in order
    place = np.cumsum(kept, axis=1) - 1
    own = np.take_along_axis(parents, order, axis=1)
    moved = np.where(own < 0, -1, np.take_along_axis(place, np.maximum(own, 0), axis=1))
    valid = np.arange(width) < lengths[:, None]
    moved = np.where(valid, moved, np.arange(width) - 1)
    tokens = ids.gather(1, torch.from_numpy(order).to(ids.device))
    at = np.where(valid, np.take_along_axis(expanded, order, axis=1), -1)
    return Draft(DraftTrees(tokens, lengths.tolist(), moved), at)
