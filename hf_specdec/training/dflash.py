"""DFlash (z-lab), DFlash2, DSpark and Domino: a drafter of a few layers fills a block of mask tokens in one forward; trained at random
anchors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ..candidate_generators.dflash.head import DFlashDrafter, DFlashLayout
from ..core.names import CACHE
from ..core.output import Taps
from .base import Exported, Guesses, HeadTrainer, StepLoss, register
from .batch import Batch
from .draft_layer import embedding_table, last_norm_scale, layer_numbers, layer_shape, mask_token, state_sizes
from .losses import TAUGHT, Depth, acceptance, draft_loss, token_loss
from .options import DFlashOptions, TrainingError
from .target import TargetModel
from .unrolled import ATTENTION_NAME

_BLOCKS_AT_ONCE = 32  # blocks of a text that share a row of the attention mask
# what makes a head's correction, or a convolution's change, nothing at first
_ZERO = ("markov_w2.weight", "embed_proj.2.weight", "successor_codebook", "kernel_projection.weight")
_NAMES = {"dflash": "DFlash", "dspark": "DSpark", "domino": "Domino", "dflash2": "DFlash2"}


@register(DFlashOptions)
class DFlashTrainer(HeadTrainer):
    """Trains DFlash on blocks of mask tokens after random anchors of a text. One forward runs all blocks; its mask lets a block
    see the target's hidden states before its anchor, and itself. The weight of the k-th drafted token is exp(-(k - 1) / loss_decay),
    divided by the sum of these. A head that corrects the block's logits reads the text's tokens."""

    formats = ("original", "speculators")
    options: DFlashOptions
    head: DFlashDrafter

    def __init__(self, options: DFlashOptions, target: TargetModel):
        super().__init__(options, target)
        if options.head_rank is not None and options.variant == "dflash":
            raise TrainingError("--head-rank is for the other variants: plain DFlash has no such head.")
        if options.markov_head_type != "vanilla" and options.variant != "dspark":
            raise TrainingError("--markov-head-type is for --variant dspark.")
        self.target_layers = target_layers(options, target)
        # The drafter reads layers' outputs: index i + 1 among transformers' hidden states.
        is_taught = options.loss in TAUGHT or options.variant == "dspark"
        self.taps = Taps(last_hidden=is_taught, layers=tuple(i + 1 for i in self.target_layers))
        self.config = layers_config(options, target)
        self.first = int(options.variant in ("dflash", "dflash2"))  # the first slot that drafts
        self.num_guesses = options.block_size - self.first

    def build(self, token_counts: torch.Tensor) -> nn.Module:
        """transformers' initialisation; last norm, embeddings and lm_head as the target's; corrections begin by doing nothing."""
        self.mask_token_id = mask_token(self.options.mask_token_id, self.target, token_counts)
        self.heads = heads_of(self.options, self.target)
        layout = DFlashLayout(
            layers=self.config, block_size=self.options.block_size, mask_token_id=self.mask_token_id, tapped=self.taps.layers,
            from_anchor=not self.first, causal=(False, True), like_speculators=False, heads=self.heads,
        )  # fmt: skip
        owns: dict[str, tuple[int, ...] | None] = {"embed_tokens": None, "lm_head": None}
        drafter = DFlashDrafter(layout, self.target.hidden_size, self.target.vocab_size, owns)
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
        with torch.no_grad():
            drafter.norm.weight.copy_(last_norm_scale(self.target))
            for name, parameter in drafter.named_parameters():
                if name.endswith(_ZERO):
                    parameter.zero_()
                elif name.endswith("base_kernel"):
                    parameter.zero_()[:, 0] = 1.0
                elif name.endswith("predecessor_codebook"):
                    nn.init.normal_(parameter)
        self.sizes = state_sizes(self.target, self.taps.layers, token_counts)
        self.rotary = Qwen3RotaryEmbedding(self.config).to(self.target.device)
        self.lm_head = self.target.lm_head_float32()
        return drafter.to(self.target.device)

    def block_hidden(self, batch: Batch, anchors: torch.Tensor) -> torch.Tensor:
        """Final hidden states [B, A, block_size, H] of blocks after anchors [B, A] (positions of the newest tokens)."""
        head, size = self.head, self.options.block_size
        # A text's blocks are split over several rows: one mask over all of them would be large and mostly False.
        num_anchors = anchors.shape[1]
        parts = -(-num_anchors // _BLOCKS_AT_ONCE)
        together = -(-num_anchors // parts)
        anchors = F.pad(anchors, (0, parts * together - num_anchors))
        states = torch.cat([batch.layers[i] for i in self.taps.layers], dim=-1)
        context = head.hidden_norm(head.fc(states / self.sizes))
        ids = torch.full((*anchors.shape, size), self.mask_token_id, device=anchors.device)
        ids[..., 0] = batch.input_ids.gather(1, anchors)
        ids, anchors = ids.view(-1, together * size), anchors.view(-1, together)
        positions = (anchors[..., None] + torch.arange(size, device=anchors.device)).flatten(1)
        hidden = self._embed(ids)
        cos, sin = (x[:, None] for x in self.rotary(context, batch.position_ids))
        pairs = [head.context_keys_values(i, context, cos, sin) for i in range(len(head.layers))]
        cache = DynamicCache([tuple(states.repeat_interleave(parts, dim=0) for states in pair) for pair in pairs])
        mask = blocks_mask(anchors, batch.input_ids.shape[1], size)
        rotary, more = self.rotary(hidden, positions), {}
        if head.is_convolved:
            more["slots"] = torch.arange(size, device=anchors.device).repeat(together)
        for layer in head.layers:
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=rotary,
                **{CACHE: cache},
                **more,
            )
        return head.norm(hidden).view(len(batch.input_ids), parts * together, size, -1)[:, :num_anchors]

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.target.embed_tokens(ids).float()

    def logits(
        self, batch: Batch, rows: torch.Tensor, anchors: torch.Tensor, hidden: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """For every drafted token of n blocks: the slot's hidden state [n, H], the token before [n] in the text, the slot's own logits
        [n, V] and the corrected ones.

        Args:
            rows, anchors: int64 [n].
            hidden: [n, block_size, H], of `block_hidden`.
        """
        correct, last = self.head.sequential, batch.input_ids.shape[1] - 1
        state = hidden.new_zeros(len(rows), 0 if correct is None else correct.state_size, dtype=torch.float32)
        for k in range(self.num_guesses):
            slot, before = hidden[:, self.first + k], batch.input_ids[rows, (anchors + k).clamp(max=last)]
            base, bias = self.lm_head(slot).float(), None
            if correct is not None:
                state, bias = correct(state, before, slot, base, self._embed, k + 1)
            yield slot, before, base, base if bias is None else base + bias

    def loss(self, batch: Batch) -> StepLoss:
        """The sum over blocks and drafted tokens of the tokens' losses. Domino learns the block's own logits first, and the corrected ones
        from the middle of the run on; DFlash2 both alike. DSpark's confidence learns the probability of acceptance."""
        anchors, chosen = random_anchors(batch.ahead(batch.loss_mask, 1), self.options.num_anchors)
        hidden = self.block_hidden(batch, anchors)[chosen]
        rows, anchors = chosen.nonzero()[:, 0], anchors[chosen]
        weights = [math.exp(-k / self.options.loss_decay) for k in range(self.num_guesses)]
        depths = self._depths(batch, rows, anchors, hidden)
        return draft_loss(self.options.loss, [weight / sum(weights) for weight in weights], len(rows), depths)

    def _depths(self, batch: Batch, rows: torch.Tensor, anchors: torch.Tensor, hidden: torch.Tensor) -> Iterator[Depth]:
        loss, last, teacher = self.options.loss, batch.input_ids.shape[1] - 1, None
        share = {"domino": max(0.0, 1.0 - 2.0 * self.progress), "dflash2": 0.5}.get(self.options.variant, 0.0)
        for k, (slot, before, base, logits) in enumerate(self.logits(batch, rows, anchors, hidden)):
            places = anchors + k + 1
            counts = (places <= last) & batch.loss_mask[rows, places.clamp(max=last)]
            labels = batch.input_ids[rows[counts], places[counts]]
            if self.taps.last_hidden:
                wanted = batch.hidden()[rows[counts], places[counts] - 1]
                teacher = self.target.probabilities(wanted)
                labels = teacher.argmax(-1) if loss in TAUGHT else labels
            right = logits[counts].argmax(-1) == labels
            if self.head.candidate_selector is not None:
                # it gives other tokens minus infinity; a loss of these must be finite
                logits = torch.where(logits.isneginf(), base, logits)
            logits = logits[counts]
            losses = added = token_loss(loss, logits, labels, teacher)
            if share:
                added = (1 - share) * losses + share * token_loss(loss, base[counts], labels, teacher)
            if self.head.confidence_head is not None and teacher is not None:
                sure = self.head.confidence_head.proj(self.head.confidence_features(slot, before))[counts, 0]
                rate = acceptance(logits, teacher).detach()
                added = added + F.binary_cross_entropy_with_logits(sure.float(), rate, reduction="none")
            yield counts.nonzero()[:, 0], losses, added, right

    def guesses(self, batch: Batch) -> Guesses:
        """Guesses of blocks at up to `num_anchors` positions per text, spread evenly over those that an answer's token follows."""
        anchors, chosen = even_anchors(batch.ahead(batch.loss_mask, 1), self.options.num_anchors)
        hidden = self.block_hidden(batch, anchors)[chosen]
        rows, anchors = chosen.nonzero()[:, 0], anchors[chosen]
        tokens = [logits.argmax(-1) for *_, logits in self.logits(batch, rows, anchors, hidden)]
        return Guesses(torch.stack(tokens, dim=1), rows, anchors)

    def take_over(self, tensors: dict[str, torch.Tensor]) -> None:
        """As in the base. `fc` is scaled, because training divides the target's states by their sizes."""
        state = {name: tensors[name.removeprefix("domino.")] for name in self.head.state_dict()}
        self.head.load_state_dict({**state, "fc.weight": state["fc.weight"].to(self.sizes) * self.sizes})

    def exported(self, form: str) -> Exported:
        """z-lab's files (`dflash_config`), or speculators', which hold the target's embeddings and head too."""
        options, target = self.options, self.target
        layers = {k: v for k, v in self.config.to_dict().items() if k not in ("dtype", "architectures")}
        prefix, heads = "" if form == "original" else "domino_head.", dict(self.heads)
        tensors = {name.replace("domino.", prefix): tensor for name, tensor in self.head.state_dict().items()}
        tensors["fc.weight"] = tensors["fc.weight"] / self.sizes  # training divides states by these
        if options.variant == "domino":
            heads["shift_label"] = True
        if form == "original":
            scale = getattr(target.embed_tokens, "embed_scale", None)
            if scale is not None:  # where it is missing, some readers take rows as they are, others cap logits too
                heads["input_embedding_scale"] = float(scale)
            if options.variant == "dspark":
                is_plain = self.config.num_key_value_heads == self.config.num_attention_heads
                heads["attention_mode"] = "mha" if is_plain else "gqa"
            dflash_config = {"mask_token_id": self.mask_token_id, "target_layer_ids": self.target_layers, **heads}
            config = {
                **layers,
                "architectures": [f"{_NAMES[options.variant]}DraftModel"],
                "block_size": options.block_size,
                "num_target_layers": target.num_layers,
                "dflash_config": dflash_config,
            }
            return Exported(tensors, config)
        tensors["embed_tokens.weight"] = embedding_table(target)
        tensors["lm_head.weight"] = target.lm_head.weight
        kind = "dflash" if options.variant == "domino" else options.variant
        config = {
            **self.speculators_config(f"{_NAMES[kind]}Speculator", layers, kind),
            **heads,
            "draft_vocab_size": target.vocab_size,
            "target_hidden_size": target.hidden_size,
            "block_size": options.block_size,
            "mask_token_id": self.mask_token_id,
            "aux_hidden_state_layer_ids": list(self.taps.layers),
            "sample_from_anchor": not self.first,
            "sliding_window_non_causal": False,
        }
        return Exported(tensors, config)


def blocks_mask(anchors: torch.Tensor, length: int, size: int) -> torch.Tensor:
    """bool [B, 1, A * size, length + A * size]: slots of a block see the context before its anchor [B, A], and each other."""
    block = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(size)
    before = torch.arange(length, device=anchors.device) < anchors.repeat_interleave(size, dim=1)[..., None]
    same = (block[:, None] == block).expand(len(anchors), -1, -1)
    return torch.cat([before, same], dim=-1)[:, None]


def random_anchors(valid: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions int64 [B, A], drawn without replacement from those `valid` [B, S], and whether each is used. A is at most `count`."""
    return _first_of(torch.rand(valid.shape, device=valid.device).masked_fill(~valid, -1.0), valid, count)


def even_anchors(valid: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `random_anchors`, but deterministic: spread evenly over the valid positions."""
    rank, total = valid.long().cumsum(1), valid.long().sum(1, keepdim=True).clamp(min=1)
    taken = valid & ((total <= count) | (rank * count // total > (rank - 1) * count // total))
    order = torch.arange(valid.shape[1], 0, -1, device=valid.device).expand(valid.shape)
    return _first_of(order.masked_fill(~taken, -1).float(), taken, count)


def _first_of(scores: torch.Tensor, valid: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    most = max(1, min(count, int(valid.sum(1).max())))
    anchors = scores.topk(most, dim=1).indices
    return anchors, valid.gather(1, anchors)


def target_layers(options: DFlashOptions, target: TargetModel) -> list[int]:
    """The target's layers (from 0) whose outputs are read: those given, or as many as the drafter has layers, spread from the second
    to the last but one. The last layer is excluded: transformers' hidden states hold its output only after the norm.
    """
    last = target.num_layers - 2
    count = min(options.num_layers, max(1, last))
    usual = [round(1 + i * (last - 1) / (count - 1)) for i in range(count)] if count > 1 else [max(0, last)]
    return list(layer_numbers("--target-layers", options.target_layers, last, usual))


def layers_config(options: DFlashOptions, target: TargetModel) -> Qwen3Config:
    """The configuration of the drafter's layers: Qwen3's, with the target's width, heads and positions."""
    theirs = getattr(target.config, "intermediate_size", None)
    config = Qwen3Config(
        **layer_shape(target, 32768),
        intermediate_size=options.intermediate_size or theirs or 3 * target.hidden_size,
        num_hidden_layers=options.num_layers,
        rms_norm_eps=1e-6,
        use_sliding_window=False,
        tie_word_embeddings=False,
    )
    config._attn_implementation = ATTENTION_NAME
    return config


def heads_of(options: DFlashOptions, target: TargetModel) -> dict[str, Any]:
    """The keys of the head that corrects a block's logits, as files name them; {} for DFlash."""
    rank, width, heads = options.head_rank or 256, target.hidden_size, {}
    if options.variant == "dspark":
        heads = {"markov_rank": rank, "markov_head_type": options.markov_head_type}
        heads |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    elif options.variant == "domino":
        heads = {"emb_dim": rank, "gru_hidden_dim": min(1024, width), "pure_draft_prefix_len": 1}
    elif options.variant == "dflash2":
        heads = {"conv_kernel_size": 2, "conv_group_size": math.gcd(16, width), "selector_rank": rank}
        heads["selector_top_k"] = min(16, target.vocab_size)
    return {"projector_type": options.variant, **heads} if heads else {}
