"""HeadConfig: the keys of methods with a head, whose checkpoint may propose a draft length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ...config import config_key
from ..growing.tree_shapes import DynamicTree, TreeDraftingConfig, TreeShape, TreeTemplate
from .files import FORMATS, Checkpoint, infer_format, open_checkpoint

_Config = TypeVar("_Config", bound="HeadConfig")
# Keys besides num_speculative_tokens that set the length or depth of drafts.
_LENGTH_KEYS = (
    "depth", "branching_factors", "speculative_token_tree", "num_speculative_tokens_per_batch_size",
    "synthetic_acceptance_rates", "synthetic_acceptance_length",
)  # fmt: skip


@dataclass
class HeadConfig(TreeDraftingConfig):
    """Keys of methods whose drafter is a head trained for the target. The checkpoint sets `num_speculative_tokens` if the user does
    not."""

    reads_too: ClassVar[tuple[str, ...]] = ()  # other methods whose formats this one reads

    model: str | None = config_key(None, "the head: bundled name, folder or Hub id")
    revision: str | None = config_key(None, "Hub revision of the head")
    token: str | None = config_key(None, "Hub access token (never saved with a configuration)", secret=True)
    learn: bool | str = config_key(
        False,
        "train the head between steps, on what the target writes, and save it in this folder (true: a folder of the cache). "
        "Without `model`, a head is made. For mlp_speculator and eagle3",
    )
    learn_share: float = config_key(
        0.03, "with 'learn': share of the decoding time that learning may take", minimum=0.0, maximum=1.0
    )

    def __post_init__(self) -> None:
        self.length_given = (
            self.num_speculative_tokens is not None
            or self.draft_length == "auto"
            or any(getattr(self, key) is not None for key in _LENGTH_KEYS)
        )
        super().__post_init__()
        if not isinstance(self.learn, bool):
            self.check_text("learn")

    @property
    def implied_length(self) -> int | None:
        """None if the user gave a length: what else would be used may be the checkpoint's."""
        return None if self.length_given else self.num_speculative_tokens

    def with_default_length(self: _Config, length: int | None) -> _Config:
        """This configuration, with `length` as `num_speculative_tokens` if the user gave none."""
        return self if length is None or self.length_given else self.bounded(length)

    def bounded(self: _Config, depth: int) -> _Config:
        """This configuration with `depth` as its number of draft tokens."""
        return self if self.num_speculative_tokens == depth else dataclasses.replace(self, num_speculative_tokens=depth)

    def shape_within(self, longest: int) -> TreeShape:
        """The configured shape, cut to the longest draft that a head can make unless the user asked for more.

        Raises:
            SpeculativeConfigError: the configuration asks for deeper drafts.
        """
        shape = self.shape()
        is_bound = not self.length_given or (self.draft_length == "auto" and self.depth is None)
        if shape.depth <= longest:
            return shape
        if is_bound and isinstance(shape, DynamicTree):
            return dataclasses.replace(shape, depth=longest)
        if is_bound and shape.is_chain:
            return TreeTemplate.from_widths([1] * longest)
        asked = max(shape.depth, self.num_speculative_tokens or 0)  # the shape's depth is bounded
        raise self.fail(
            "num_speculative_tokens",
            f"(or the tree) asks for drafts of {asked} tokens, but {self.model!r} drafts {longest}: use at most {longest}, or leave "
            "it out.",
        )

    def open(self, wanted: Callable[[str], bool] | None = None) -> Checkpoint:
        """Open the configured checkpoint. Raises SpeculativeConfigError: no `model` is given, or it cannot be opened."""
        if self.model is None:
            raise self.fail("model", f"is missing: name the {self.method} head that was trained for this target.")
        return open_checkpoint(self.model, self.revision, self.token, wanted)

    def open_head(self) -> Checkpoint:
        """The configured checkpoint, in one of the method's formats.

        Raises:
            SpeculativeConfigError: no `model` is given, it cannot be opened, or it belongs to another method.
        """
        checkpoint = self.open()
        ours = (form for form in FORMATS if form.method in (self.name, *self.reads_too))
        if not any(form.matches(checkpoint) for form in ours):
            actual = infer_format(checkpoint)
            raise checkpoint.error(f"is a head for method {actual.method!r} ({actual.name}), not {self.method!r}.")
        return checkpoint


def proposed_length(checkpoint: Checkpoint) -> int | None:
    """The draft length a checkpoint in speculators' format proposes, or None.

    Raises:
        CheckpointError: it is not a number of at least 1.
    """
    proposals = checkpoint.section("speculators_config").get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals else {}
    length = first.get("speculative_tokens") if isinstance(first, dict) else None
    if length is not None and (type(length) is not int or length < 1):
        raise checkpoint.error(f"speculators_config.proposal_methods[0].speculative_tokens is {length!r}.")
    return length
