"""Keys of method `mtp`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ...model.packed_model import PackedModel
from ..checkpoints.config import ProposedLengthConfig
from ..checkpoints.files import Checkpoint, open_checkpoint
from ..growing.tree_shapes import TreeShape, TreeTemplate
from ..ngram import NGramConfig
from .layouts import is_mtp_tensor

MTP_STRATEGIES = ("default", "with_ngram")


@dataclass
class MtpConfig(ProposedLengthConfig):
    """The target's own multi-token-prediction layers draft: DeepSeek-V3, GLM-4.5, Qwen3.5, MiMo, Ernie 4.5 and others, in chains
    or trees. They are read from the target's own checkpoint, or from 'model'. With mtp_strategy 'with_ngram', n-gram look-up
    in the text continues their drafts."""

    name = "mtp"
    requires = ("MTP layers: in the target's own checkpoint, or in 'model'",)
    default_num_speculative_tokens: ClassVar[int] = 1

    num_model_steps: int | None = field(
        default=None,
        metadata={"help": "draft tokens made by MTP layers; by default all, or 1 with mtp_strategy 'with_ngram'"},
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
            "help": "whether a draft step reads the previous step's output after the module's last norm (true) or before it (false); "
            "by default as the family's reference does"
        },
    )

    def __post_init__(self) -> None:
        self.check_choice("mtp_strategy", MTP_STRATEGIES)
        self.check_int("num_model_steps", minimum=1, optional=True)
        has_tree = self.tree_key is not None or self.total_tokens is not None
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
        """Whether n-gram look-up continues the MTP layers' drafts."""
        return self.mtp_strategy == "with_ngram"

    def ngrams(self) -> NGramConfig:
        """The configuration of the look-up that continues drafts."""
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
        """The shape of the MTP layers' drafts."""
        if self.continues_by_ngram:
            return TreeTemplate.from_widths([1] * (self.num_model_steps or 1))
        return super().shape()

    def open_for(self, target: PackedModel) -> Checkpoint:
        """Open the checkpoint with the MTP layers: 'model', or the target's own.

        Raises:
            SpeculativeConfigError: it cannot be opened, or the target was not loaded from a checkpoint.
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
