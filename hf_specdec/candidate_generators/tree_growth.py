"""Growing a draft tree (a chain is the case of one child per node), one depth per drafter forward, all rows together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..kernels import reference as ops
from ..kernels.random_bits import DRAFT_STREAM, TOKEN_STREAM
from ..runtime import DraftTrees, Sequence
from ..runtime.logits import add_noise, needs_prefix, process_logits
from ..runtime.packed_batch import RowInput

if TYPE_CHECKING:
    from .draft_model import DraftModelGenerator


class TreeGrowth:
    """One round of drafting.

    All rows have the same shape of tree, `widths[d]` children per node at depth d, nodes in breadth-first order; a row
    with a smaller limit has its first levels only. Children are the best tokens (greedy), or the best after Gumbel
    perturbation, which is sampling without replacement; with the loop's own noise (coupled) they are what the target
    would pick if it agreed with the drafter.
    """

    def __init__(
        self, generator: DraftModelGenerator, sequences: list[Sequence], text_lengths: list[int], limits: list[int]
    ):
        self.generator, self.sequences, self.text_lengths, self.limits = generator, sequences, text_lengths, limits
        config = generator.config
        self.widths = config.widths[: max(limits)]
        self.level_ends = np.cumsum(np.cumprod(self.widths)).tolist()  # nodes in the first 1, 2, .. levels
        self.parents = _breadth_first_parents(self.widths)
        self.is_chain = max(self.widths) == 1
        if not self.is_chain:
            self.ancestors = ops.ancestor_matrix(torch.from_numpy(self.parents)[None])[0, 1:, 1:].numpy()
        self.depths = np.repeat(np.arange(1, len(self.widths) + 1), np.cumprod(self.widths))
        self.tokens = torch.zeros(len(sequences), self.level_ends[-1], dtype=torch.long, device=generator.target.device)
        self.num_forwarded = [0] * len(sequences)
        self.probabilistic = config.draft_sample_method != "greedy"
        self.independent = config.rejection_sample_method == "rejection"
        if not generator.bridge.in_target_vocabulary:  # processors and noise speak of the target's tokens
            self.probabilistic = False
        self.processed = generator.bridge.in_target_vocabulary
        self.prefixed = self.processed and needs_prefix(sequences)
        self.probs: torch.Tensor | None = None

    def grow(self, logits: torch.Tensor) -> DraftTrees:
        """Draft from the drafter's logits [active rows, V] after each text."""
        for depth in range(len(self.widths)):
            self._add_level(logits, depth)
            if depth + 1 < len(self.widths):
                logits = self._forward_level(depth)
        lengths = [self.level_ends[limit - 1] if limit else 0 for limit in self.limits]
        shape = (len(lengths), 1)
        if self.is_chain:
            return DraftTrees(self.tokens, lengths, None, self.probs)
        index = np.tile(self.parents + 1, shape)
        return DraftTrees(self.tokens, lengths, np.tile(self.parents, shape), self.probs, index)

    def _add_level(self, logits: torch.Tensor, depth: int) -> None:
        """Choose the nodes of one depth from logits [active rows × frontier, V], rows outermost."""
        active = [i for i, limit in enumerate(self.limits) if limit > depth]
        first = self.level_ends[depth - 1] if depth else 0
        frontier = list(range(self.level_ends[depth - 2] if depth > 1 else 0, first)) if depth else [-1]
        nodes_of = [self.sequences[i] for i in active for _ in frontier]
        scores = self.generator.bridge.scores(logits)
        if self.processed:
            paths = [self._path(i, node) for i in active for node in frontier] if self.prefixed else None
            scores = process_logits(nodes_of, paths, scores)
        rows = torch.tensor(active, device=self.tokens.device)
        if self.independent and self.probabilistic and any(seq.do_sample for seq in self.sequences):
            self._keep_probs(scores, rows, frontier)
        if self.probabilistic:
            positions = [len(self.sequences[i].tokens) + depth for i in active for _ in frontier]
            stream = DRAFT_STREAM if self.independent else TOKEN_STREAM
            steps = [seq.num_steps for seq in nodes_of] if self.independent else None
            scores = self._noisy(scores, nodes_of, positions, stream, steps, depth)
        width = self.widths[depth]
        children = scores.argmax(1, keepdim=True) if width == 1 else scores.topk(width).indices
        self.tokens[rows, first : self.level_ends[depth]] = children.view(len(active), -1).to(self.tokens.device)

    def _noisy(self, scores, nodes_of, positions, stream, steps, depth):
        if stream == TOKEN_STREAM or depth == 0:
            return add_noise(scores, nodes_of, positions, stream, steps)
        # Independent draws: nodes at one depth may not share noise, so the node's rank joins the key.
        frontier = len(nodes_of) // max(1, len({id(seq) for seq in nodes_of}))
        ranked = [step * 4096 + i % frontier for i, step in enumerate(steps)]
        return add_noise(scores, nodes_of, positions, stream, ranked)

    def _keep_probs(self, scores: torch.Tensor, rows: torch.Tensor, frontier: list[int]) -> None:
        """Record the distributions the level is drawn from; index node + 1, 0 for the root."""
        internal = 1 + (self.level_ends[-2] if len(self.widths) > 1 else 0)
        if self.probs is None:
            self.probs = scores.new_zeros(len(self.sequences), internal, scores.shape[1])
        level = torch.softmax(scores, dim=-1).view(len(rows), len(frontier), -1)
        self.probs[rows, frontier[0] + 1 : frontier[-1] + 2] = level

    def _path(self, row: int, node: int) -> torch.Tensor:
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = int(self.parents[node])
        return self.tokens[row, nodes[::-1]]

    def _forward_level(self, depth: int) -> torch.Tensor:
        """Run the drafter over the nodes of one depth; logits [rows going deeper × nodes, V]."""
        first, end = (self.level_ends[depth - 1] if depth else 0), self.level_ends[depth]
        ids = self.generator.bridge.drafter_ids(self.tokens[:, first:end])
        host_ids = ids.numpy() if ids.device.type == "cpu" else None
        inputs = []
        for i, limit in enumerate(self.limits):
            if limit <= depth + 1:
                continue
            length = self.text_lengths[i]
            row = RowInput(
                seq_id=self.sequences[i].id,
                tokens=host_ids[i] if host_ids is not None else ids[i],
                start=length + first,
                logits=end - first,
            )
            if not self.is_chain:
                row.positions = length - 1 + self.depths[first:end]
                row.visibility = self.ancestors[first:end, :end]
                row.region_positions = length - 1 + self.depths[:end]
            inputs.append(row)
            self.num_forwarded[i] = end
        return self.generator.drafter.forward(inputs, self.generator.cache).logits


def _breadth_first_parents(widths: list[int]) -> np.ndarray:
    parents, level = [], [-1]
    for width in widths:
        start = len(parents)
        parents += [node for node in level for _ in range(width)]
        level = list(range(start, len(parents)))
    return np.asarray(parents, dtype=np.int64)
