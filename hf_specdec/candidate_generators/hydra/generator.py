"""Drafting with Hydra and Hydra++ heads (Ankner et al. 2024), and the keys of method `hydra`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ...core.sequence import Sequence
from ...kernels.transfer import upload
from ...model.draft_loop import LevelForward
from ...model.packed_head import PackedHead
from ...model.packed_model import PackedModel
from ..base import CandidateGenerator, DrafterContext
from ..checkpoints.target_parts import DraftVocabulary, load_once
from ..growing.features import FeatureGenerator
from ..growing.grower import GrowsDrafts
from ..growing.last_hidden import LastHiddenConfig, LastHiddenGenerator
from ..growing.tree_growth import DraftLevel
from ..registry import register
from .checkpoint import is_hydra, load_hydra
from .head import HydraHeads


@dataclass
class HydraConfig(LastHiddenConfig):
    """Hydra: heads like Medusa's, but each also reads the tokens drafted before it. Hydra++ checkpoints (arch "prefix-mlp") put
    a decoder layer, with its own KV, between the target and the heads."""

    name = "hydra"
    requires = ("Hydra heads trained for the target: 'model'",)


@register(HydraConfig)
def make_hydra(config: HydraConfig, target: PackedModel, context: DrafterContext | None = None) -> CandidateGenerator:
    """The generator for heads with or without a prefix layer."""
    checkpoint = config.open_head(is_hydra)
    heads = load_once(config, target, lambda: load_hydra(checkpoint, target))
    return (HydraGenerator if heads.prefix is None else HydraPrefixGenerator)(config, target, heads)


class HydraDrafting(GrowsDrafts):
    """Grows a draft with the heads. A node's state is that of its text and the embeddings of its path."""

    heads: HydraHeads
    score_only = GrowsDrafts.score_only  # each head has a language-model head inside

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        hidden, tokens = roots
        state = self.heads.with_tokens(hidden, tokens)
        self.state = state[:, None]
        return self.heads.heads[0](state)

    def expand(self, level: DraftLevel) -> torch.Tensor:
        """The next head's logits after each node [R, F, V]."""
        self.state = self.heads.with_tokens(self.carried(level), level.tokens)
        return self.heads.heads[level.depth](self.state)


class HydraGenerator(HydraDrafting, LastHiddenGenerator):
    """Drafts with Hydra heads from the target's last hidden state."""

    def __init__(self, config: HydraConfig, target: PackedModel, heads: HydraHeads):
        super().__init__(config, target, heads, len(heads.heads))
        self.heads = heads


class HydraPrefixGenerator(HydraDrafting, FeatureGenerator):
    """Drafts with Hydra++ heads: the prefix layer reads the text with a KV cache; drafting itself needs none."""

    def __init__(self, config: HydraConfig, target: PackedModel, heads: HydraHeads):
        shape = config.shape_within(len(heads.heads))
        super().__init__(config.bounded(shape.depth), target, shape=shape)
        assert heads.prefix_config is not None
        self.heads, self.vocabulary = heads, DraftVocabulary(target.vocab_size)
        self.head = self.captured(
            PackedHead(heads, heads.prefix_config, num_layers=1, prepack_weights=config.prepack_weights),
            native=False,  # most of the work is in the heads, which prepacked weights serve
        )

    def modules(self) -> list[nn.Module]:
        return [self.heads, *super().modules()]

    def level_forwards(self, depth: int) -> list[LevelForward]:
        """Empty: only the text has keys and values."""
        return []

    def roots(self, sequences: list[Sequence], limits: list[int]) -> tuple[torch.Tensor, ...]:
        """Read all unread rows of each text: the prefix layer's outputs [R, H] at the ends, and the newest tokens [R]."""
        hidden = self.read_all(sequences)
        return hidden, upload([seq.tokens[-1] for seq in sequences], hidden.device)
