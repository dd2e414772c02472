"""Keys of method `eagle3`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..checkpoints.config import ProposedLengthConfig


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
        default=None, metadata={"help": "P-EAGLE: the mask token, if the checkpoint's config.json names none"}
    )
    recycle_normed: bool | None = field(
        default=None,
        metadata={
            "help": "whether a draft step reads the previous step's output after the head's last norm (true) or before it (false); by "
            "default as it was trained"
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_bool("parallel_drafting", optional=True)
        self.check_int("mask_token_id", minimum=0, optional=True)
        self.check_bool("recycle_normed", optional=True)
