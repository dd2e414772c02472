"""DFlash (z-lab): a drafter of a few layers that fills a block of mask tokens in one forward, trained at random anchors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from ..candidate_generators.dflash.head import DFlashDrafter, DFlashLayout
from ..core.names import CACHE
from ..core.output import Taps
from .base import Exported, Guesses, HeadTrainer, StepLoss, register
from .batch import Batch
from .draft_layer import last_norm_scale, layer_numbers, layer_shape, state_sizes
from .losses import token_loss
from .options import DFlashOptions, TrainingError
from .target import TargetModel
from .unrolled import attend, widened

logger = logging.getLogger(__name__)

ATTENTION_NAME = "hf_specdec_blocks"  # registered with transformers under this name
_BLOCKS_AT_ONCE = 32  # blocks of a text that share a row of the attention mask


@register(DFlashOptions)
class DFlashTrainer(HeadTrainer):
    """Trains DFlash on blocks of mask tokens after random anchors of a text. One forward runs all blocks; its mask lets a block
    see the target's hidden states before its anchor, and itself. Slot j has the weight exp(-(j - 1) / loss_decay)."""

    method = "dflash"
    formats = ("original", "speculators")
    options: DFlashOptions
    head: DFlashDrafter

    def __init__(self, options: DFlashOptions, target: TargetModel):
        super().__init__(options, target)
        self.target_layers = target_layers(options, target)
        # The drafter reads layers' outputs: index i + 1 among transformers' hidden states.
        self.taps = Taps(last_hidden=options.objective == "kl", layers=tuple(i + 1 for i in self.target_layers))
        self.config = layers_config(options, target)
        self.num_guesses = options.block_size - 1

    def build(self, token_counts: torch.Tensor) -> nn.Module:
        """Linear layers have transformers' initialisation, the last norm the target's weights; embeddings and lm_head are the target's."""
        self.mask_token_id = mask_token(self.options, self.target, token_counts)
        layout = DFlashLayout(
            layers=self.config, block_size=self.options.block_size, mask_token_id=self.mask_token_id, tapped=self.taps.layers,
            from_anchor=False, causal=(False, True), like_speculators=False, heads={},
        )  # fmt: skip
        owns: dict[str, tuple[int, ...] | None] = {"embed_tokens": None, "lm_head": None}
        drafter = DFlashDrafter(layout, self.target.hidden_size, self.target.vocab_size, owns)
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
        with torch.no_grad():
            drafter.norm.weight.copy_(last_norm_scale(self.target))
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
        hidden = self.target.embed_tokens(ids).float()
        cache = BlocksCache(self._context_keys_values(context, batch.position_ids), parts)
        mask = blocks_mask(anchors, batch.input_ids.shape[1], size)
        rotary = self.rotary(hidden, positions)
        for layer in head.layers:
            hidden = layer(
                hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotary, **{CACHE: cache}
            )
        return head.norm(hidden).view(len(batch.input_ids), parts * together, size, -1)[:, :num_anchors]

    def _context_keys_values(
        self, context: torch.Tensor, position_ids: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [B, heads, S, D] of every layer from context [B, S, H], without input norm as in `BlockHead`."""
        cos, sin = self.rotary(context, position_ids)
        out = []
        for layer in self.head.layers:
            attention: Any = layer.self_attn
            shape = (*context.shape[:2], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(context).view(shape)).transpose(1, 2)
            keys, _ = apply_rotary_pos_emb(keys, keys, cos, sin)
            out.append((keys, attention.v_proj(context).view(shape).transpose(1, 2)))
        return out

    def loss(self, batch: Batch) -> StepLoss:
        """Sum over blocks and slots j of exp(-(j - 1) / loss_decay) times KL(target || drafter), or cross-entropy."""
        anchors, chosen = random_anchors(batch.ahead(batch.loss_mask, 1), self.options.num_anchors)
        hidden = self.block_hidden(batch, anchors)[:, :, 1:]
        slots = torch.arange(1, self.options.block_size, device=anchors.device)
        places = anchors[..., None] + slots  # [B, A, K], positions of the slots' tokens
        inside = places < batch.input_ids.shape[1]
        places = places.clamp(max=batch.input_ids.shape[1] - 1).flatten(1)
        counts = batch.loss_mask.gather(1, places).view_as(inside) & inside & chosen[..., None]
        labels = batch.input_ids.gather(1, places).view_as(inside)[counts]
        logits = self.lm_head(hidden[counts]).float()
        teacher = None
        if self.options.objective == "kl":
            rows = torch.arange(len(anchors), device=anchors.device)[:, None, None].expand_as(counts)[counts]
            teacher = self.target.logits(batch.hidden()[rows, places.view_as(inside)[counts] - 1])
        weights = torch.exp((1 - slots) / self.options.loss_decay).expand_as(counts)[counts]
        right = (logits.argmax(-1) == labels).float()
        slot = slots.expand_as(counts)[counts]
        metrics = {f"accuracy_{j}": (right[slot == j].sum(), (slot == j).sum()) for j in range(1, self.num_guesses + 1)}
        return StepLoss((weights * token_loss(logits, labels, teacher)).sum(), weights.sum(), metrics)

    def guesses(self, batch: Batch) -> Guesses:
        """Guesses of blocks at up to `num_anchors` positions per text, spread evenly over those that an answer's token follows."""
        anchors, chosen = even_anchors(batch.ahead(batch.loss_mask, 1), self.options.num_anchors)
        tokens = self.lm_head(self.block_hidden(batch, anchors)[:, :, 1:][chosen]).argmax(-1)
        rows = torch.arange(len(anchors), device=anchors.device)[:, None].expand_as(anchors)
        return Guesses(tokens, rows[chosen], anchors[chosen])

    def take_over(self, tensors: dict[str, torch.Tensor]) -> None:
        """As in the base. `fc` is scaled, because training divides the target's states by their sizes."""
        self.head.load_state_dict({**tensors, "fc.weight": tensors["fc.weight"].to(self.sizes) * self.sizes})

    def exported(self, form: str) -> Exported:
        """z-lab's files (`dflash_config`), or speculators', which hold the target's embeddings and head too."""
        options, target = self.options, self.target
        layers = {k: v for k, v in self.config.to_dict().items() if k not in ("dtype", "architectures")}
        tensors: dict[str, torch.Tensor] = dict(self.head.state_dict())
        tensors["fc.weight"] = tensors["fc.weight"] / self.sizes  # training divides states by these
        if form == "original":
            config = {
                **layers,
                "architectures": ["DFlashDraftModel"],
                "block_size": options.block_size,
                "num_target_layers": target.num_layers,
                "dflash_config": {"mask_token_id": self.mask_token_id, "target_layer_ids": self.target_layers},
            }
            return Exported(tensors, config)
        tensors["embed_tokens.weight"] = target.embed_tokens.weight  # pyright: ignore[reportArgumentType]
        tensors["lm_head.weight"] = target.lm_head.weight
        config = {
            **self.speculators_config("DFlashSpeculator", layers),
            "draft_vocab_size": target.vocab_size,
            "target_hidden_size": target.hidden_size,
            "block_size": options.block_size,
            "mask_token_id": self.mask_token_id,
            "aux_hidden_state_layer_ids": list(self.taps.layers),
            "sample_from_anchor": False,
            "sliding_window_non_causal": False,
        }
        return Exported(tensors, config)


class BlocksCache:
    """Used by attention layers as their cache: puts a text's context keys and values [B, heads, S, D], per layer, before those of its
    blocks. `parts`: rows that a text's blocks are spread over.
    """

    def __init__(self, context: list[tuple[torch.Tensor, torch.Tensor]], parts: int):
        self.context, self.parts = context, parts

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values [B * parts, heads, S + T, D] of a layer, from those of its blocks [B * parts, heads, T, D]."""
        context = [states.to(keys).repeat_interleave(self.parts, dim=0) for states in self.context[layer_idx]]
        return torch.cat([context[0], keys], dim=2), torch.cat([context[1], values], dim=2)


def blocks_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """transformers' attention function: each block's slots attend to the keys of `blocks_mask`."""
    with torch.autocast(query.device.type, enabled=False):
        wide_query, wide_key, wide_value = widened(query, key, value)
        out = attend(wide_query, wide_key, wide_value, scaling, attention_mask)
    return out.transpose(1, 2).to(query.dtype), None


AttentionInterface.register(ATTENTION_NAME, blocks_attention)


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
    if options.target_layers is None:
        return usual
    return layer_numbers("--target-layers", options.target_layers, last, ",".join(map(str, usual)))


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


def mask_token(options: DFlashOptions, target: TargetModel, token_counts: torch.Tensor) -> int:
    """The id in mask slots. The first available of: the given one; the tokenizer's mask token; an embedding row after the tokenizer's
    last token; the padding token; another special token that the target does not write. Raises TrainingError: there is none.
    """
    table: torch.Tensor = target.embed_tokens.weight  # pyright: ignore[reportAssignmentType]
    rows, tokenizer = len(table), target.tokenizer
    if options.mask_token_id is not None:
        if options.mask_token_id >= rows:
            raise TrainingError(
                f"--mask-token-id {options.mask_token_id}: the target has embeddings for {rows} tokens."
            )
        return options.mask_token_id
    special: Sequence[int] = getattr(tokenizer, "all_special_ids", ())
    candidates = [("mask token", tokenizer.mask_token_id), ("first id without a token", len(tokenizer))]
    candidates += [("padding token", tokenizer.pad_token_id)] + [("special token", i) for i in special]
    for what, token in candidates:
        if token is not None and token < rows and token not in target.end_tokens and not token_counts[token]:
            logger.info("Slots to be drafted hold the tokenizer's %s, id %d.", what, token)
            return token
    raise TrainingError(
        "Every token of the target's tokenizer may occur in texts, so none can be the mask: name one with --mask-token-id."
    )
