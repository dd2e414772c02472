"""Drafting with DFlash, DFlash2, DSpark and Domino: one forward of a small drafter fills a whole block; keys of method `dflash`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ...config import config_key
from ...core.output import PackedOutput, Taps
from ...core.rows import RowInput
from ...core.sequence import Sequence
from ...kernels.transfer import upload
from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..checkpoints.config import HeadConfig, proposed_length
from ..checkpoints.layers import capped
from ..checkpoints.target_parts import gather_features, load_once
from ..growing.features import FeatureGenerator
from ..growing.tree_growth import DraftLevel
from ..registry import register
from .checkpoint import load_dflash, read_layout
from .streams import is_streams, load_streams, read_streams


@dataclass
class DFlashConfig(HeadConfig):
    """DFlash, DFlash2, DSpark and Domino: a drafter of a few layers reads the target's hidden states and predicts a block of tokens in
    one forward. By default the block is as long as it was trained.

    DSpark's confidence head estimates the probability that all of a draft is accepted. The draft ends where that falls below
    `draft_confidence_threshold`.
    """

    name = "dflash"
    requires = ("a DFlash, DFlash2, DSpark or Domino drafter trained for the target: 'model'",)
    default_longest_draft = 15

    input_embedding_scale: float | None = config_key(
        None,
        "for a drafter that reads the target's embeddings: their scale (Gemma has one); by default the file's, or its format's",
        minimum=0.0,
    )


@register(DFlashConfig)
class DFlashGenerator(FeatureGenerator):
    """Drafts with a DFlash, DFlash2, DSpark or Domino checkpoint.

    All depths share one forward. In plain DFlash all nodes of a depth share their logits; the other heads correct them for
    each node's path. A block has the slots that `num_speculative_tokens` needs, whatever the rows' own limits, so that a
    row's draft does not depend on the rest of the batch. Blocks shorter than the trained one are cut, as in z-lab's code and
    vLLM.

    Attributes:
        hidden: [R, depths, H], of the current round, for the heads.
        base: [R, depths, Vd], the block's own logits.
        survival: the confidence head's estimates, if the checkpoint has one.
    """

    hidden: torch.Tensor
    base: torch.Tensor
    drafts_twice = True
    tokens_ahead = 0

    def __init__(self, config: DFlashConfig, target: PackedModel, context: DrafterContext | None = None):
        checkpoint = config.open_head()
        scale = config.input_embedding_scale
        has_streams = is_streams(checkpoint)
        layout = read_streams(checkpoint, target) if has_streams else read_layout(checkpoint, target, scale)
        self.layout, load = layout, load_streams if has_streams else load_dflash
        config = config.with_default_length(proposed_length(checkpoint) or layout.num_tokens)
        shape = config.shape_within(layout.num_tokens)
        super().__init__(config, target, context, shape, has_loop=False)  # one forward has drafted all depths
        loaded = load_once(config, target, lambda: load(checkpoint, layout, target, config.prepack_weights), scale)
        # not native: its blocks are packed once per kind of attention
        self.block = self.use(loaded, native=False, graphs=not has_streams)
        self.sequential, self.confidence = self.block.module.sequential, self.block.module.confidence_head
        self.taps = Taps(layers=tuple(dict.fromkeys(layout.tapped)))
        self.num_slots = shape.depth + (not layout.from_anchor)

    def moved_caches(self) -> None:
        """None: moving the rows of its cache is not supported."""

    def score_only(self, rows: Callable[[nn.Module], nn.Module]) -> None:
        if self.sequential is not None:
            raise self.config.fail(
                "draft_vocabulary",
                f"cannot be used: {type(self.sequential).__name__} corrects the logits of all tokens.",
            )
        super().score_only(rows)

    # ---- reading the text -------------------------------------------------------------------------------------------

    def features(self, output: PackedOutput, index: torch.Tensor) -> torch.Tensor:
        """The drafter's context (see `BlockHead.context`), which is smaller than the tapped layers it is made of."""
        layers = [output.layers[i] for i in self.layout.tapped]
        return self.block.context(gather_features(layers, index, self.head.device, self.head.dtype))

    # ---- drafting ---------------------------------------------------------------------------------------------------

    def slots_of_draft(self, limit: int) -> int:
        return self.num_slots

    def roots(self, sequences: list[Sequence], limits: list[int]) -> tuple[torch.Tensor, ...]:
        """Read all unread tokens of each text and run the block; logits [R, Vd] of the first depth."""
        chunk = self.config.prefill_chunk_size
        while unread := [seq for seq in sequences if self.num_unread(seq)]:
            self.read(unread, chunk)
        anchors = upload([seq.tokens[-1] for seq in sequences], self.head.device)
        ids = torch.full((len(sequences), self.num_slots), self.layout.mask_token_id, device=self.head.device)
        ids[:, 0] = anchors
        rows = [RowInput(seq.id, block, self.num_read(seq)) for seq, block in zip(sequences, ids, strict=True)]
        embedded = self._embed(ids.flatten())
        if self.block.module.mask is not None:
            embedded.view(*ids.shape, -1)[:, 1:] = self.block.module.mask
        hidden: torch.Tensor = self.block.block(rows, embedded, self.cache).view(*ids.shape, -1)
        first = 0 if self.layout.from_anchor else 1
        self.hidden = hidden[:, first : first + max(limits)]
        logits = self.lm_head(self.block.module.before_head(self.hidden))
        self.base = capped(logits, self.layout.logit_scale, self.layout.softcap)
        self.survival = None
        size = self.sequential.state_size if self.sequential is not None else 0
        self.state = hidden.new_zeros(len(sequences), 1, size)
        if first and self.layout.like_speculators and size:
            self._correct(hidden[:, 0], anchors[:, None], self.state, self.base[:, 0], 1)
        return (self._follow_paths(1, anchors[:, None], self.state, None)[:, 0],)

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        return roots[0]

    def expand(self, level: DraftLevel) -> torch.Tensor:
        """The block's logits at the next depth, [R, 1, Vd], or corrected for each node's path, [R, F, Vd]."""
        state, survival = self.carried(level), self.survival
        self.base, self.hidden = level.keep(self.base), level.keep(self.hidden)
        if survival is not None:
            survival = level.keep(survival).gather(1, level.parents)
        return self._follow_paths(level.depth + 1, level.tokens, state, survival)

    def _follow_paths(self, depth: int, previous: torch.Tensor, state: torch.Tensor, survival) -> torch.Tensor:
        """Logits [R, F or 1, Vd] at `depth`, after the tokens `previous` [R, F]. Updates the paths' states and survival."""
        base, hidden = self.base[:, depth - 1 : depth], self.hidden[:, depth - 1]
        if self.confidence is not None and self.config.draft_confidence_threshold:
            of_paths = hidden[:, None].expand(-1, previous.shape[1], -1)
            accepted = self.confidence(self.block.module.confidence_features(of_paths, previous))
            self.survival = accepted if survival is None else survival + accepted
        if self.sequential is None:
            return base
        bias = self._correct(hidden, previous, state, base[:, 0], depth)
        return base if bias is None else base + bias

    def _correct(
        self, hidden: torch.Tensor, previous: torch.Tensor, state: torch.Tensor, base: torch.Tensor, depth: int
    ):
        """Run the sequential head on the paths that end in `previous` [R, F]; its correction of the logits [R, F, Vd] or None."""
        assert self.sequential is not None
        rows, count = previous.shape
        flat = previous.flatten()
        hidden, base = (row[:, None].expand(-1, count, -1).flatten(0, 1) for row in (hidden, base))
        new, bias = self.sequential(state.flatten(0, 1), flat, hidden, base, self._embed, depth)
        self.state = new.view(rows, count, -1)
        return None if bias is None else bias.view(rows, count, -1)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        device = self.target.device if self.block.module.embed_tokens is None else self.head.device
        return self.block.module.embeddings(ids[None].to(device), self.head)[0]
