"""Drafting with Hydra and Hydra++ heads (Ankner et al. 2024)."""

from __future__ import annotations

import torch
from torch import nn

from ...core.sequence import Sequence
from ...kernels.transfer import upload
from ...model.draft_loop import LevelForward
from ...model.packed_head import PackedHead
from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..checkpoints.target_parts import DraftVocabulary, load_once
from ..growing.features import FeatureGenerator
from ..growing.grower import GrowingGenerator
from ..growing.last_hidden import LastHiddenGenerator, bounded_shape
from ..growing.levels import Level
from ..registry import register
from .checkpoint import is_hydra, load_hydra
from .config import HydraConfig
from .head import HydraHeads


class HydraDrafting(GrowingGenerator):
    """Grows a draft with the heads, in the same way for Hydra and Hydra++. `state` holds the states of the newest nodes."""

    heads: HydraHeads
    state: torch.Tensor

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        """The first head's logits."""
        hidden, tokens = roots
        state = self.heads.with_tokens(hidden, tokens)
        self.state = state[:, None]
        return self.heads.heads[0](state)

    def expand(self, level: Level) -> torch.Tensor:
        """The next head's logits after each node [R, F, V]."""
        self.state = self.heads.with_tokens(self.carried(level), level.tokens)
        return self.heads.heads[level.depth](self.state)


@register(HydraConfig)
def make_hydra(config: HydraConfig, target: PackedModel, context: DrafterContext | None = None) -> HydraDrafting:
    """The generator for heads with or without a prefix layer."""
    checkpoint = config.open_head(is_hydra)
    heads = load_once(config, target, lambda: load_hydra(checkpoint, target))
    return (HydraGenerator if heads.prefix is None else HydraPrefixGenerator)(config, target, context, heads)


class HydraGenerator(HydraDrafting, LastHiddenGenerator):
    """Drafts with Hydra heads: a node's state is the target's last hidden state and the embeddings of the node's path."""

    config: HydraConfig

    def __init__(self, config: HydraConfig, target: PackedModel, context: DrafterContext | None, heads: HydraHeads):
        super().__init__(config, target, context)
        self.heads = heads
        self.vocabulary = DraftVocabulary(target.vocab_size)
        self.set_heads(heads, len(heads.heads))


class HydraPrefixGenerator(HydraDrafting, FeatureGenerator):
    """Drafts with Hydra++ heads: the prefix layer reads the text with a KV cache; drafting itself needs none."""

    config: HydraConfig

    def __init__(self, config: HydraConfig, target: PackedModel, context: DrafterContext | None, heads: HydraHeads):
        super().__init__(config, target, context)
        assert heads.prefix_config is not None
        self.heads = heads
        self.vocabulary = DraftVocabulary(target.vocab_size)
        self.head = self.captured(
            PackedHead(heads, heads.prefix_config, num_layers=1, prepack_weights=config.prepack_weights),
            native=False,  # most of the work is in the heads, which prepacked weights serve
        )
        self.shape = bounded_shape(config, self.shape, len(heads.heads))
        self.config = config.bounded(self.shape.depth)
        self.cache = self.new_cache(1, config.block_size)

    def modules(self) -> list[nn.Module]:
        """The heads, and modules they share with the target."""
        return [self.heads, *super().modules()]

    def level_forwards(self, depth: int) -> list[LevelForward]:
        """Empty: only the text has keys and values."""
        return []

    def roots(self, sequences: list[Sequence]) -> tuple[torch.Tensor, ...]:
        """Read all unread rows of each text: the prefix layer's outputs [R, H] at the ends, and the newest tokens [R]."""
        hidden = self.read_all(sequences)
        return hidden, upload([seq.tokens[-1] for seq in sequences], hidden.device)
