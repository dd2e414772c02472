"""One depth of a draft: the nodes a drafter expands, and how their children are chosen from its logits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ...core.draft_trees import DraftTrees
from ...core.sequence import Sequence
from ...kernels.random_bits import DRAFT_STREAM, TOKEN_STREAM
from ...kernels.sampling import is_fused
from ...kernels.transfer import upload
from ...sampling.buffers import SamplingBuffers
from ...sampling.logits import needs_prefix, process_logits
from ...sampling.parameters import SamplingKind


@dataclass
class Level:
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

    @property
    def host_ancestors(self) -> np.ndarray:
        """`ancestors`, on the host."""
        return self.ancestors.cpu().numpy() if isinstance(self.ancestors, torch.Tensor) else self.ancestors


class Vocabulary(Protocol):
    """How a drafter's logits become scores of the target's tokens."""

    in_target_vocabulary: bool  # if False, processors and noise, which refer to the target's tokens, are not applied

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores [R, V] from the drafter's logits [R, Vd]; tokens the drafter does not have get minus infinity."""
        ...


class NodeExpander(Protocol):
    """A drafter, as growth uses it.

    A drafter that estimates acceptance also has `log_survival() -> [R, F] or None`: for each node of the last logits, the
    log-probability that its path and its next token are accepted. `draft_confidence_threshold` is then compared with that
    instead of the drafted tokens' own probabilities.
    """

    vocabulary: Vocabulary

    def expand(self, level: Level) -> torch.Tensor:
        """Logits [R, F, Vd] of the token after each node; [R, 1, Vd] if all nodes of a row share them."""
        ...


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
        sequences, limits: the batch, and how deep each row's draft may be.
        sampling: sampling parameters as tensors; None: taken from the sequences.
        probs: float32 [B, M, V] buffer for the distributions drafts are drawn from; None: allocated when needed.
    """

    def __init__(
        self,
        expander: NodeExpander,
        config,
        shape,
        sequences: list[Sequence],
        limits: list[int],
        sampling: SamplingBuffers | None = None,
        probs: torch.Tensor | None = None,
    ):
        self.expander, self.shape, self.sequences = expander, shape, sequences
        self.vocabulary = expander.vocabulary
        self.log_survival = getattr(expander, "log_survival", None)
        self.last = min(max(limits), shape.depth)
        self.limits = [min(limit, self.last) for limit in limits]
        self.independent = config.verifies_by_draft_probs
        self.processed = self.vocabulary.in_target_vocabulary
        draws = config.draft_sample_method != "greedy" and self.processed and not (self.independent and shape.prunes)
        self.sampling, self.probs = sampling, probs
        self.draws = draws and (sampling.kind.noise if sampling else any(seq.do_sample for seq in sequences))
        self.keeps_probs = self.independent and self.draws
        self.processors = [seq.processors for seq in sequences if seq.processors is not None] if self.processed else []
        self.only_sampling = all(each.only_sampling for each in self.processors)
        self.edited, self.begun = False, False  # see _sampling_on
        self.prefixed = self.processed and needs_prefix(sequences)
        threshold = config.draft_confidence_threshold
        self.least = math.log(threshold) if threshold else None
        self.depths = np.zeros(0, dtype=np.int64)  # of the expanded nodes
        self.paths: torch.Tensor | None = (
            None  # int64 [R, F, depth] ids on the frontier's paths, if processors need them
        )

    @abstractmethod
    def levels(self, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Draft all depths, from the logits [R, Vd] after each text with a limit. Returns the arguments of `draft`, which have a
        row for every sequence of the batch."""

    @abstractmethod
    def draft(self, *tensors: torch.Tensor) -> Draft:
        """The draft, cut to each row's limit. The tensors may come from a growth with greater limits."""

    @property
    def is_replayable(self) -> bool:
        """Whether `levels` depends on tensors only: no processors besides sampling parameters, no confidence threshold."""
        return self.least is None and self.only_sampling

    def sampling_kind(self, parameters: bool = True) -> SamplingKind:
        """Which sampling tensors the round needs.

        Args:
            parameters: apply temperature, top-k, top-p and min-p from tensors, not through the processors.
        """
        return SamplingKind.of(self.sequences if self.processed and parameters else [], self.draws)

    @property
    def num_expanded(self) -> int:
        """Nodes per row that the drafter has expanded."""
        return len(self.depths)

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
        if sampling is not None and self.draws and shared and width == 1 and not rank:
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
            self.edited = bool(self.processors) and not (is_fused(device) and self.only_sampling)
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
            size = 1 + self.shape.num_expanded(max(self.limits))
            self.probs = torch.zeros(len(self.sequences), size, scores.shape[2], device=scores.device)
        end = self.num_expanded + 1
        where = slice(None) if index is None else index
        self.probs[where, end - scores.shape[1] : end] = torch.softmax(scores, dim=-1, dtype=torch.float32)

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
            own = tokens[:, :, None]
            if self.paths is not None:
                above = self.paths.gather(1, parents[:, :, None].expand(-1, -1, self.paths.shape[2]))
                own = torch.cat([above, own], dim=2)
            self.paths = own
        first, self.depths = self.num_expanded, np.append(self.depths, [depth] * tokens.shape[1])
        return self.expander.expand(Level(depth, deeper, kept, tokens, parents, first, ancestors, self.depths))

    def confident(self, rows: list[int], best: torch.Tensor, depth: int) -> None:
        """End the drafts of rows whose best path is less probable than the threshold, before this depth.

        Tokens that were sampled stay: to drop them because of their value would change the distribution.
        """
        if self.least is None:
            return
        survival = self.log_survival() if self.log_survival is not None else None
        if survival is not None:
            best = survival.amax(1)
        for i, enough in zip(rows, (best >= self.least).tolist(), strict=True):
            if not enough:
                self.limits[i] = depth if self.keeps_probs else depth - 1
