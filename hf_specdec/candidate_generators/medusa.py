"""Medusa (Cai et al. 2024): one head per depth reads the target's last hidden state; heads do not see each other's tokens."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..model.packed_model import PackedModel
from .base import DrafterContext
from .checkpoints.files import Checkpoint, Plan, counted, load_module, register_format
from .checkpoints.target_parts import DraftVocabulary, check_target, load_once, place_of, target_head
from .growing.last_hidden import LastHiddenConfig, LastHiddenGenerator
from .growing.levels import Level
from .mlp_speculator.parts import sharing
from .registry import register

logger = logging.getLogger(__name__)


@dataclass
class MedusaConfig(LastHiddenConfig):
    """Medusa: several heads on the target's last hidden state each guess one of the next tokens. A chain by default; heads
    are made for trees: `speculative_token_tree` "medusa_mc_sim_7b_63", or one measured with `hf-specdec calibrate`.

    `max_paths` and `topk` in a converted checkpoint's config.json bound the trees of an engine that built them from it; they
    say nothing of the weights and are not used here.
    """

    name = "medusa"
    requires = ("Medusa heads trained for the target: 'model'",)

    def open(self, wanted: Callable[[str], bool] | None = None) -> Checkpoint:
        """The checkpoint; of one merged with the target (Medusa-2), not the shards that hold the target only."""
        return super().open(wanted or (lambda name: not name.startswith(("model.", "transformer."))))


class ResidualBlocks(nn.Module):
    """u + SiLU(W u + b), several times."""

    def __init__(self, hidden_size: int, num_blocks: int, bias: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(num_blocks))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., H] to the same."""
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class MedusaHeads(nn.Module):
    """All heads of a checkpoint; names are those of its converted form.

    Args:
        vocab_sizes: of the language-model heads: one per head, one for all, or none (then all use the target's).
        bias: of the blocks.
        target_head: the target's language-model head, for heads that have none.
        scale: of the logits.

    Attributes:
        target_ids: int64 [Vd], the target's id of each token the heads know; None: the same.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, num_blocks: int, vocab_sizes: list[int], bias: bool, target_head: nn.Module,
        scale: float = 1.0,
    ):  # fmt: skip
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlocks(hidden_size, num_blocks, bias) for _ in range(num_heads))
        self.lm_heads = nn.ModuleList(nn.Linear(hidden_size, size, bias=False) for size in vocab_sizes)
        self.scale = scale
        self.target_ids: torch.Tensor | None = None
        self._target_head = [target_head]  # not a part of this module

    def forward(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [.., Vd] of head `index` from hidden states [.., H]."""
        lm_heads = self.lm_heads if len(self.lm_heads) else self._target_head
        logits = lm_heads[min(index, len(lm_heads) - 1)](self.blocks[index](hidden))
        return logits if self.scale == 1.0 else logits * self.scale


# ---- formats --------------------------------------------------------------------------------------------------------

_PREFIX = re.compile(r"medusa_heads?\.")


def is_original(checkpoint: Checkpoint) -> bool:
    """The layout of FasterDecoding's files: `{head}.{block}.linear`, alone or merged into the target's checkpoint."""
    return checkpoint.any(r"(medusa_heads?\.)?\d+\.\d+\.linear\.weight$")


def is_converted(checkpoint: Checkpoint) -> bool:
    """vLLM's layout: `blocks.{head}.layers.{block}`."""
    return checkpoint.any(r"(medusa_heads?\.)?blocks\.\d+\.layers\.\d+\.weight$")


register_format(
    "Medusa (FasterDecoding/medusa-*: {head}.{block}.linear; medusa-1.0-*: medusa_head.* merged with the target)",
    "medusa",
    is_original,
)
register_format(
    "Medusa as converted for vLLM (abhigoyal/vllm-medusa-*: blocks.{head}.layers.{block})", "medusa", is_converted
)


def _converted(name: str) -> str:
    """A tensor's name in the converted form, but for language-model heads of the original one (`{head}.{last}`)."""
    return re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", _PREFIX.sub("", name, count=1))


@dataclass
class Layout:
    """Where the heads' tensors are, under names of the converted form, and how many there are of each."""

    plan: Plan
    num_heads: int
    num_blocks: int
    num_lm_heads: int  # 0: the target's is used; 1: one for all

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Layout:
        """By the tensors' names. config.json's numbers are not used: original files say 2 heads and hold 5."""
        if checkpoint.any(_PREFIX.pattern) and not all(map(_PREFIX.match, checkpoint.names())):
            checkpoint = Checkpoint(checkpoint.folder, checkpoint.name, wanted=lambda name: bool(_PREFIX.match(name)))
        names = [_converted(name) for name in checkpoint.names()]
        found = [match for match in (re.match(r"blocks\.(\d+)\.layers\.(\d+)\.", name) for name in names) if match]
        num_heads, num_blocks = (
            counted(checkpoint, (int(match[group]) for match in found), what)
            for group, what in ((1, "head"), (2, "block"))
        )
        has_own = any(name.startswith("lm_heads.") for name in names)
        one_for_all = checkpoint.config.get("original_lm_head") is True or ("lm_head.weight" in names and not has_own)

        def canonical(name: str) -> str:
            name = re.sub(rf"^(\d+)\.{num_blocks}\.weight$", r"lm_heads.\1.weight", _converted(name))
            return re.sub(r"^lm_heads?\.(\d+\.)?weight$", "lm_heads.0.weight", name) if one_for_all else name

        plan = Plan(checkpoint, sharing(checkpoint, canonical) if one_for_all else canonical)
        has_own = any(name.startswith("lm_heads.") for name in plan.sources)
        return cls(plan, num_heads, num_blocks, 0 if not has_own else 1 if one_for_all else num_heads)


def load_medusa(checkpoint: Checkpoint, target: PackedModel) -> MedusaHeads:
    """The heads of a checkpoint in any layout, on the target's device, in its dtype.

    Raises:
        CheckpointError: tensors that are missing, left over or of another shape, or heads for another target.
    """
    layout = Layout.of(checkpoint)
    plan, first = layout.plan, "blocks.0.layers.0.weight"
    stated = checkpoint.config.get("medusa_num_heads")
    if stated not in (None, layout.num_heads):
        logger.info("%s: config.json says %s heads; the file has %d.", checkpoint.name, stated, layout.num_heads)
    is_own_config = checkpoint.config.get("model_type", "medusa") == "medusa"  # a merged one's is the target's
    scale = checkpoint.config.get("logit_scale", 1.0) if is_own_config else 1.0
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise checkpoint.error(f"config.json has logit_scale = {scale!r}; it must be a number.")
    if first not in plan:
        raise checkpoint.error(f"has no {first} (0.0.linear.weight in the original layout).")
    hidden_size = plan.matrix(first)[0]
    sizes = [plan.shape(name)[0] for name in plan.sources if name.startswith("lm_heads.")]
    vocab_size = sizes[0] if sizes else target.vocab_size
    check_target(checkpoint, target, hidden_size, None if "token_map" in plan else vocab_size)
    target_ids = _target_ids(checkpoint, target, plan, vocab_size)
    with torch.device("meta"):
        heads = MedusaHeads(
            hidden_size,
            layout.num_heads,
            layout.num_blocks,
            vocab_sizes=[vocab_size] * layout.num_lm_heads,
            bias="blocks.0.layers.0.bias" in plan,
            target_head=target_head(target),
            scale=float(scale),
        )
    load_module(heads, plan, *place_of(target))
    share_equal(heads)
    heads.target_ids = target_ids
    return heads


def share_equal(module: nn.Module) -> None:
    """Make neighbours with equal weights one: the original code repeats one block, and its files hold a copy per place."""
    for blocks in [each for each in module.modules() if isinstance(each, (nn.ModuleList, nn.Sequential))]:
        for i in range(1, len(blocks)):
            own, before = blocks[i].state_dict(), blocks[i - 1].state_dict()
            if own.keys() == before.keys() and all(torch.equal(own[name], before[name]) for name in own):
                blocks[i] = blocks[i - 1]


def _target_ids(checkpoint: Checkpoint, target: PackedModel, plan: Plan, size: int) -> torch.Tensor | None:
    """`token_map`, taken out of the plan: int64 [size] ids of the target's tokens."""
    if "token_map" not in plan:
        return None
    ids = plan.tensor("token_map").long()
    del plan.sources["token_map"]
    if tuple(ids.shape) != (size,):
        raise checkpoint.error(f"token_map has shape {list(ids.shape)}, for heads with {size} logits.")
    if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size or len(torch.unique(ids)) < size:
        raise checkpoint.error(
            f"token_map holds ids from {int(ids.min())} to {int(ids.max())} or one of them twice; the target has "
            f"{target.vocab_size} tokens."
        )
    return ids.to(place_of(target)[0])


# ---- drafting -------------------------------------------------------------------------------------------------------


@register(MedusaConfig)
class MedusaGenerator(LastHiddenGenerator):
    """Head i guesses the token i + 1 places behind the newest; nodes of one depth share their guesses."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        checkpoint = config.open_head(lambda each: is_original(each) or is_converted(each))
        self.heads = load_once(config, target, lambda: load_medusa(checkpoint, target))
        self.vocabulary = DraftVocabulary(target.vocab_size, self.heads.target_ids)
        self.set_heads(self.heads, len(self.heads.blocks))

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        """The first head's guesses."""
        hidden, _ = roots
        self.state = hidden[:, None]
        return self.heads(0, hidden)

    def expand(self, level: Level) -> torch.Tensor:
        """The next head's guesses [R, 1, Vd]: they depend on the text only."""
        self.state = self.remaining(level)
        return self.heads(level.depth, self.state)
