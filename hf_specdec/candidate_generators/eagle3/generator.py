"""Drafting with EAGLE-3 heads (Li et al. 2025), step by step, and with P-EAGLE heads, all depths at once; keys of method `eagle3`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ...config import config_key
from ...core.output import PackedOutput
from ...core.sequence import Sequence
from ...kernels.transfer import upload
from ...model.packed_model import PackedModel
from ..base import DrafterContext, HasHead
from ..checkpoints.config import HeadConfig, proposed_length
from ..checkpoints.target_parts import gather_features, load_once
from ..growing.features import FeatureGenerator
from ..growing.tree_growth import AllDepths, DraftLevel
from ..registry import register
from .checkpoint import load_eagle3


@dataclass
class Eagle3Config(HeadConfig):
    """EAGLE-3: a head drafts from hidden states of three of the target's layers, in chains, static trees or dynamic trees
    (`top_k`, `total_tokens`, `depth`). P-EAGLE heads draft all depths in one forward."""

    name = "eagle3"
    requires = ("an EAGLE-3 or P-EAGLE head trained for the target: 'model'",)

    parallel_drafting: bool | None = config_key(
        None, "P-EAGLE: all depths in one forward; the checkpoint decides, and a contradiction is an error"
    )

    mask_token_id: int | None = config_key(
        None, "P-EAGLE: the mask token, if the checkpoint's config.json names none", minimum=0
    )
    recycle_normed: bool | None = config_key(
        None,
        "whether a draft step reads the previous step's output after the head's last norm (true) or before it (false); by "
        "default as it was trained",
    )


@register(Eagle3Config)
class Eagle3Generator(FeatureGenerator, HasHead):
    """Drafts with an EAGLE-3 or a P-EAGLE head.

    P-EAGLE has EAGLE-3's network, trained so that one forward drafts all depths. After each text the head reads one row for every
    further depth: the mask token's embedding, with the head's `mask_hidden` in place of features. Row d predicts what EAGLE-3 would
    after d drafted tokens, whatever they are, so all nodes of one depth share it. The next text overwrites the keys and values of
    these rows.

    Attributes:
        mask_token: P-EAGLE's token in mask rows; None: the head drafts step by step.
    """

    def __init__(self, config: Eagle3Config, target: PackedModel, context: DrafterContext | None = None):
        checkpoint = config.open_head()
        given = config.mask_token_id, config.recycle_normed
        loaded = load_once(
            config, target, lambda: load_eagle3(checkpoint, target, config.prepack_weights, *given), *given
        )
        self.head_module = loaded.head.module
        options = self.head_module.options
        self.mask_token, self.window_stays = options.mask_token, options.window_stays
        drafts_at_once = self.mask_token is not None
        if config.parallel_drafting not in (None, drafts_at_once):
            how = "all depths at once" if drafts_at_once else "step by step"
            raise config.fail(
                "parallel_drafting", f"is {not drafts_at_once}, but this head drafts {how}: leave it out."
            )
        if not drafts_at_once and config.mask_token_id is not None:
            raise config.fail("mask_token_id", "is for P-EAGLE heads, which this one is not: leave it out.")
        # graphs have one position per token, used for rotation and window
        has_loop = not drafts_at_once and not self.window_stays
        super().__init__(config.with_default_length(proposed_length(checkpoint)), target, context, has_loop=has_loop)
        self.taps = options.taps
        self.use(loaded, graphs=not self.window_stays)
        self.made: AllDepths | None = None  # P-EAGLE's logits of the current round

    def features(self, output: PackedOutput, index: torch.Tensor) -> torch.Tensor:
        """The target's hidden states, concatenated [n, L * Ht], which the head projects when it reads them; P-EAGLE's features [n, H]
        are projected already."""
        layers: Any = [output.layers[i] for i in self.taps.layers] or [output.last_hidden]
        states = gather_features(layers, index, self.head.device, self.head.dtype)
        if self.mask_token is None:
            return states
        with torch.no_grad():
            return self.head_module.fuse(states)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head_module.logits(hidden, self.lm_head)

    def scoring_modules(self) -> list[nn.Module]:
        return [self.head_module.norm, self.lm_head]

    def roots(self, sequences: list[Sequence], limits: list[int]) -> tuple[torch.Tensor, ...]:
        """As in the base. P-EAGLE: read all unread rows of each text, then its mask rows; logits [R, Vd] of the token after each text."""
        if self.mask_token is None:
            return super().roots(sequences, limits)
        self.read_all_but_last_chunk(sequences)
        inputs, text_features = self.take(sequences, self.config.prefill_chunk_size)
        features, wanted, packed = [], [], 0
        for row, taken, limit in zip(inputs, text_features, limits, strict=True):
            end = packed + len(taken)
            row.tokens = np.concatenate([row.tokens, np.full(limit - 1, self.mask_token)])
            row.num_tokens += limit - 1
            features += [taken, self.head_module.mask_features.expand(limit - 1, -1)]
            wanted.append(np.arange(end - 1, end - 1 + limit))
            packed = end + limit - 1
        hidden = self.head.forward(inputs, torch.cat(features), self.cache)
        for seq, row, taken in zip(sequences, inputs, text_features, strict=True):
            self.has_read(seq, row.start + len(taken))
        self.made = AllDepths(self.logits(hidden[upload(np.concatenate(wanted), hidden.device)]), limits)
        return (self.made.at()[:, 0],)

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        return super().begin(*roots) if self.mask_token is None else roots[0]

    def expand(self, level: DraftLevel) -> torch.Tensor:
        """As in the base. P-EAGLE: logits [R, 1, Vd], which the nodes of one depth share."""
        return super().expand(level) if self.made is None else self.made.at(level)
