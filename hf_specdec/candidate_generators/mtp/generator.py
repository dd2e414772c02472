"""Drafting with the multi-token-prediction (MTP) modules that target checkpoints bring along.

Gloeckle et al. 2024; DeepSeek-V3 report, section 2.2; FastDeploy's continuation by n-grams.
"""

from __future__ import annotations

import torch
from torch import nn

from ...cache import PagedStaticCache
from ...core.draft_trees import DraftTrees
from ...core.sequence import Sequence
from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..checkpoints.target_parts import DraftVocabulary, load_once
from ..ngram import NGramGenerator
from ..registry import register
from .block_ends import BlockEnds
from .checkpoint import load_mtp
from .config import MtpConfig
from .turns import ModulesInTurn


@register(MtpConfig)
class MtpGenerator(ModulesInTurn):
    """Drafts with the target's MTP modules, each a decoder layer of the target's own class.

    A single module makes every draft step and reads its own output; several modules take turns (see `ModulesInTurn`). The first
    step reads the target's final hidden state, after the last norm. Later steps read the module's output as the family's
    reference does (`MtpLayout.normed_output`): for DeepSeek-V3's layout after `shared_head.norm`, as in transformers and SGLang;
    older versions of vLLM read it before this norm (`recycle_normed: false`).
    """

    config: MtpConfig

    def __init__(self, config: MtpConfig, target: PackedModel, context: DrafterContext | None = None):
        self.loaded = load_once(
            config, target, lambda: load_mtp(config.open_for(target), target, config.prepack_weights)
        )
        length = self.loaded.proposed_length or len(self.loaded.modules)
        super().__init__(config.with_default_length(length), target, context)
        used = min(len(self.loaded.modules), self.shape.depth)
        self.mtp_modules = self.loaded.modules[:used]
        self.heads = [self.captured(head) for head in self.loaded.heads[:used]]
        self.head = self.heads[0]
        normed = config.recycle_normed
        self.hands_on_normed = self.loaded.layout.normed_output if normed is None else normed
        self.vocabulary = DraftVocabulary(target.vocab_size)
        self.cache = self.new_cache(1, config.block_size)
        self.ngrams = NGramGenerator(config.ngrams(), target) if config.continues_by_ngram else None

    def new_cache(self, num_blocks: int, block_size: int) -> PagedStaticCache:
        """A cache with one layer per module in use, which grows up to `num_blocks`. Slot s of module j holds token s + 1 + j, so the
        contents of slot s depend on as many later tokens as there are modules (`ahead`)."""
        for head in self.heads:
            if head.graphs is not None:
                head.graphs.captures.clear()
        self.boundaries = BlockEnds()
        weights = [weight for head in self.heads for weight in head.module.parameters()]
        return PagedStaticCache(len(self.heads), num_blocks, block_size, weights=weights, ahead=len(self.heads))

    def state_of(self, module: int, hidden: torch.Tensor) -> torch.Tensor:
        """The module's output, after its last norm if `hands_on_normed`."""
        return self.mtp_modules[module].norm(hidden) if self.hands_on_normed else hidden

    def logits_of(self, module: int, state: torch.Tensor) -> torch.Tensor:
        """Logits [n, Vd] from the module's normed output."""
        own = self.mtp_modules[module]
        return own.logits(state if self.hands_on_normed else own.norm(state))

    def scorers_of(self, module: int) -> list[nn.Module]:
        """The module's last norm and its language-model head."""
        own = self.mtp_modules[module]
        return [own.shared["lm_head"], own.norm]

    # ---- continuation by n-gram -------------------------------------------------------------------------------------

    @property
    def max_draft_nodes(self) -> int:
        """The most nodes of a draft, n-grams included."""
        return self.config.longest_draft if self.config.continues_by_ngram else super().max_draft_nodes

    def start(self, seq: Sequence) -> None:
        """As in the base; also begin an index of n-grams."""
        super().start(seq)
        if self.ngrams is not None:
            self.ngrams.start(seq)

    def stop(self, seq: Sequence) -> None:
        """As in the base; also drop the n-grams."""
        super().stop(seq)
        if self.ngrams is not None:
            self.ngrams.stop(seq)

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """The modules' drafts, continued by n-gram look-up if configured."""
        trees = super().propose(sequences, limits)
        return trees if self.ngrams is None else self.ngrams.continued(trees, sequences, limits)
