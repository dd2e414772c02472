"""EAGLE-3 (Li et al. 2025) drafts from three of the target's hidden states; P-EAGLE does so for all depths in one forward."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from ...core.output import PackedOutput
from ...core.sequence import Sequence
from ...kernels.transfer import upload
from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..checkpoints.config import ProposedLengthConfig, proposed_length
from ..checkpoints.files import register_format
from ..checkpoints.target_parts import gather_features, load_once
from ..growing.features import FeatureGenerator
from ..growing.levels import Level
from ..registry import register
from .head import is_eagle3, load_eagle3


@dataclass
class Eagle3Config(ProposedLengthConfig):
    """EAGLE-3: a head drafts from hidden states of three of the target's layers, in chains, static trees or dynamic trees
    (`top_k`, `total_tokens`, `depth`). P-EAGLE heads draft all depths in one forward."""

    name = "eagle3"
    requires = ("an EAGLE-3 or P-EAGLE head trained for the target: 'model'",)

    parallel_drafting: bool | None = field(
        default=None,
        metadata={
            "help": "P-EAGLE: all depths in one forward; the checkpoint decides, and a contradiction is an error"
        },
    )

    mask_token_id: int | None = field(
        default=None, metadata={"help": "P-EAGLE: the mask token, where the checkpoint's config.json names none"}
    )
    recycle_normed: bool | None = field(
        default=None,
        metadata={
            "help": "what a draft step reads of the step before: the head's output after its last norm (true) or before it; by "
            "default as the checkpoint's origin says"
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_bool("parallel_drafting", optional=True)
        self.check_int("mask_token_id", minimum=0, optional=True)
        self.check_bool("recycle_normed", optional=True)


register_format(
    "EAGLE-3, P-EAGLE (yuhuili/EAGLE3-*, SpecForge: midlayer.hidden_norm; speculators: layers.0.hidden_norm)",
    "eagle3",
    is_eagle3,
)


@register(Eagle3Config)
class Eagle3Generator(FeatureGenerator):
    """Drafts with an EAGLE-3 head.

    A P-EAGLE head reads, behind each text, one row per further depth: the mask token's embedding with the head's
    `mask_hidden` in place of features. Row d then predicts what EAGLE-3 would after d drafted tokens, whatever they are: all
    nodes of a depth share it. The keys and values of those rows are overwritten by the next text.
    """

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, target: PackedModel, context: DrafterContext | None = None):
        checkpoint = config.open_head(is_eagle3)
        self.default_length = proposed_length(checkpoint)
        super().__init__(self.settled(config), target, context)
        own = config.mask_token_id, config.recycle_normed
        self.loaded = load_once(
            config, target, lambda: load_eagle3(checkpoint, target, config.prepack_weights, *own), *own
        )
        self.window_stays = self.loaded.options.window_stays
        # Graphs know one position of a token, for its rotation and its window.
        self.head = self.loaded.head if self.window_stays else self.captured(self.loaded.head)
        self.vocabulary = self.loaded.vocabulary
        self.taps = self.loaded.options.taps
        self.mask_token = self.loaded.options.mask_token
        is_parallel = self.mask_token is not None
        if config.mask_token_id is not None and not is_parallel:
            raise config.fail("mask_token_id", "is for P-EAGLE heads, which this one is not: leave it out.")
        if is_parallel or self.window_stays:
            self.rounds = None  # one forward has drafted all depths before any is chosen
        if config.parallel_drafting not in (None, is_parallel):
            drafts = "all depths at once" if is_parallel else "step by step"
            raise config.fail(
                "parallel_drafting", f"is {config.parallel_drafting}, but this head drafts {drafts}: leave it out."
            )
        self.cache = self.new_cache(1, config.block_size)
        self.limits: dict[int, int] = {}  # P-EAGLE: drafts per sequence of the running round
        self.first_logits: dict[int, int] = {}  # P-EAGLE: where each sequence's logits begin in `parallel_logits`
        self.parallel_logits: torch.Tensor | None = None  # [sum of limits, Vd]

    def settled(self, config: Eagle3Config) -> Eagle3Config:
        """With the checkpoint's draft length, where the user gave none."""
        return config.with_default_length(self.default_length)

    def features(self, output: PackedOutput, index: torch.Tensor) -> torch.Tensor:
        """The target's hidden states, joined; P-EAGLE's projected to the head's width, which others do as they read."""
        layers = [output.layers[i] for i in self.taps.layers]
        if not layers:
            assert output.last_hidden is not None
            layers = [output.last_hidden]
        states = gather_features(layers, index, self.head.device, self.head.dtype)
        if self.mask_token is None:
            return states
        with torch.no_grad():
            return self.loaded.module.fuse(states)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head's logits over its draft vocabulary."""
        return self.loaded.logits(hidden)

    # ---- P-EAGLE ----------------------------------------------------------------------------------------------------

    def ready(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """As in the base; P-EAGLE notes how many depths each row wants."""
        limits = super().ready(sequences, limits)
        self.limits = {seq.id: limit for seq, limit in zip(sequences, limits, strict=True) if limit}
        return limits

    def roots(self, sequences: list[Sequence]) -> tuple[torch.Tensor, ...]:
        """Read what is new of each text; for P-EAGLE with the mask rows behind it: logits [R, Vd] after the last token."""
        if self.mask_token is None:
            return super().roots(sequences)
        self.read_all_but_last_chunk(sequences)
        inputs, text_features = self.take(sequences, self.config.prefill_chunk_size)
        mask = self.loaded.mask_features
        assert mask is not None
        features, wanted, packed, offset = [], [], 0, 0
        for row, own in zip(inputs, text_features, strict=True):
            limit, end = self.limits[row.seq_id], packed + len(own)
            row.tokens = np.concatenate([row.tokens, np.full(limit - 1, self.mask_token)])
            features += [own, mask.expand(limit - 1, -1)]
            wanted.append(np.arange(end - 1, end - 1 + limit))
            self.first_logits[row.seq_id] = offset
            packed, offset = end + limit - 1, offset + limit
        hidden = self.head.forward(inputs, torch.cat(features), self.cache)
        for row, own in zip(inputs, text_features, strict=True):
            self.cache.tables[row.seq_id].length = row.start + len(own)
        self.parallel_logits = self.logits(hidden[upload(np.concatenate(wanted), hidden.device)])
        return (self._at_depth(sequences, 0),)

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        """Logits [R, Vd] of what follows the last token."""
        return super().begin(*roots) if self.mask_token is None else roots[0]

    def expand(self, level: Level) -> torch.Tensor:
        """Logits [R, F, Vd] of what follows each node of one depth; P-EAGLE has them already: [R, 1, Vd]."""
        if self.mask_token is None:
            return super().expand(level)
        return self._at_depth([self.sequences[i] for i in level.rows], level.depth)[:, None]

    def _at_depth(self, sequences: list[Sequence], depth: int) -> torch.Tensor:
        assert self.parallel_logits is not None
        index = torch.tensor([self.first_logits[seq.id] + depth for seq in sequences])
        return self.parallel_logits[index.to(self.parallel_logits.device)]
