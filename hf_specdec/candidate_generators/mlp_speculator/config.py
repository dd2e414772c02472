"""Keys of methods `mlp_speculator` and `arctic`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..growing.last_hidden import LastHiddenConfig
from ..growing.tree_shapes import TreeShape, TreeTemplate

_SHAPE_KEYS = ("branching_factors", "speculative_token_tree", "top_k", "total_tokens")


@dataclass
class MLPSpeculatorConfig(LastHiddenConfig):
    """An MLP speculator drafts from the target's last hidden state and its own tokens: a chain, unless a tree is asked for.

    `top_k_tokens_per_head` and `n_candidates` are the keys checkpoints of this format carry; those in the checkpoint are
    used only with `use_checkpoint_tree`.
    """

    name = "mlp_speculator"
    requires = ("an MLP speculator (IBM accelerator, Arctic speculator) trained for the target: 'model'",)

    top_k_tokens_per_head: list[int] | None = field(
        default=None,
        metadata={"help": "children per node at each depth, e.g. [4, 3, 2, 2]: draft a tree instead of a chain"},
    )
    n_candidates: int | None = field(
        default=None, metadata={"help": "of the tree, keep only the paths to this many best leaves (default: all)"}
    )
    use_checkpoint_tree: bool = field(
        default=False,
        metadata={"help": "draft the tree the checkpoint's top_k_tokens_per_head and n_candidates describe"},
    )

    def __post_init__(self) -> None:
        self.check_bool("use_checkpoint_tree")
        own = "top_k_tokens_per_head" if self.top_k_tokens_per_head is not None else None
        if self.use_checkpoint_tree:
            if own:
                raise self.fail(own, "cannot be combined with 'use_checkpoint_tree': both give the tree's shape.")
            own = "use_checkpoint_tree"
        for key in _SHAPE_KEYS:
            if own and getattr(self, key) is not None:
                raise self.fail(own, f"cannot be combined with {key!r}: both give the tree's shape.")
        if self.n_candidates is not None and not own:
            raise self.fail("n_candidates", "is for trees: give 'top_k_tokens_per_head', or set 'use_checkpoint_tree'.")
        self.check_int("n_candidates", minimum=1, optional=True)
        factors = self.top_k_tokens_per_head
        if factors is not None:
            if not isinstance(factors, list) or not factors or not all(type(f) is int and f >= 1 for f in factors):
                raise self.fail("top_k_tokens_per_head", f"must be a list of integers of at least 1, not {factors!r}.")
            self._check_widths("top_k_tokens_per_head", factors)
            self._fix_depth("top_k_tokens_per_head", len(factors))
        super().__post_init__()

    def shape(self) -> TreeShape:
        """The shape these keys describe; the checkpoint's own tree is read by the generator."""
        if self.top_k_tokens_per_head is not None:
            return TreeTemplate.from_widths(self.top_k_tokens_per_head, self.n_candidates)
        return super().shape()


@dataclass
class ArcticConfig(MLPSpeculatorConfig):
    """`mlp_speculator` under the name Snowflake's vLLM plugin gives it; both read every checkpoint of the family."""

    name = "arctic"
