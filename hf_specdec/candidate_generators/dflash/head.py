"""The network of DFlash, DFlash2 (whose layers convolve a block's slots), DSpark and Domino drafters; how its block runs over pages."""

from __future__ import annotations

import copy
import dataclasses
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, rotate_half

from ...cache import PagedStaticCache
from ...core.names import CACHE
from ...core.rows import RowInput
from ...kernels.transfer import upload
from ...model.graphs import CapturedBatch, GraphRunner
from ...model.packed_batch import PackedBatch
from ...model.packed_head import PackedHead
from ..checkpoints.layers import Embeddings, RotaryPositions, decoder_layer

BEFORE, AFTER = 0, 1  # the sides of a sublayer


class SlotConvolution(nn.Module):
    """Mixes a slot's values with those of the slots before it in its block.

    Both kernels depend on the sublayer's input x: kernel[side, tap] = base[side, tap] + delta(x)[side, tap], where one delta serves a
    group of channels. Formula: z-lab/dflash (dflash/model.py).

    Args:
        size: H channels.
        num_taps: how many slots are mixed, the slot itself included.
        group_size: channels that share a delta.
    """

    def __init__(self, size: int, num_taps: int, group_size: int):
        super().__init__()
        self.shape, self.group_size = (2, num_taps, size // group_size), group_size
        self.base_kernel = nn.Parameter(torch.empty(2, num_taps, size))
        self.kernel_projection = nn.Linear(size, 2 * num_taps * (size // group_size), bias=False)

    def kernels(self, x: torch.Tensor) -> torch.Tensor:
        """[1, T, 2, taps, H] from a sublayer's input [1, T, H]."""
        delta = self.kernel_projection(x).unflatten(-1, self.shape)
        return self.base_kernel + delta.repeat_interleave(self.group_size, dim=-1)

    def forward(self, values: torch.Tensor, kernels: torch.Tensor, side: int, slots: torch.Tensor) -> torch.Tensor:
        """The mixed values [1, T, H].

        Args:
            values: [1, T, H].
            slots: [T], the slot of each packed token in its block: there is nothing before slot 0.
        """
        out = kernels[:, :, side, 0] * values
        for tap in range(1, min(self.shape[1], values.shape[1])):
            earlier = nn.functional.pad(values[:, :-tap], (0, 0, tap, 0)) * (slots >= tap)[None, :, None]
            out = out + kernels[:, :, side, tap] * earlier
        return out


class ConvolvedLayer(Qwen3DecoderLayer):
    """Qwen3's layer with convolutions around its attention and its MLP."""

    def __init__(self, config: Qwen3Config, index: int, num_taps: int, group_size: int):
        super().__init__(config, index)
        self.attention_conv = SlotConvolution(config.hidden_size, num_taps, group_size)
        self.mlp_conv = SlotConvolution(config.hidden_size, num_taps, group_size)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden: torch.Tensor, slots: torch.Tensor, attention_mask: torch.Tensor | None = None, **given: Any
    ) -> torch.Tensor:
        """Hidden states [B, T, H]; `given` is for the attention."""
        x = self.input_layernorm(hidden)
        kernels = self.attention_conv.kernels(x)
        convolved = self.attention_conv(x, kernels, BEFORE, slots)
        attended, _ = self.self_attn(convolved, attention_mask=attention_mask, **given)
        hidden = hidden + self.attention_conv(attended, kernels, AFTER, slots)
        x = self.post_attention_layernorm(hidden)
        kernels = self.mlp_conv.kernels(x)
        return hidden + self.mlp_conv(self.mlp(self.mlp_conv(x, kernels, BEFORE, slots)), kernels, AFTER, slots)


if TYPE_CHECKING:
    from typing_extensions import Self


Embed = Callable[[torch.Tensor], torch.Tensor]
MARKOV_TYPES = ("vanilla", "gated", "rnn")


@dataclass
class DFlashLayout:
    """A checkpoint's settings, in one form for all writers of the format.

    Attributes:
        layers: configuration of the decoder layers.
        block_size: slots of the block it was trained with, the anchor (the last accepted token) in the first.
        mask_token_id: the token in the other slots.
        tapped: the target's hidden states that it reads, as transformers counts them (0: embeddings, i: output of layer i - 1).
        from_anchor: slot k predicts the token after it, the anchor's slot included; otherwise mask slots predict the token at
            their own place.
        causal: whether slots see only earlier slots (in full-attention layers, in sliding ones).
        like_speculators: as speculators trains it. Sliding layers see their window of context tokens before the anchor from every slot,
            and a recurrent head runs on the anchor's slot before the first slot that predicts. Otherwise (SpecForge) each slot sees a
            window that ends with itself, and the head's state is zero there.
        heads: keys of the DSpark, Domino or DFlash2 parts; `projector_type` tells which.
        draft_vocab_size: number of logits that the configuration states, if it does.
        embedding_scale: of the embedding rows of the block's tokens; None: as the target's first layer reads them.
        logit_scale, softcap: of `layers.capped`, for the block's logits before heads correct them.
        value_scale: factor of attention's values.
        sinks: layers whose attention has a sink, a logit per head that no key has.
        fused_by_layer: a layer reads a weighted sum of the tapped states (DFlare), not a projection that all layers share.
        target_keys: context has projections of its own to keys and values (DFlare).
    """

    layers: PretrainedConfig
    block_size: int
    mask_token_id: int
    tapped: tuple[int, ...]
    from_anchor: bool
    causal: tuple[bool, bool]
    like_speculators: bool
    heads: dict[str, Any]
    draft_vocab_size: int | None = None
    embedding_scale: float | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    value_scale: float = 1.0
    sinks: frozenset[int] = frozenset()
    fused_by_layer: bool = False
    target_keys: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that a whole block drafts."""
        return self.block_size - (not self.from_anchor)


# ---- heads that correct a block's logits for the tokens chosen earlier on a path ---------------------------------


class SequentialHead(nn.Module):
    """Corrects the block's logits along a path, left to right, without another forward of the drafter.

    A path's state [n, S] is carried from one token to the next.
    """

    state_size = 0

    @abstractmethod
    def forward(
        self, state: torch.Tensor, previous: torch.Tensor, hidden: torch.Tensor, base: torch.Tensor, embed: Embed, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """One more token on n paths.

        Args:
            state: [n, S].
            previous: int64 [n], the token before the predicted one.
            hidden: [n, H], the block's final hidden state in the slot that predicts.
            base: [n, Vd], the logits to be corrected.
            embed: the drafter's embedding of tokens, [n, H] from [n].
            depth: 1 for the first drafted token.

        Returns: the new state [n, S]; the correction of the logits [n, Vd] (None: no correction at this depth).
        """


class MarkovHead(SequentialHead):
    """DSpark's low-rank bias B[previous] = W2 W1[previous].

    `gated`: W1[previous] is multiplied by a gate that depends on the hidden state. `rnn`: a recurrent state over the path
    replaces it. Formulas: speculators 0.9 (models/dspark) and SpecForge (modeling/draft/dspark.py).

    Args:
        vocab_size: V of the target (rows of W1).
        draft_vocab_size: Vd (rows of W2).
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int, kind: str):
        super().__init__()
        self.kind = kind
        self.state_size = rank if kind == "rnn" else 0
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def summary(self, previous: torch.Tensor) -> torch.Tensor:
        """W1[previous] [n, r], which a confidence head may read too."""
        # The target's embeddings may have more padding rows than the head's.
        return self.markov_w1(previous.clamp(max=self.markov_w1.num_embeddings - 1))

    def forward(self, state, previous, hidden, base, embed, depth):
        latent = self.summary(previous)
        if self.kind == "gated":
            latent = latent * torch.sigmoid(self.gate_proj(torch.cat([hidden, latent], dim=-1)))
        elif self.kind == "rnn":
            gate, candidate, out = self.joint_proj(torch.cat([state, latent, hidden], dim=-1)).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
            latent = torch.tanh(out)
        return state, self.markov_w2(latent)


class DominoHead(SequentialHead):
    """Domino's correction: a GRU reads the path's embeddings; its state and the hidden state give logits through a
    bottleneck. The first `num_pure` tokens are not corrected. Formula: SpecForge (modeling/draft/domino.py)."""

    def __init__(self, draft_vocab_size: int, bottleneck: int, hidden_size: int, gru_size: int, num_pure: int):
        super().__init__()
        self.state_size, self.num_pure = gru_size, num_pure
        self.prefix_gru = nn.GRU(hidden_size, gru_size, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden_size + gru_size, bottleneck, bias=False),
            nn.SiLU(),
            nn.Linear(bottleneck, draft_vocab_size, bias=False),
        )

    def forward(self, state, previous, hidden, base, embed, depth):
        _, state = self.prefix_gru(embed(previous)[:, None], state[None].contiguous())
        state = state[0]
        return state, self.embed_proj(torch.cat([hidden, state], dim=-1)) if depth > self.num_pure else None


class CandidateSelector(SequentialHead):
    """DFlash2's choice among the `top_k` likeliest tokens b of a slot: A[previous] * (P hidden) . B[b] is added to their logits, and no
    other token is drafted. Formula: z-lab/dflash (dflash/model.py).

    Args:
        vocab_size: V, rows of A and B.
        rank: their columns.
    """

    def __init__(self, vocab_size: int, rank: int, hidden_size: int, top_k: int):
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, state, previous, hidden, base, embed, depth):
        count = len(self.predecessor_codebook)  # the target's embeddings may have more padding rows
        known = base[:, :count]
        kept = known.topk(min(self.top_k, known.shape[1]), dim=-1).indices
        query = self.predecessor_codebook[previous.clamp(max=count - 1)] * self.hidden_projection(hidden)
        scores = (self.successor_codebook[kept] @ query[:, :, None])[:, :, 0].to(base)
        return state, torch.full_like(base, float("-inf")).scatter_(1, kept, scores)


class ConfidenceHead(nn.Module):
    """DSpark's estimate of the probability that the token predicted next is accepted, given that all tokens before it were.

    Args:
        input_size: H, or H + r if it also reads the Markov head's summary of the previous token.
    """

    def __init__(self, input_size: int, bias: bool = True):
        super().__init__()
        self.proj = nn.Linear(input_size, 1, bias=bias)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Log-probability [...] in float32, from features [..., input_size]."""
        return nn.functional.logsigmoid(self.proj(features).squeeze(-1).to(torch.float32))


# ---- the block -----------------------------------------------------------------------------------------------------


class DFlashDrafter(nn.Module):
    """A checkpoint's modules, run by `BlockHead`. Names are those of the files, with Domino's under `domino.`.

    Args:
        vocab: Vd, width of the logits.
        owns: shapes of `embed_tokens` and `lm_head` in the checkpoint; None: the target's is used.

    Attributes:
        mask: the mask token's embedding [H], if it is stored apart.
    """

    embeddings: Embeddings
    rotary: RotaryPositions
    mask: torch.Tensor | None = None

    def __init__(self, layout: DFlashLayout, feature_size: int, vocab: int, owns: dict[str, tuple[int, ...] | None]):
        super().__init__()
        config: Any = layout.layers
        heads = layout.heads
        size, kind = config.hidden_size, heads.get("projector_type")
        if layout.fused_by_layer:
            self.fusion_weights = nn.Parameter(torch.empty(config.num_hidden_layers, len(layout.tapped)))
            self.fusion_norms = nn.ModuleList(
                Qwen3RMSNorm(size, eps=config.rms_norm_eps) for _ in range(config.num_hidden_layers)
            )
        else:
            self.fc = nn.Linear(len(layout.tapped) * feature_size, size, bias=False)
            self.hidden_norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)
        self.is_convolved = kind == "dflash2"
        self.layers = nn.ModuleList(
            ConvolvedLayer(config, i, heads["conv_kernel_size"], heads["conv_group_size"])
            if self.is_convolved
            else decoder_layer(config, i)
            for i in range(config.num_hidden_layers)
        )
        self.norm = Qwen3RMSNorm(size, eps=config.rms_norm_eps)
        table = owns["embed_tokens"]
        self.embed_tokens = nn.Embedding(table[0], table[1]) if table else None
        self.lm_head = nn.Linear(size, vocab, bias=False) if owns["lm_head"] else None
        self.markov_head: MarkovHead | None = None
        self.domino: DominoHead | None = None
        self.candidate_selector: CandidateSelector | None = None
        self.confidence_head: ConfidenceHead | None = None
        self.confidence_reads_markov = bool(heads.get("confidence_head_with_markov"))
        rank = heads.get("markov_rank", 0)
        if kind == "domino":
            sizes = heads["emb_dim"], size, heads["gru_hidden_dim"]
            self.domino = DominoHead(vocab, *sizes, heads["pure_draft_prefix_len"])
        elif kind == "dflash2":
            self.candidate_selector = CandidateSelector(
                config.vocab_size, heads["selector_rank"], size, heads["selector_top_k"]
            )
        elif rank:
            self.markov_head = MarkovHead(config.vocab_size, vocab, rank, size, heads["markov_head_type"])
        if kind == "dspark" and heads["enable_confidence_head"]:
            self.confidence_head = ConfidenceHead(size + (rank if self.confidence_reads_markov else 0))
        for i, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            vars(attention)["sliding_window"] = None  # windows are in the masks of `BlockHead`
            if i in layout.sinks:
                attention.attention_sink_bias = nn.Parameter(torch.empty(config.num_attention_heads))
            if layout.target_keys:
                attention.k_proj_target, attention.v_proj_target = map(
                    copy.deepcopy, (attention.k_proj, attention.v_proj)
                )

    @property
    def sequential(self) -> SequentialHead | None:
        """The head that corrects the logits along a path, if there is one."""
        return self.markov_head or self.domino or self.candidate_selector

    def before_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the language-model head reads: the block's hidden states, which have had the last norm."""
        return hidden

    def context_keys_values(
        self, index: int, features: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values [B, heads, S, D] from context features [B, S, H] (no input norm), with cos and sin [1, 1, S, D]."""
        attention: Any = self.layers[index].self_attn
        shape = (*features.shape[:2], -1, attention.head_dim)
        to_keys = getattr(attention, "k_proj_target", attention.k_proj)
        to_values = getattr(attention, "v_proj_target", attention.v_proj)
        keys = to_keys(features).view(shape)
        values = keys if to_values is None else to_values(features).view(shape)
        if hasattr(attention, "v_norm"):  # Gemma 4's
            values = attention.v_norm(values)
        keys, values = attention.k_norm(keys).transpose(1, 2), values.transpose(1, 2)
        return keys * cos + rotate_half(keys) * sin, values

    def confidence_features(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """What the confidence head reads [..], from hidden states [.., H] and the tokens before [..]."""
        if not self.confidence_reads_markov or self.markov_head is None:
            return hidden
        return torch.cat([hidden, self.markov_head.summary(previous)], dim=-1)


class BlockHead(PackedHead):
    """Runs a DFlash drafter: context keys and values from the target's features, then a block that attends to them.

    Each layer's projections make keys and values from the context features (without input norm), rotated to their
    positions. Only these stay in the cache: the block's own are written after them, and overwritten in the next round.
    """

    module: DFlashDrafter

    def __init__(self, module: DFlashDrafter, layout: DFlashLayout, prepack_weights: bool | None):
        super().__init__(module, layout.layers, layout.layers.num_hidden_layers, prepack_weights)
        self.layout = layout
        self.kinds = list(dict.fromkeys(self.config.layer_types))  # of attention, without repetition

    @torch.no_grad()
    def context(self, features: torch.Tensor) -> torch.Tensor:
        """The context features [n, H] that all layers read, or [n, layers * H] if a layer has its part, from the target's concatenated
        hidden states [n, tapped * Ht]."""
        module = self.module
        if not self.layout.fused_by_layer:
            return module.hidden_norm(module.fc(features))
        states = features.unflatten(1, (-1, self.config.hidden_size))
        sums = module.fusion_weights.softmax(dim=-1) @ states  # [n, layers, H]
        return torch.cat([norm(sums[:, i]) for i, norm in enumerate(module.fusion_norms)], dim=-1)

    def with_graphs(self, wanted: bool | None = True, rewritten: bool = True) -> Self:
        """As in the base; reading context and running a block are captured separately."""
        head = super().with_graphs(wanted, rewritten)
        if head is not self:
            head.reading_graphs = GraphRunner(head, head.write_context)
        return head

    @torch.no_grad()
    def read(self, rows: list[RowInput], features: torch.Tensor, cache: PagedStaticCache) -> Any:
        """Write the keys and values of context tokens (`context`), in the rows' order, to their slots. Returns None."""
        if self.reading_graphs is None or self.reading_graphs.run([rows], cache, features) is None:
            self.write_context(PackedBatch.pack(rows, cache, self.device, gather=False), features)

    def write_context(self, batch: PackedBatch | CapturedBatch, features: torch.Tensor) -> torch.Tensor:
        """`read` for a packed batch; returns `features`."""
        cos, sin = (x[:, None] for x in self.module.rotary(batch.position_ids, features.dtype))  # [1, 1, T, D]
        parts = features.split(self.config.hidden_size, dim=1)
        with batch.cache.running(batch):
            for index in range(len(self.module.layers)):
                part = parts[index % len(parts)][None]
                batch.cache.update(*self.module.context_keys_values(index, part, cos, sin), index)
        return features

    @torch.no_grad()
    def block(self, rows: list[RowInput], embedded: torch.Tensor, cache: PagedStaticCache) -> torch.Tensor:
        """Final hidden states [T, H] of the rows' blocks, from their embeddings [T, H]."""
        if self.module.is_convolved:  # the last feature of a token is its slot
            slots = upload(np.concatenate([np.arange(row.num_tokens) for row in rows]), embedded.device)
            embedded = torch.cat([embedded, slots[:, None].to(embedded)], dim=1)
        views = [self._seen(rows, kind) for kind in self.kinds]
        hidden = None if self.graphs is None else self.graphs.run(views, cache, embedded)
        if hidden is not None:
            return hidden
        batches = (PackedBatch.pack(view, cache, self.device, gather=False) for view in views)
        return self.forward_batch(*batches, features=embedded)

    def forward_batch(
        self, batch: PackedBatch | CapturedBatch, *others: PackedBatch | CapturedBatch, features: torch.Tensor
    ) -> torch.Tensor:
        """`block` for a batch that is packed once for each kind of attention, in the order of `kinds`."""
        by_kind = dict(zip(self.kinds, (batch, *others), strict=True))
        hidden, more = features[None], {}
        if self.module.is_convolved:
            hidden, more = hidden[:, :, :-1], {"slots": features[:, -1]}
        position_embeddings = self.module.rotary(batch.position_ids, hidden.dtype)
        with batch.cache.running(batch):
            for kind, layer in zip(self.config.layer_types, self.module.layers, strict=True):
                sinks = getattr(layer.self_attn, "attention_sink_bias", None)
                if sinks is not None:
                    more["s_aux"] = sinks
                hidden = layer(
                    hidden,
                    position_ids=batch.position_ids,
                    position_embeddings=position_embeddings,
                    specdec=by_kind[kind],
                    **{CACHE: batch.cache},
                    **more,
                )
        return self.module.norm(hidden)[0]

    def _seen(self, rows: list[RowInput], kind: str) -> list[RowInput]:
        """The blocks' rows with the visibility of their slots in layers of that kind."""
        layout, masked = self.layout, []
        for row in rows:
            count = len(row.tokens)
            if kind == "sliding_attention":
                seen = sliding_visibility(
                    row.start, count, self.config.sliding_window, layout.causal[1], layout.like_speculators
                )
            else:
                seen = None if layout.causal[0] else np.ones((count, count), dtype=bool)
            masked.append(dataclasses.replace(row, visibility=seen))
        return masked


def sliding_visibility(context: int, count: int, window: int, causal: bool, from_anchor: bool) -> np.ndarray:
    """bool [count, context + count]: what the slots of a block see in a sliding layer, after `context` tokens.

    Args:
        causal: slots see only earlier slots of the block.
        from_anchor: every slot sees the last `window` context tokens; otherwise a window that ends with itself.
    """
    slots = np.arange(context, context + count)[:, None]
    keys = np.arange(context + count)
    oldest = context - window if from_anchor else slots - window + 1
    return np.where(keys < context, keys >= oldest, (keys <= slots) | (not causal))
