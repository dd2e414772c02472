"""Medusa (Cai et al. 2024): one head per depth reads the target's last hidden state; heads do not see drafted tokens; method `medusa`."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ..core.output import Taps
from ..model.packed_model import PackedModel
from .base import DrafterContext
from .checkpoints import target_parts
from .checkpoints.config import proposed_length
from .checkpoints.files import Checkpoint, Plan, counted, one_copy, register_format, renaming, share_equal
from .checkpoints.keys import FLAG, KIND, NUMBER, Key, Table, integer, one_of
from .growing.last_hidden import LastHiddenConfig, LastHiddenGenerator
from .growing.tree_growth import DraftLevel
from .registry import register


class ResidualBlocks(nn.Module):
    """A stack of residual blocks u + SiLU(W u + b)."""

    def __init__(self, hidden_size: int, num_blocks: int, bias: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(num_blocks))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., H] to the same."""
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class MedusaHeads(nn.Module):
    """All heads of a checkpoint, with the names of vLLM's layout.

    Args:
        vocab_sizes: those of the language-model heads: one per head, one for all, or none (then all use the target's).
        target_head: the target's language-model head, for heads that have none.

    Attributes:
        target_ids: int64 [Vd], the target's id of each token in the heads' vocabulary; None: the same ids.
        taps: the target's state that the heads read.
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
        self.taps = Taps(last_hidden=True, newest_only=True)
        self._target_head = [target_head]  # in a list, so that it is not a submodule

    def scoring(self) -> Sequence[nn.Module]:
        """The language-model heads: one per head, or one for all."""
        return list(self.lm_heads) or self._target_head

    def forward(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [.., Vd] of head `index` from hidden states [.., H]."""
        lm_heads = self.scoring()
        logits = lm_heads[min(index, len(lm_heads) - 1)](self.blocks[index](hidden))
        return logits if self.scale == 1.0 else logits * self.scale


logger = logging.getLogger(__name__)

_PREFIX = re.compile(r"medusa_heads?\.")
# To vLLM's layout; original language-model heads (`{head}.{last}`) keep their names.
_CONVERTED = ((_PREFIX.pattern, ""), (r"(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."))
_TABLE = Table(
    {
        "kind": Key(one_of("medusa"), places=KIND),
        "num_heads": Key(integer(), places=("medusa_num_heads", "num_heads")),
        "original_lm_head": Key(FLAG),
        "medusa_fc_bias": Key(FLAG, tensor="blocks.0.layers.0.bias"),
        "logit_scale": Key(NUMBER, default=1.0),
    },
    nothing=frozenset({
        # the file's tensors are counted and measured
        "medusa_num_layers", "num_hidden_layers", "num_layers", "hidden_size", "medusa_hidden_size", "vocab_size",
        "medusa_vocab_size", "truncated_vocab_size", "version", "max_paths", "topk", "max_seq_len", "model_type",
        "head_weight_decay",
    }),
    has_layers=False,
)  # fmt: skip


register_format(
    "Medusa (FasterDecoding/medusa-*: {head}.{block}.linear; medusa-1.0-*: medusa_head.* merged with the target)",
    "medusa",
    lambda checkpoint: checkpoint.any(r"(medusa_heads?\.)?\d+\.\d+\.linear\.weight$"),
)
register_format(
    "Medusa as converted for vLLM, and of speculators (abhigoyal/vllm-medusa-*: blocks.{head}.layers.{block})",
    "medusa",
    lambda checkpoint: checkpoint.any(r"(medusa_heads?\.)?blocks\.\d+\.layers\.\d+\.weight$"),
)


def _planned(checkpoint: Checkpoint, has_one_head: bool) -> tuple[Plan, int, int, int]:
    """The tensors under the names of vLLM's layout; the numbers of heads and blocks, counted because original config.json files say 2
    heads where there are 5; and that of language-model heads (0: the target's is used; 1: all heads share one)."""
    if checkpoint.any(_PREFIX.pattern) and not all(map(_PREFIX.match, checkpoint.names())):
        checkpoint = Checkpoint(checkpoint.folder, checkpoint.name, wanted=lambda name: bool(_PREFIX.match(name)))
    names = list(map(renaming(*_CONVERTED), checkpoint.names()))
    matches = [match for match in (re.match(r"blocks\.(\d+)\.layers\.(\d+)\.", name) for name in names) if match]
    num_heads, num_blocks = (
        counted(checkpoint, (int(match[group]) for match in matches), what)
        for group, what in ((1, "head"), (2, "block"))
    )
    one_for_all = has_one_head or (
        "lm_head.weight" in names and not any(name.startswith("lm_heads.") for name in names)
    )

    rules = [*_CONVERTED, (rf"(\d+)\.{num_blocks}\.weight$", r"lm_heads.\1.weight")]
    rules += [(r"lm_heads?\.(\d+\.)?weight$", "lm_heads.0.weight")] if one_for_all else []
    canonical = renaming(*rules)
    plan = Plan(checkpoint, one_copy(checkpoint, canonical) if one_for_all else canonical)
    has_own = any(name.startswith("lm_heads.") for name in plan.sources)
    return plan, num_heads, num_blocks, has_own * (1 if one_for_all else num_heads)


def load_medusa(checkpoint: Checkpoint, target: PackedModel) -> MedusaHeads:
    """Load the heads of a checkpoint in any layout, on the target's device, in its dtype. Raises CheckpointError: tensors are missing,
    unused or of another shape, or the heads are for another target."""
    # a merged checkpoint has the target's config.json
    described = Checkpoint(checkpoint.folder, checkpoint.name)
    if checkpoint.config.get("model_type", "medusa") != "medusa" and "speculators_model_type" not in checkpoint.config:
        described.config = {}
    plan, *numbers, num_lm_heads = _planned(checkpoint, bool(described.config.get("original_lm_head")))
    given, first = _TABLE.read(described, plan), "blocks.0.layers.0.weight"
    if given.num_heads not in (None, numbers[0]):
        logger.info("%s: config.json says %s heads; the file has %d.", checkpoint.name, given.num_heads, numbers[0])
    if first not in plan:
        raise checkpoint.error(f"has no {first} (0.0.linear.weight in the original layout).")
    hidden_size = plan.matrix(first)[0]
    sizes = [plan.matrix(name)[0] for name in plan.sources if name.startswith("lm_heads.")]
    if given.original_lm_head is False and not sizes:
        raise checkpoint.error("config.json says original_lm_head = false, but the file has no language-model heads.")
    target_ids = target_parts.mapped_ids(checkpoint, plan, target, sizes[0] if sizes else None)
    lm_head = target_parts.shared_head(checkpoint, target, None if sizes else target_ids)
    vocab_size = sizes[0] if sizes else target.vocab_size
    is_whole = target_ids is None and "token_map" not in plan
    target_parts.check_target(checkpoint, target, hidden_size, vocab_size if is_whole else None)
    if "token_map" in plan:
        ids = checkpoint.tensor(plan.sources.pop("token_map")).long()
        target_ids = target_parts.checked_ids(checkpoint, target, "token_map", ids, vocab_size)
    has_bias = "blocks.0.layers.0.bias" in plan
    make = partial(
        MedusaHeads, hidden_size, *numbers, [vocab_size] * num_lm_heads, has_bias, lm_head, given.logit_scale
    )
    heads = target_parts.built(checkpoint, plan, target, make)
    share_equal(heads)
    heads.target_ids = target_ids
    if given.kind is not None:  # trained on the last layer's output before the last norm
        heads.taps = Taps(layers=(target.config.num_hidden_layers,), newest_only=True)
    return heads


@dataclass
class MedusaConfig(LastHiddenConfig):
    """Medusa: several heads on the target's last hidden state each guess one of the next tokens. A chain by default; heads
    are made for trees: `speculative_token_tree` "medusa_mc_sim_7b_63", or one measured with `hf-specdec calibrate`.

    `max_paths` and `topk` in a converted checkpoint's config.json bound the trees of an engine that built them from it; they
    say nothing about the weights and are not used here.
    """

    name = "medusa"
    requires = ("Medusa heads trained for the target: 'model'",)

    def open(self, wanted: Callable[[str], bool] | None = None) -> Checkpoint:
        """The checkpoint. If it is merged with the target (Medusa-2), shards that hold only the target are left out."""
        return super().open(wanted or (lambda name: not name.startswith(("model.", "transformer."))))


@register(MedusaConfig)
class MedusaGenerator(LastHiddenGenerator):
    """Drafts with Medusa heads: head i predicts the token i + 1 places after the newest, the same for all nodes of a depth."""

    def __init__(self, config: MedusaConfig, target: PackedModel, context: DrafterContext | None = None):
        checkpoint = config.open_head()
        self.heads = target_parts.load_once(config, target, lambda: load_medusa(checkpoint, target))
        config = config.with_default_length(proposed_length(checkpoint))
        super().__init__(config, target, self.heads, len(self.heads.blocks))
        head = self.heads.scoring()[0]
        if not self.heads.lm_heads and type(head) is nn.Linear and config.quantization is None:
            # A layer with the same parameters, whatever is assigned to them, so that the target's own goes on computing as it does. To
            # quantize the layer would be to quantize the target's.
            layer = nn.Linear(head.in_features, head.out_features, device="meta")
            layer._parameters = head._parameters
            self.heads = self.use_heads("lm_heads", [layer])
        self.taps = self.heads.taps
        self.vocabulary = target_parts.DraftVocabulary(target.vocab_size, self.heads.target_ids)

    def score_only(self, rows: Callable[[nn.Module], nn.Module]) -> None:
        self.heads = self.use_heads("lm_heads", map(rows, self.heads.scoring()))

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        hidden, _ = roots
        self.state = hidden[:, None]
        return self.heads(0, hidden)

    def expand(self, level: DraftLevel) -> torch.Tensor:
        """The next head's logits [R, 1, Vd], which depend on the text only."""
        self.state = self.remaining(level)
        return self.heads(level.depth, self.state)
