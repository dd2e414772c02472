"""One depth of a draft: what a drafter is given, and how children are chosen from what it says of them."""

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
    """Nodes of one depth that the drafter is to continue: the same number F in each of R rows.

    Attributes:
        depth: of these nodes; 1 for the root's children.
        rows: which rows of the batch, ascending.
        kept: for each, where it stood among the rows of the previous level (of the root's logits at depth 1).
        tokens: int64 [R, F], ids of the target's vocabulary.
        parents: int64 [R, F], each node's parent among the F nodes of the previous level (zeros at depth 1).
        first: nodes given before these in each row: node f is the row's expanded node `first + f`.
        ancestors: bool [R, F, first + F], which expanded nodes are on each node's path, itself included: numpy where the
            template says it, a tensor on the device where it was found while drafting.
        depths: int64 numpy [first + F], depths of the expanded nodes, these last.
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


class Growth(ABC):
    """One round of drafting: `levels` does all that is done on the device, `draft` makes of it what the target reads.

    Args:
        sequences, limits: the batch, and how deep each row's draft may be.
        sampling: how the rows sample, in place of what the sequences say.
        probs: float32 [B, M, V], for the distributions drafts are drawn from; None: made when needed.
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
        """Draft all depths from logits [R, Vd] after each text with a limit, in their order: what `draft` takes, with a row
        per sequence of the batch."""

    @abstractmethod
    def draft(self, *tensors: torch.Tensor) -> Draft:
        """What was grown, cut to each row's limit; may be called with what `levels` of a growth with greater limits made."""

    @property
    def is_replayable(self) -> bool:
        """Whether `levels` is a function of tensors: no processors but sampling parameters, no draft that ends for what it is."""
        return self.least is None and self.only_sampling

    def sampling_kind(self, parameters: bool = True) -> SamplingKind:
        """What is read of how the rows sample.

        Args:
            parameters: whether temperature, top-k, top-p and min-p are applied from tensors, not by the processors.
        """
        return SamplingKind.of(self.sequences if self.processed and parameters else [], self.draws)

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
        scores = self.vocabulary.scores(logits.flatten(0, 1))
        sampling = self._sampling_on(scores.device)
        if self.edited:
            scores = self._edited(scores, rows, logits.shape[1])
        scores = scores.view(len(rows), logits.shape[1], -1)
        index = None if len(rows) == len(self.sequences) else self.index(rows, scores.device)
        width = min(width, scores.shape[2])
        shared = not self.independent  # then all nodes of a depth have the target's own noise
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
        """How the rows sample, as far as that is applied from tensors; None: not at all."""
        if not self.begun:
            self.begun = True
            self.edited = bool(self.processors) and not (is_fused(device) and self.only_sampling)
            kind = self.sampling_kind(parameters=not self.edited)
            if any(kind) and self.sampling is None:
                self.sampling = SamplingBuffers.of(self.sequences, kind, device)
        return self.sampling

    def _edited(self, scores: torch.Tensor, rows: list[int], count: int) -> torch.Tensor:
        """Scores [R F, V] as each row's own processors make them."""
        owners, paths = [self.sequences[i] for i in rows for _ in range(count)], None
        if self.prefixed:
            none = [scores.new_empty(0).long()] * len(owners)
            paths = none if self.paths is None else list(self.paths.flatten(0, 1))
        return process_logits(owners, paths, scores)

    def _keep_probs(self, scores: torch.Tensor, index: torch.Tensor | None) -> None:
        """Record the distributions [R, F, V] children are drawn from: index 0 for the root, then by expanded node."""
        if self.probs is None:
            size = 1 + self.shape.num_expanded(max(self.limits))
            self.probs = torch.zeros(len(self.sequences), size, scores.shape[2], device=scores.device)
        end = self.num_expanded + 1
        where = slice(None) if index is None else index
        self.probs[where, end - scores.shape[1] : end] = torch.softmax(scores, dim=-1, dtype=torch.float32)

    def index(self, rows: list[int], device: torch.device) -> torch.Tensor:
        """Row numbers [R], to index [B, N] tensors with; made on the device where they are all rows."""
        if len(rows) == len(self.sequences):
            return torch.arange(len(rows), device=device)
        return upload(rows, device)

    def expand(self, rows: list[int], deeper: list[int], depth: int, tokens, parents, ancestors) -> torch.Tensor:
        """Hand the rows of `rows` that go `deeper` to the drafter; tokens and parents are [R, F] of `rows`."""
        kept = list(range(len(rows))) if len(deeper) == len(rows) else [rows.index(i) for i in deeper]
        if len(kept) < len(rows):
            index = upload(kept, tokens.device)
            tokens, parents, ancestors = tokens[index], parents[index], ancestors[kept]
            self.paths = None if self.paths is None else self.paths[index]
        if self.prefixed:
            own = tokens[:, :, None]
            if self.paths is not None:
                behind = self.paths.gather(1, parents[:, :, None].expand(-1, -1, self.paths.shape[2]))
                own = torch.cat([behind, own], dim=2)
            self.paths = own
        first, self.depths = self.num_expanded, np.append(self.depths, [depth] * tokens.shape[1])
        return self.expander.expand(Level(depth, deeper, kept, tokens, parents, first, ancestors, self.depths))

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
