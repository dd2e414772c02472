"""Multi-token prediction (MTP): the modules that target checkpoints bring along draft for their own model.

Gloeckle et al. 2024, the DeepSeek-V3 report (section 2.2) and the families of `layouts.py`; hybrid drafts as FastDeploy
names them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ...cache import PagedStaticCache
from ...core.draft_trees import DraftTrees
from ...core.outcome import StepOutcome
from ...core.sequence import Sequence
from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..checkpoints.config import ProposedLengthConfig
from ..checkpoints.files import Checkpoint, open_checkpoint, register_format
from ..checkpoints.target_parts import DraftVocabulary, load_once
from ..growing.tree_shapes import TreeShape, TreeTemplate
from ..ngram import NGramConfig, NGramGenerator
from ..registry import register
from .head import load_mtp
from .layouts import holds_mtp_alone, is_mtp_tensor
from .turns import ModulesInTurn

MTP_STRATEGIES = ("default", "with_ngram")


@dataclass
class MtpConfig(ProposedLengthConfig):
    """The target's own multi-token-prediction layers draft: DeepSeek-V3, GLM-4.5, Qwen3.5, MiMo, Ernie 4.5 and others, in chains
    or trees. They are read from the target's own checkpoint, or from 'model'; 'with_ngram' continues their draft by n-gram
    look-up in the text."""

    name = "mtp"
    requires = ("MTP layers: in the target's own checkpoint, or in 'model'",)
    default_num_speculative_tokens: ClassVar[int] = 1

    num_model_steps: int | None = field(
        default=None,
        metadata={"help": "draft tokens made by MTP layers; by default all, and 1 with mtp_strategy 'with_ngram'"},
    )
    mtp_strategy: str = field(
        default="default",
        metadata={
            "help": "'default': MTP layers make the whole draft; 'with_ngram': they make num_model_steps tokens, and n-gram "
            "look-up over text and draft continues them up to num_speculative_tokens (chains)"
        },
    )
    prompt_lookup_min: int = field(default=2, metadata={"help": "'with_ngram': shortest n-gram looked up"})
    prompt_lookup_max: int = field(default=5, metadata={"help": "'with_ngram': longest n-gram looked up"})
    recycle_normed: bool | None = field(
        default=None,
        metadata={
            "help": "what a draft step reads of the step before: the module's output after its last norm (true) or before it; "
            "by default as the family's reference does"
        },
    )

    def __post_init__(self) -> None:
        self.check_choice("mtp_strategy", MTP_STRATEGIES)
        self.check_int("num_model_steps", minimum=1, optional=True)
        has_tree = any(
            getattr(self, key) is not None for key in ("branching_factors", "speculative_token_tree", "top_k")
        )
        if has_tree and self.continues_by_ngram:
            raise self.fail("mtp_strategy", "is 'with_ngram', which continues chains: leave the tree's keys out.")
        length_open = self.num_speculative_tokens is None and self.depth is None and not has_tree
        if self.continues_by_ngram:
            self.num_model_steps = self.num_model_steps or 1
            if length_open and self.num_speculative_tokens_per_batch_size is None:
                self.num_speculative_tokens = max(5, self.num_model_steps + 1)
        elif length_open:
            self.num_speculative_tokens = self.num_model_steps
        super().__post_init__()
        self.check_int("prompt_lookup_min", minimum=1)
        self.check_int("prompt_lookup_max", minimum=1)
        self.check_bool("recycle_normed", optional=True)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise self.fail(
                "prompt_lookup_min",
                f"is {self.prompt_lookup_min}, more than prompt_lookup_max = {self.prompt_lookup_max}.",
            )
        self._check_steps()

    @property
    def continues_by_ngram(self) -> bool:
        """Whether drafts are longer than MTP layers make them."""
        return self.mtp_strategy == "with_ngram"

    def ngrams(self) -> NGramConfig:
        """Of the look-up that continues drafts."""
        return NGramConfig(prompt_lookup_min=self.prompt_lookup_min, prompt_lookup_max=self.prompt_lookup_max)

    def _check_steps(self) -> None:
        steps, tokens = self.num_model_steps, self.num_speculative_tokens or 0
        if steps is None:
            return
        if self.continues_by_ngram and steps >= tokens:
            raise self.fail(
                "num_speculative_tokens",
                f"is {tokens}, which leaves nothing to continue by n-gram after num_model_steps = {steps}.",
            )
        if not self.continues_by_ngram and steps != tokens:
            raise self.fail(
                "num_model_steps",
                f"is {steps}, but num_speculative_tokens is {tokens}: make them equal, or set mtp_strategy 'with_ngram' to "
                "continue by n-gram.",
            )

    def shape(self) -> TreeShape:
        """Of what the MTP layers draft."""
        if self.continues_by_ngram:
            return TreeTemplate.from_widths([1] * (self.num_model_steps or 1))
        return super().shape()

    def open_for(self, target: PackedModel) -> Checkpoint:
        """The checkpoint with the MTP layers: 'model', or where the target was loaded from.

        Raises:
            SpeculativeConfigError: it cannot be had, or the target was not loaded from anywhere.
        """
        wanted = is_mtp_tensor(target.config.num_hidden_layers)
        if self.model is not None:
            return self.open(wanted)
        model = target.model
        if not model.name_or_path:
            raise self.fail(
                "model", "is missing, and the target does not know where it was loaded from: name its folder or Hub id."
            )
        revision = self.revision or getattr(model.config, "_commit_hash", None)
        return open_checkpoint(model.name_or_path, revision, self.token, wanted)


def _matches(checkpoint: Checkpoint) -> bool:
    return holds_mtp_alone(checkpoint.config, checkpoint.names())


register_format(
    "MTP layers without their target (speculators' mtp, or tensors as in a target's checkpoint)", "mtp", _matches
)


@register(MtpConfig)
class MtpGenerator(ModulesInTurn):
    """Drafts with the target's MTP modules, each a decoder layer of the target's own class.

    One module makes every draft step, reading its own output; several take turns (see ModulesInTurn). What the first reads
    is the target's final hidden state, after the last norm. Between steps the module's output is handed on as the family's
    reference does it (`MtpLayout.normed_output`): for DeepSeek-V3's layout after `shared_head.norm`, as transformers and SGLang
    do; vLLM's older files hand on what is before it (`recycle_normed: false`).
    """

    config: MtpConfig

    def __init__(self, config: MtpConfig, target: PackedModel, context: DrafterContext | None = None):
        self.loaded = load_once(
            config, target, lambda: load_mtp(config.open_for(target), target, config.prepack_weights)
        )
        super().__init__(self.settled(config), target, context)
        used = min(len(self.loaded.modules), self.shape.depth)
        self.mtp_modules = self.loaded.modules[:used]
        self.heads = [self.captured(head) for head in self.loaded.heads[:used]]
        self.head = self.heads[0]
        normed = config.recycle_normed
        self.hands_on_normed = self.loaded.layout.normed_output if normed is None else normed
        self.vocabulary = DraftVocabulary(target.vocab_size)
        self.cache = self.new_cache(1, config.block_size)
        self.ngrams = NGramGenerator(config.ngrams(), target) if config.continues_by_ngram else None

    def settled(self, config: MtpConfig) -> MtpConfig:
        """With as many draft tokens as the checkpoint proposes, or has modules, where the user gave no number."""
        return config.with_default_length(self.loaded.proposed_length or len(self.loaded.modules))

    def new_cache(self, num_blocks: int, block_size: int) -> PagedStaticCache:
        """A cache with a layer per module in use, which grows up to `num_blocks`."""
        for head in self.heads:
            if head.graphs is not None:
                head.graphs.captures.clear()
        weights = [weight for head in self.heads for weight in head.module.parameters()]
        return PagedStaticCache(len(self.heads), num_blocks, block_size, share_prefixes=False, weights=weights)

    def state_of(self, module: int, hidden: torch.Tensor) -> torch.Tensor:
        """The module's output, after its last norm where that is what is handed on."""
        return self.mtp_modules[module].norm(hidden) if self.hands_on_normed else hidden

    def logits_of(self, module: int, state: torch.Tensor) -> torch.Tensor:
        """The head over the module's normed output."""
        own = self.mtp_modules[module]
        return own.logits(state if self.hands_on_normed else own.norm(state))

    # ---- continuation by n-gram -------------------------------------------------------------------------------------

    @property
    def max_draft_nodes(self) -> int:
        """Nodes of the deepest draft."""
        return self.config.longest_draft if self.config.continues_by_ngram else super().max_draft_nodes

    def start(self, seq: Sequence) -> None:
        """Nothing is read yet; the prompt's n-grams are known."""
        super().start(seq)
        if self.ngrams is not None:
            self.ngrams.start(seq)

    def observe(self, outcome: StepOutcome) -> None:
        """Take features, and index new tokens."""
        super().observe(outcome)
        if self.ngrams is not None:
            self.ngrams.observe(outcome)

    def stop(self, seq: Sequence) -> None:
        """Forget the text."""
        super().stop(seq)
        if self.ngrams is not None:
            self.ngrams.stop(seq)

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """What the modules draft, continued by what followed its last n-gram where the text has it."""
        trees = super().propose(sequences, limits)
        return trees if self.ngrams is None else self.ngrams.continued(trees, sequences, limits)
