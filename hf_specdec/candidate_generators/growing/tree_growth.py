"""Growing drafts depth by depth, all rows together: chains, static trees and dynamic trees."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...core.draft_trees import DraftTrees
from ...core.sequence import Sequence
from ...kernels import drafting
from ...kernels.random_bits import DRAFT_STREAM, TOKEN_STREAM
from ...kernels.sampling import is_fused
from ...kernels.transfer import upload
from ...model.native import DraftRound
from ...sampling.logits import needs_prefix, process_logits
from ...sampling.parameters import SamplingBuffers, SamplingKind
from .tree_shapes import DynamicTree, TreeTemplate


@dataclass
class DraftLevel:
    """The nodes of one depth that the drafter expands: F in each of R rows.

    Attributes:
        depth: of these nodes; 1 for the root's children.
        rows: which rows of the batch, ascending.
        kept: each row's index among the rows of the previous level (of the root logits at depth 1).
        tokens: int64 [R, F], ids of the target's vocabulary.
        parents: int64 [R, F], each node's parent among the F nodes of the previous level (zeros at depth 1).
        first: nodes expanded before these in each row: node f is the row's expanded node `first + f`.
        ancestors: bool [R, F, first + F], which expanded nodes are on each node's path, itself included: numpy for
            templates, a tensor on the device for dynamic trees.
        depths: int64 numpy [first + F], depths of all expanded nodes, these nodes last.
    """

    depth: int
    rows: list[int]
    kept: list[int]
    tokens: torch.Tensor
    parents: torch.Tensor
    first: int
    ancestors: np.ndarray | torch.Tensor
    depths: np.ndarray

    def keep(self, values: torch.Tensor) -> torch.Tensor:
        """The values [R, ..] of these rows, from those of all rows of the previous level."""
        if len(self.kept) == len(values):
            return values
        return values.index_select(0, upload(self.kept, values.device))


class AllDepths:
    """Logits of all depths of a round, which one forward has made: all nodes of one depth share them.

    Args:
        logits: [sum of limits, Vd], each row's depths one after the other.
    """

    def __init__(self, logits: torch.Tensor, limits: list[int]):
        self.logits, self.first = logits, np.cumsum([0, *limits[:-1]])

    def at(self, level: DraftLevel | None = None) -> torch.Tensor:
        """[R, 1, Vd], of the tokens after a level's nodes; None: after the texts."""
        if level is not None and len(level.kept) < len(self.first):
            self.first = self.first[level.kept]
        index = upload(self.first + (level.depth if level is not None else 0), self.logits.device)
        return self.logits.index_select(0, index)[:, None]


@dataclass
class Draft:
    """A grown draft.

    Attributes:
        trees: B rows.
        expanded: int64 numpy [B, N], each node's index among the row's expanded nodes; -1: it was not expanded.
    """

    trees: DraftTrees
    expanded: np.ndarray


class Growth(ABC):
    """One round of drafting: `levels` does the work on the device, `draft` turns its tensors into trees.

    Args:
        drafter: its `config` and `shape` say how to grow; its `expand` is called for each depth.
        sequences, limits: the batch, and how deep each row's draft may be.
        sampling: sampling parameters as tensors; None: taken from the sequences.
        probs: float32 [B, M, V] buffer for the distributions drafts are drawn from; None: allocated when needed.
    """

    def __init__(
        self, drafter: Any, sequences: list[Sequence], limits: list[int], sampling: SamplingBuffers | None = None,
        probs: torch.Tensor | None = None,
    ):  # fmt: skip
        self.drafter, self.sequences, self.vocabulary = drafter, sequences, drafter.vocabulary
        config, shape = drafter.config, drafter.shape
        self.shape = shape
        self.last = min(max(limits), shape.depth)
        self.limits = [min(limit, self.last) for limit in limits]
        self.independent = config.verifies_by_draft_probs
        self.processed = self.vocabulary.in_target_vocabulary
        draws = config.draft_sample_method != "greedy" and self.processed and not (self.independent and shape.prunes)
        self.sampling, self.probs = sampling, probs
        self.draws = draws and (sampling.kind.noise if sampling else any(seq.do_sample for seq in sequences))
        self.keeps_probs = self.independent and self.draws
        self.processors = [seq.processors for seq in sequences if seq.processors is not None] if self.processed else []
        self.only_sampling = all(processors.only_sampling for processors in self.processors)
        self.edited, self.begun = False, False  # see _sampling_on
        self.prefixed = self.processed and needs_prefix(sequences)
        threshold = config.draft_confidence_threshold
        self.least = math.log(threshold) if threshold else None
        self.depths = np.zeros(0, dtype=np.int64)  # of the expanded nodes
        # int64 [R, F, depth] ids on the frontier's paths, if processors need them
        self.paths: torch.Tensor | None = None

    @abstractmethod
    def levels(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Draft all depths, from the logits [R, Vd] after each text with a limit. Returns the arguments of `draft`, which have a
        row for every sequence of the batch."""

    @abstractmethod
    def draft(self, *tensors: torch.Tensor) -> Draft:
        """The draft, cut to each row's limit. The tensors may come from a growth with greater limits."""

    def at_once(
        self, logits: torch.Tensor, rows: list[int], ranked: bool, keep: int = 0, most: int = 0
    ) -> DraftRound | None:
        """All depths as one call of the native library; None: they are made one after the other.

        Args:
            logits: [R, Vd], after the texts of `rows`.
            ranked: paths are chosen by their probability.
            keep, most: see `DraftRound`.
        """
        if self.last == 1 or not self.only_sampling:
            return None

        def made() -> DraftRound:
            kind, batch = self.sampling_kind(), len(self.sequences)
            if any(kind):
                self.sampling = SamplingBuffers.of(self.sequences, kind, logits.device)
            if self.keeps_probs:
                self.probs = self._new_probs(self.vocabulary.vocab_size)
            nodes = self.shape.nodes[: np.searchsorted(self.shape.nodes[:, 0], self.last, side="right")]
            above = torch.full((2, batch, len(nodes)), -1) if keep else (None, None)
            return DraftRound(
                nodes, keep, most, self.shape.widest, -math.inf if self.least is None else self.least,
                torch.tensor(rows), torch.tensor([self.limits[i] for i in rows]), self.sampling and self.sampling.parameters,
                torch.zeros(batch, dtype=torch.long), torch.zeros(batch, len(nodes), dtype=torch.long),
                torch.full((batch, len(nodes)), -math.inf) if ranked else None, above[0], above[1], self.probs,
            )  # fmt: skip

        out = self.drafter.at_once(rows, logits, made)
        if out is not None and self.least is not None:
            for i, limit in zip(rows, out.limits.tolist(), strict=True):
                self.limits[i] = limit
        return out

    def sampling_kind(self, parameters: bool = True) -> SamplingKind:
        """Which sampling tensors the round needs.

        Args:
            parameters: apply temperature, top-k, top-p and min-p from tensors, not through the processors.
        """
        return SamplingKind.of(self.sequences if self.processed and parameters else [], self.draws)

    def choose(self, logits: torch.Tensor, rows: list[int], depth: int, frontier: int, width: int, rank: bool):
        """The `width` best children of every frontier node: ids [R, F, width] and, if `rank`, their log-probabilities.

        F is 1 if all nodes of a row share their children.
        """
        if logits.shape[1] < frontier and (self.prefixed or self.keeps_probs):
            logits = logits.expand(-1, frontier, -1)
        scores = self.vocabulary.scores(logits.flatten(0, 1))
        sampling = self._sampling_on(scores.device)
        if self.edited:
            scores = self._edited(scores, rows, logits.shape[1])
        scores = scores.view(len(rows), logits.shape[1], -1)
        index = None if len(rows) == len(self.sequences) else self.index(rows, scores.device)
        width = min(width, scores.shape[2])
        shared = not self.independent  # coupled: all nodes of a depth use the target's own noise
        if sampling is not None and not self.keeps_probs and width == 1 and not rank:
            return sampling.choices(scores, depth - 1, index)[:, :, None], None
        if sampling is not None and not (self.draws and shared):
            scores = sampling.scores(scores, index)
        if self.keeps_probs:
            self._keep_probs(scores, index)
        noisy = scores
        if sampling is not None and self.draws:
            noisy = sampling.noisy(
                scores, depth - 1, TOKEN_STREAM if shared else DRAFT_STREAM, shared, index, not shared
            )
        chosen = noisy.argmax(2, keepdim=True) if width == 1 else noisy.topk(width).indices
        if not rank:
            return chosen, None
        return chosen, torch.log_softmax(noisy if shared else scores, dim=-1).gather(2, chosen)

    def _sampling_on(self, device: torch.device) -> SamplingBuffers | None:
        """The sampling tensors on the device; None if nothing is sampled from tensors."""
        if not self.begun:
            self.begun = True
            chooses = self.shape.is_chain and not self.keeps_probs and self.least is None
            self.edited = bool(self.processors) and not (self.only_sampling and is_fused(device, chooses))
            kind = self.sampling_kind(parameters=not self.edited)
            if any(kind) and self.sampling is None:
                self.sampling = SamplingBuffers.of(self.sequences, kind, device)
        return self.sampling

    def _edited(self, scores: torch.Tensor, rows: list[int], count: int) -> torch.Tensor:
        """Scores [R F, V] after each row's own processors."""
        owners, paths = [self.sequences[i] for i in rows for _ in range(count)], None
        if self.prefixed:
            none = [scores.new_empty(0).long()] * len(owners)
            paths = none if self.paths is None else list(self.paths.flatten(0, 1))
        return process_logits(owners, paths, scores)

    def _keep_probs(self, scores: torch.Tensor, index: torch.Tensor | None) -> None:
        """Record the distributions [R, F, V] that children are drawn from: index 0 for the root, then by expanded node."""
        if self.probs is None:
            self.probs = self._new_probs(scores.shape[2]).to(scores.device)
        end = len(self.depths) + 1
        where = slice(None) if index is None else index
        self.probs[where, end - scores.shape[1] : end] = torch.softmax(scores, dim=-1, dtype=torch.float32)

    def _new_probs(self, vocab_size: int) -> torch.Tensor:
        return torch.zeros(len(self.sequences), 1 + self.shape.num_expanded(max(self.limits)), vocab_size)

    def index(self, rows: list[int], device: torch.device) -> torch.Tensor:
        """Row numbers [R], to index [B, N] tensors with; no upload if all rows are meant."""
        if len(rows) == len(self.sequences):
            return torch.arange(len(rows), device=device)
        return upload(rows, device)

    def expand(self, rows: list[int], deeper: list[int], depth: int, tokens, parents, ancestors) -> torch.Tensor:
        """Let the drafter expand the rows `deeper`, a part of `rows`; tokens and parents [R, F] are those of `rows`."""
        kept = list(range(len(rows))) if len(deeper) == len(rows) else [rows.index(i) for i in deeper]
        if len(kept) < len(rows):
            index = upload(kept, tokens.device)
            tokens, parents, ancestors = tokens[index], parents[index], ancestors[kept]
            self.paths = None if self.paths is None else self.paths[index]
        if self.prefixed:
            paths = tokens[:, :, None]
            if self.paths is not None:
                above = self.paths.gather(1, parents[:, :, None].expand(-1, -1, self.paths.shape[2]))
                paths = torch.cat([above, paths], dim=2)
            self.paths = paths
        first, self.depths = len(self.depths), np.append(self.depths, [depth] * tokens.shape[1])
        return self.drafter.expand(DraftLevel(depth, deeper, kept, tokens, parents, first, ancestors, self.depths))

    def confident(self, rows: list[int], best: torch.Tensor, depth: int) -> None:
        """End the drafts of rows whose best path is less probable than the threshold, before this depth.

        Tokens that were sampled stay: to drop them because of their value would change the distribution.
        """
        if self.least is None:
            return
        survival = self.drafter.survival
        if survival is not None:
            best = survival.amax(1)
        for i, enough in zip(rows, (best >= self.least).tolist(), strict=True):
            if not enough:
                self.limits[i] = depth if self.keeps_probs else depth - 1


class StaticGrowth(Growth):
    """Growth of one template for every row; a row with a smaller limit gets its first levels only."""

    shape: TreeTemplate

    def levels(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Ids int64 [B, N] and, if paths are chosen by probability, log-probabilities float32 [B, N] of the paths to them."""
        shape, device, batch = self.shape, logits.device, len(self.sequences)
        ranked = shape.prunes or self.least is not None
        rows = [i for i, limit in enumerate(self.limits) if limit]
        made = self.at_once(logits, rows, ranked)
        if made is not None:
            return (made.tokens,) if made.values is None else (made.tokens, made.values)
        ids = torch.zeros(batch, shape.level_ends[self.last - 1], dtype=torch.long, device=device)
        path_log_probs = ids.new_zeros(ids.shape, dtype=torch.float32) if ranked else None
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
        ids, *path_log_probs = (tensor[:, :count] for tensor in tensors)
        if shape.is_chain:
            nodes = np.arange(count)
            expanded = np.where(nodes + 1 < np.asarray(self.limits)[:, None], nodes, -1)
            return Draft(DraftTrees(ids, list(self.limits), None, self.probs), expanded)
        lengths = [shape.level_ends[limit - 1] if limit else 0 for limit in self.limits]
        place = np.full(count, -1, dtype=np.int64)
        order = shape.expanded[shape.expanded < count]
        place[order] = np.arange(len(order))
        expanded = np.where(shape.depths[None, :count] < np.asarray(self.limits)[:, None], place, -1)
        parents = np.tile(shape.parents[:count], (len(lengths), 1))
        if shape.keep_paths is not None:
            above, at = (upload(tensor, ids.device) for tensor in (parents, expanded))
            best = self._best_paths(path_log_probs[0])
            kept = drafting.keep_nodes(ids, above, at, best, count)
            return _pruned((*kept[:3], kept[4]), self.limits)
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
        """The kept nodes' tokens, parents and `expanded`, [B, count] each, and their numbers [B]."""
        rows, most = [i for i, limit in enumerate(self.limits) if limit], self.shape.total_tokens - 1
        made: Any = self.at_once(logits, rows, ranked=True, keep=self.shape.top_k, most=most)
        if made is not None:
            return made.tokens[:, :most], made.parents[:, :most], made.expanded[:, :most], made.lengths
        return self._level_by_level(logits, rows)

    def _level_by_level(self, logits: torch.Tensor, rows: list[int]) -> tuple[torch.Tensor, ...]:
        shape, batch, device = self.shape, len(self.sequences), logits.device
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
            first = len(self.depths)
            ancestors = _with_children(ancestors, parent)
            logits = self.expand(rows, deeper, depth - 1, frontier_tokens, parent, ancestors)
            if len(deeper) < len(rows):
                kept = upload([rows.index(i) for i in deeper], device)
                rows, index = deeper, self.index(deeper, device)
                frontier, frontier_values, ancestors = frontier[kept], frontier_values[kept], ancestors[kept]
            expanded[index[:, None], frontier] = first + nodes
            tokens, log_probs = self.choose(logits, rows, depth, width, shape.top_k, rank=True)
            assert log_probs is not None
            tokens, log_probs = (tensor.expand(-1, width, -1).contiguous() for tensor in (tokens, log_probs))
            start = width + (depth - 2) * width * width
            new = slice(start, start + width * width)
            children, frontier_values, best, frontier_tokens, parent = drafting.next_frontier(
                frontier_values.contiguous(), tokens, log_probs, width, self.device_limits, depth
            )
            pool[index, new], values[index, new] = tokens.flatten(1), children
            parents[index, new] = frontier.repeat_interleave(width, dim=1)
            frontier = start + best
            self._end_unlikely(rows, frontier_values, depth, values, new)
        pruned = drafting.prune_tree(pool, values, parents, expanded, min(shape.total_tokens - 1, size))
        return *pruned[:3], pruned[4]

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


def growth_of(drafter: Any, sequences: list[Sequence], limits: list[int], *captured: Any) -> Growth:
    """A new round of drafting.

    Children are the most likely tokens (greedy), or the best after Gumbel perturbation, which is sampling without replacement;
    with the target's own noise (coupled) they are the tokens the target would choose if it agreed with the drafter. Trees that
    choose nodes by probability are deterministic under the rule "rejection": each draft is a point distribution (EAGLE-2).

    Args:
        sequences, limits: the batch, and how deep each row's draft may be (0: no draft).
        captured: `sampling` and `probs` of `Growth`.
    """
    growth = DynamicGrowth if isinstance(drafter.shape, DynamicTree) else StaticGrowth
    return growth(drafter, sequences, limits, *captured)


def _with_children(ancestors: torch.Tensor, parent: torch.Tensor) -> torch.Tensor:
    """bool [R, F, E + F]: the ancestors of F new nodes below `parent` [R, F], nodes whose paths are `ancestors` [R, F, E]."""
    rows, width, before = ancestors.shape
    themselves = torch.eye(width, dtype=torch.bool, device=parent.device).expand(rows, -1, -1)
    return torch.cat([ancestors.gather(1, parent[:, :, None].expand(-1, -1, before)), themselves], dim=2)


def _pruned(kept: Iterable[torch.Tensor], limits: list[int]) -> Draft:
    """Trees from tokens, parents and `expanded` of all rows, and their lengths; rows without a limit get no nodes."""
    tokens, parents, expanded, lengths = kept
    host = torch.cat([lengths[:, None], parents, expanded], dim=1).cpu().numpy()
    counts = np.where(np.asarray(limits) > 0, host[:, 0], 0)
    width = int(counts.max(initial=0))
    parents, expanded = host[:, 1:].reshape(len(host), 2, -1)[:, :, :width].swapaxes(0, 1)
    return Draft(DraftTrees(tokens[:, :width], counts.tolist(), np.ascontiguousarray(parents)), expanded)
