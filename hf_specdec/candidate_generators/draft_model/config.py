"""Keys of method `draft_model`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ...config import SpeculativeConfigError
from ..growing.tree_shapes import TreeDraftingConfig

BRIDGES = ("intersection", "text")


@dataclass
class DraftModelConfig(TreeDraftingConfig):
    """A smaller causal language model drafts token by token, with a KV cache of its own; or the target drafts for itself
    through its first layers (`early_exit`). Drafters with another tokenizer are bridged by shared tokens or by text."""

    name = "draft_model"
    uses_assistant_model = True
    requires = ("a smaller model: 'model', generate(assistant_model=...) or 'early_exit'",)

    model: str | None = field(default=None, metadata={"help": "drafter: bundled name, folder or Hub id"})
    revision: str | None = field(default=None, metadata={"help": "Hub revision of the drafter"})
    early_exit: int | None = field(
        default=None, metadata={"help": "draft with this many of the target's own first layers"}
    )
    vocabulary_bridge: str | None = field(
        default=None,
        metadata={
            "help": "for a drafter with another tokenizer: 'intersection' (tokens both have) or 'text' (re-encode)"
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.model, os.PathLike):
            self.model = os.fspath(self.model)
        if self.model is not None and not isinstance(self.model, str):
            hint = (
                "pass a loaded model as generate(assistant_model=...)"
                if callable(self.model)
                else f"not {self.model!r}"
            )
            raise SpeculativeConfigError(f"speculative_config['model'] must be the name or folder of a model; {hint}.")
        self.check_text("model")
        self.check_text("revision")
        self.check_int("early_exit", minimum=1, optional=True)
        self.check_choice("vocabulary_bridge", BRIDGES, optional=True)
        if self.model is not None and self.early_exit is not None:
            raise self.fail("early_exit", "cannot be combined with 'model': the target drafts for itself.")
