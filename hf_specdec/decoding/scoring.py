"""Scores of the nodes of a step's trees: their logits after each row's processors."""

from __future__ import annotations

import numpy as np
import torch

from ..config import SpeculativeConfig
from ..core.draft_trees import DraftTrees
from ..core.sequence import Sequence
from ..kernels.transfer import upload
from ..sampling.logits import needs_prefix, process_logits
from ..sampling.parameters import FusedSampling, fused_sampling, fuses_sampling


def node_scores(
    sequences: list[Sequence],
    trees: DraftTrees,
    logits: torch.Tensor,
    config: SpeculativeConfig,
    failed: set[int] | None = None,
) -> tuple[torch.Tensor, FusedSampling | None]:
    """Logits [R, V] of every root and node after its row's processors, which see the node's own prefix; and the sampling parameters
    that the verification kernels apply themselves (None: they are applied already).

    Args:
        failed: receives the rows of nodes that have no scores, because code of the user's raised for their prefix.
    """
    if all(seq.processors is None for seq in sequences):
        return logits, None
    owners = [seq for seq, count in zip(sequences, trees.lengths, strict=True) for _ in range(count + 1)]
    paths = _drafted_paths(trees) if needs_prefix(sequences) else None
    if not fuses_sampling(sequences, config, logits.device):
        return process_logits(owners, paths, logits, drafted=any(trees.lengths), failed=failed), None
    scores = process_logits(owners, paths, logits, whole=False, drafted=any(trees.lengths), failed=failed)
    return scores, fused_sampling(trees, scores, sequences)


def _drafted_paths(trees: DraftTrees) -> list[torch.Tensor]:
    """For each row's root and each of its nodes, the drafted ids on the path from the row's text to it."""
    paths = []
    for i, count in enumerate(trees.lengths):
        paths.append(trees.tokens[i, :0])
        for node in range(count):
            nodes = np.flatnonzero(trees.ancestors[i, node + 1, 1:]) if not trees.is_chain else np.arange(node + 1)
            paths.append(trees.tokens[i, upload(nodes, trees.tokens.device)])
    return paths
