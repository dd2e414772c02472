"""P-EAGLE: EAGLE-3's network, trained so that one forward drafts all depths."""

from __future__ import annotations

import numpy as np
import torch

from ...core.output import PackedOutput
from ...core.sequence import Sequence
from ...kernels.transfer import upload
from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..growing.levels import Level
from .base import Eagle3Base
from .checkpoint import LoadedEagle3
from .config import Eagle3Config


class PEagleGenerator(Eagle3Base):
    """Drafts with a P-EAGLE head. The method is `eagle3`: its generator chooses this class for such heads.

    After each text the head reads one row for every further depth: the mask token's embedding, with the head's `mask_hidden`
    in place of features. Row d predicts what EAGLE-3 would after d drafted tokens, whatever they are, so all nodes of one
    depth share it. The next text overwrites the keys and values of these rows.
    """

    has_loop = False  # one forward has drafted all depths before any token is chosen

    def __init__(
        self,
        config: Eagle3Config,
        target: PackedModel,
        context: DrafterContext | None,
        loaded: LoadedEagle3,
        default_length: int | None,
    ):
        super().__init__(config, target, context, loaded, default_length)
        if config.parallel_drafting is False:
            raise config.fail("parallel_drafting", "is False, but this head drafts all depths at once: leave it out.")
        assert loaded.mask_features is not None and loaded.options.mask_token is not None
        self.mask_features, self.mask_token = loaded.mask_features, loaded.options.mask_token
        self.limits: dict[int, int] = {}  # per sequence of the current round, its draft length
        self.first_logits: dict[int, int] = {}  # where each sequence's logits begin in `parallel_logits`
        self.parallel_logits: torch.Tensor | None = None  # [sum of limits, Vd]

    def features(self, output: PackedOutput, index: torch.Tensor) -> torch.Tensor:
        """The target's hidden states, joined and projected to the head's width: [n, H]."""
        with torch.no_grad():
            return self.loaded.module.fuse(self.loaded.joined_states(output, index))

    def ready(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """As in the base; also keeps the limits."""
        limits = super().ready(sequences, limits)
        self.limits = {seq.id: limit for seq, limit in zip(sequences, limits, strict=True) if limit}
        return limits

    def roots(self, sequences: list[Sequence]) -> tuple[torch.Tensor, ...]:
        """Read all unread rows of each text, then its mask rows; logits [R, Vd] of the token after each text."""
        self.read_all_but_last_chunk(sequences)
        inputs, text_features = self.take(sequences, self.config.prefill_chunk_size)
        features, wanted, packed, offset = [], [], 0, 0
        for row, own in zip(inputs, text_features, strict=True):
            limit, end = self.limits[row.seq_id], packed + len(own)
            row.tokens = np.concatenate([row.tokens, np.full(limit - 1, self.mask_token)])
            row.num_tokens += limit - 1
            features += [own, self.mask_features.expand(limit - 1, -1)]
            wanted.append(np.arange(end - 1, end - 1 + limit))
            self.first_logits[row.seq_id] = offset
            packed, offset = end + limit - 1, offset + limit
        hidden = self.head.forward(inputs, torch.cat(features), self.cache)
        for seq, row, own in zip(sequences, inputs, text_features, strict=True):
            self.has_read(seq, row.start + len(own))
        self.parallel_logits = self.logits(hidden[upload(np.concatenate(wanted), hidden.device)])
        return (self._at_depth(sequences, 0),)

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        """The logits [R, Vd] that `roots` computed."""
        return roots[0]

    def expand(self, level: Level) -> torch.Tensor:
        """Logits [R, 1, Vd] of the token after the nodes of one depth, which share them."""
        return self._at_depth([self.sequences[i] for i in level.rows], level.depth)[:, None]

    def _at_depth(self, sequences: list[Sequence], depth: int) -> torch.Tensor:
        assert self.parallel_logits is not None
        index = torch.tensor([self.first_logits[seq.id] + depth for seq in sequences])
        return self.parallel_logits[index.to(self.parallel_logits.device)]
