"""Configuration of heads whose checkpoint may propose a draft length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from .files import Checkpoint, infer_format
from .target_parts import HeadConfig, section

_Config = TypeVar("_Config", bound="ProposedLengthConfig")
# Keys besides num_speculative_tokens that set the length or depth of drafts.
_LENGTH_KEYS = (
    "depth", "branching_factors", "speculative_token_tree", "num_speculative_tokens_per_batch_size",
    "synthetic_acceptance_rates", "synthetic_acceptance_length",
)  # fmt: skip


@dataclass
class ProposedLengthConfig(HeadConfig):
    """A head's configuration in which the checkpoint sets `num_speculative_tokens` if the user does not."""

    def __post_init__(self) -> None:
        self.length_given = (
            self.num_speculative_tokens is not None
            or self.draft_length == "auto"
            or any(getattr(self, key) is not None for key in _LENGTH_KEYS)
        )
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        """As in the base, but always writes a length that the user gave: the default may be the checkpoint's."""
        out = super().to_dict()
        out.pop("num_speculative_tokens", None)
        if self.length_given:
            out["num_speculative_tokens"] = self.num_speculative_tokens
        return out

    def with_default_length(self: _Config, length: int | None) -> _Config:
        """This configuration, with `length` as `num_speculative_tokens` if the user gave none."""
        if length is None or self.length_given:
            return self
        return dataclasses.replace(self, num_speculative_tokens=length)

    def open_head(self, matches: Callable[[Checkpoint], bool]) -> Checkpoint:
        """The configured checkpoint.

        Args:
            matches: True for a checkpoint in one of the method's formats.

        Raises:
            SpeculativeConfigError: no `model` is given, it cannot be opened, or it belongs to another method.
        """
        checkpoint = self.open()
        if not matches(checkpoint):
            found = infer_format(checkpoint)
            raise checkpoint.error(f"is a head for method {found.method!r} ({found.name}), not {self.method!r}.")
        return checkpoint


def proposed_length(checkpoint: Checkpoint) -> int | None:
    """The draft length a checkpoint in speculators' format proposes, or None.

    Raises:
        CheckpointError: it is not a number of at least 1.
    """
    proposals = section(checkpoint, "speculators_config").get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals else {}
    length = first.get("speculative_tokens") if isinstance(first, dict) else None
    if length is not None and (type(length) is not int or length < 1):
        raise checkpoint.error(f"speculators_config.proposal_methods[0].speculative_tokens is {length!r}.")
    return length
