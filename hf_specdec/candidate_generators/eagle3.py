"""EAGLE-3 (Li et al. 2025): a head drafts from hidden states of three of the target's layers; P-EAGLE heads, all depths at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Gemma4TextConfig, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..config import config_key
from ..core.output import PackedOutput, Taps
from ..core.sequence import Sequence
from ..kernels.transfer import upload
from ..model.packed_head import PackedHead
from ..model.packed_model import PackedModel
from .base import DrafterContext, HasHead
from .checkpoints import layers as head_layers
from .checkpoints import target_parts
from .checkpoints.config import HeadConfig, proposed_length
from .checkpoints.files import Checkpoint, Plan, register_format, renaming
from .checkpoints.keys import FLAG, IDS, KIND, LAYERS, NAMES, NUMBER, Key, Table, integer, keys, one_of
from .checkpoints.layers import LayeredHead, add_tables, capped, decoder_layer
from .checkpoints.target_parts import gather_features, load_once, trained_for
from .growing.features import FeatureGenerator
from .growing.tree_growth import AllDepths, DraftLevel
from .registry import register


@dataclass(frozen=True)
class Eagle3Options:
    """How an EAGLE-3 head computes, from its config.json and tensors.

    Attributes:
        taps: the target's hidden states it reads, in order of concatenation: some layers', or the last.
        norm_before_residual: the first layer's residual is the normed hidden state.
        norm_output: the normed output is fed back, not the one before the norm.
        logit_scale: factor of the logits.
        mask_token: P-EAGLE's token in mask rows; None: the head drafts step by step.
        window_stays: sliding windows end at the text's last token while drafting, as speculators' EAGLE-3 heads are
            trained; drafted tokens are visible besides. Otherwise windows move on with the drafts.
        norm_before_head: the language-model head reads the normed output (SpecForge: unless `norm_output` is false).
        softcap: of the logits; None: they are not capped.
    """

    taps: Taps
    norm_before_residual: bool
    norm_output: bool
    logit_scale: float
    mask_token: int | None
    window_stays: bool
    norm_before_head: bool = True
    softcap: float | None = None


_INPUTS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")  # of attention


def is_joining(plan: Plan, index: int, width: int) -> bool:
    """Whether the attention of a layer reads embeddings beside hidden states: of the first one, or in DeepSpec's files, of all."""
    name = f"layers.{index}.self_attn.q_proj.weight"
    return index == 0 or (name in plan and plan.matrix(name)[1] == 2 * width)


class JoiningLayer(nn.Module):
    """EAGLE-3's layer: attention over [norm(embedding); norm(hidden)], residual from the hidden half."""

    def __init__(self, config: PretrainedConfig, index: int, norm_before_residual: bool):
        super().__init__()
        layer: Any = decoder_layer(config, index)
        for name, part in [*layer.named_children(), *layer.named_buffers(recurse=False)]:
            setattr(self, name, part)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        for name in _INPUTS:
            if (linear := getattr(self.self_attn, name, None)) is not None:
                setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, linear.out_features))
        self.norm_before_residual, self.is_gemma4 = norm_before_residual, isinstance(config, Gemma4TextConfig)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, **attention) -> torch.Tensor:
        """Hidden states [1, T, H] from embeddings and hidden states [1, T, H]."""
        part: Any = self  # pyright does not know the parts of transformers' layer
        normed = part.hidden_norm(hidden)
        residual = normed if part.norm_before_residual else hidden
        both = torch.cat([part.input_layernorm(embedded), normed], dim=-1)
        if not part.is_gemma4:
            hidden = residual + part.self_attn(hidden_states=both, **attention)[0]
            return hidden + part.mlp(part.post_attention_layernorm(hidden))
        attended = part.self_attn(hidden_states=both, shared_kv_states=None, **attention)[0]
        hidden = residual + part.post_attention_layernorm(attended)
        made = part.mlp(part.pre_feedforward_layernorm(hidden))
        return (hidden + part.post_feedforward_layernorm(made)) * part.layer_scalar


class Eagle3Head(LayeredHead):
    """Decoder layers over embeddings and features; `fuse` makes features from the target's hidden states.

    Args:
        plan: the checkpoint's tensors, which decide on norms, biases and tables.
        num_states, state_width: number and width of the target's hidden states that are concatenated.
    """

    mask_features: torch.Tensor  # [H], in place of features in P-EAGLE's mask rows

    def __init__(self, config: PretrainedConfig, plan: Plan, options: Eagle3Options, num_states: int, state_width: int):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.options = options
        self.layers = nn.ModuleList(
            JoiningLayer(config, i, options.norm_before_residual)
            if is_joining(plan, i, width)
            else decoder_layer(config, i)
            for i in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(width, eps)
        self.fc = nn.Linear(num_states * state_width, width) if options.taps.layers else None
        self.input_norm = LlamaRMSNorm(num_states * state_width, eps) if "input_norm.weight" in plan else None
        self.fc_norm = None
        if "fc_norm.0.weight" in plan:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(state_width, eps) for _ in range(num_states))
        if "mask_hidden" in plan:
            self.mask_hidden = nn.Parameter(torch.empty(plan.shape("mask_hidden")))
        add_tables(self, plan, width)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The head's features [.., H] from the target's concatenated hidden states [.., L * Ht]."""
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.input_norm is not None:
            states = self.input_norm(states)
        return states if self.fc is None else self.fc(states)

    def logits(self, hidden: torch.Tensor, lm_head: nn.Module) -> torch.Tensor:
        """Logits [n, Vd] from outputs [n, H], by the head's `lm_head` or rows of it."""
        is_ready = self.options.norm_output or not self.options.norm_before_head
        logits = lm_head(hidden if is_ready else self.norm(hidden))
        return capped(logits, self.options.logit_scale, self.options.softcap)

    def forward(self, input_ids, features, position_ids, **attention) -> torch.Tensor:
        """The output that is fed back, [1, T, H]: before the last norm, or after it with `options.norm_output`."""
        attention["position_embeddings"] = self.rotary(position_ids, features.dtype)
        embedded, hidden = self.embeddings(input_ids, features), features
        for layer in self.layers:
            inputs = (embedded, hidden) if isinstance(layer, JoiningLayer) else (hidden,)
            hidden = layer(*inputs, position_ids=position_ids, **attention)
        return self.norm(hidden) if self.options.norm_output else hidden


_SPECFORGE = {"LlamaForCausalLMEagle3", "DeepseekV3ForCausalLMEagle3"}
_IDS = "eagle_aux_hidden_state_layer_ids"
canonical_name = renaming((r"model\.", ""), (r"midlayer\.", "layers.0."))
_TABLE = Table(
    {
        "kind": Key(one_of("eagle3", "peagle"), places=KIND),
        "architectures": Key(NAMES, default=[], places=(".architectures",)),
        "vocab_size": Key(integer(), places=(".vocab_size", f"{LAYERS}.vocab_size")),
        "draft_vocab_size": Key(integer(), places=("draft_vocab_size", "truncated_vocab_size")),
        **keys(integer(), "target_hidden_size"),
        # Ids at the top level (vLLM, speculators) are those of layers whose inputs are read. In `eagle_config` (SGLang, SpecForge,
        # ModelOpt) and in DeepSpec's files, outputs are read.
        "tapped": Key(
            IDS,
            places=(f".{_IDS}", f"eagle_config.{_IDS} + 1", "layer_ids", ".target_layer_ids + 1", ".aux_hidden_state_layer_ids"),
        ),
        "use_aux_hidden_state": Key(FLAG, default=True),
        **keys(FLAG, "norm_before_residual", "norm_output", "recycle_normed"),
        "logit_scale": Key(NUMBER, default=1.0),
        "mask_token": Key(integer(0), places=("mask_token_id", "pard_token", "ptd_token_id")),
        "fc_norm": Key(FLAG, tensor="fc_norm.0.weight"),
        "norm_before_fc": Key(FLAG, tensor="input_norm.weight"),
        "parallel_drafting": Key(FLAG, tensor="mask_hidden"),
        "attention_bias": Key(
            FLAG, places=(".attention_bias", f"{LAYERS}.attention_bias"), tensor="layers.0.self_attn.q_proj.bias"
        ),
    },
    section="eagle_config",
    # ModelOpt's, whose head is this one with these values
    only={
        "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
        "next_layer_regular": True, "parallel_draft_step": 1, "has_lm_head": True,
    },
    nothing=frozenset({
        "num_aux_hidden_states", "num_eagle_features", "num_target_layers", "draft_num_hidden_layers", "embed_requires_grad",
        "parallel_draft_heads_num_layers",
    }),
)  # fmt: skip


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """Whether it is an EAGLE-3 head, by its first layer's `hidden_norm`."""
    plan = Plan(checkpoint, canonical_name)
    return "layers.0.hidden_norm.weight" in plan and "layers.0.self_attn.o_proj.weight" in plan


register_format(
    "EAGLE-3, P-EAGLE (yuhuili/EAGLE3-*, SpecForge: midlayer.hidden_norm; speculators, DeepSpec: layers.0.hidden_norm)",
    "eagle3",
    is_eagle3,
)


def load_eagle3(
    checkpoint: Checkpoint, target: PackedModel, prepack_weights: bool | None, mask_token: int | None,
    recycle_normed: bool | None,
) -> head_layers.LoadedHead:  # fmt: skip
    """Load an EAGLE-3 or P-EAGLE head on the target's device, in its dtype.

    Args:
        mask_token: for a P-EAGLE head whose config.json has none.
        recycle_normed: whether the normed output is fed back; None: as the checkpoint says.

    Raises:
        CheckpointError: it is incomplete, contradicts itself, or is for another target.
    """
    plan = Plan(checkpoint, canonical_name)
    given = (_TABLE | head_layers.keys_of_layers(plan)).read(checkpoint, plan)
    options = _options(checkpoint, given, plan, target, mask_token, recycle_normed)
    config = head_layers.read_layer_config(checkpoint, plan)
    for i in range(config.num_hidden_layers):  # some files have a norm that no forward uses
        if not is_joining(plan, i, config.hidden_size):
            plan.sources.pop(f"layers.{i}.hidden_norm.weight", None)
    _check_target(checkpoint, given, plan, options, target)
    sizes = max(1, len(options.taps.layers)), target.config.hidden_size

    def run(head: Eagle3Head) -> PackedHead:
        # P-EAGLE's mask rows have no target states to fuse, so its generator fuses the features of the text.
        fuse = head.fuse if options.mask_token is None else None
        return PackedHead(head, config, config.num_hidden_layers, prepack_weights, fuse=fuse)

    stated = given.draft_vocab_size, given.vocab_size
    loaded = head_layers.loaded(
        checkpoint, plan, target, config, lambda size: Eagle3Head(config, plan, options, *sizes), run, stated
    )
    if options.mask_token is not None:
        head: Any = loaded.head.module
        rows = len(head.embeddings.table.weight)
        if options.mask_token >= rows:
            raise checkpoint.error(
                f"its mask token {options.mask_token} is not among the {rows} tokens that have embeddings."
            )
        with torch.no_grad():
            head.mask_features = head.fuse(head.mask_hidden.flatten())
    return loaded


def _options(
    checkpoint: Checkpoint, given: Any, plan: Plan, target: PackedModel, mask_token: int | None, recycle_normed: bool | None
) -> Eagle3Options:  # fmt: skip
    """The head's options from the keys of config.json. Missing ones have the defaults of the format's own trainers."""
    if given.norm_before_fc and given.fc_norm:
        raise checkpoint.error("config.json asks for both norm_before_fc and fc_norm, which exclude each other.")
    has_mask, num_layers = "mask_hidden" in plan, target.config.num_hidden_layers
    if given.kind == "peagle" and not has_mask:
        raise checkpoint.error("is a P-EAGLE head (speculators_model_type peagle) without mask_hidden.")
    if None not in (given.mask_token, mask_token) and given.mask_token != mask_token:
        raise checkpoint.error(
            f"its config.json has mask token {given.mask_token}, but speculative_config says mask_token_id {mask_token}."
        )
    mask_token = mask_token if given.mask_token is None else given.mask_token
    if has_mask and mask_token is None:
        raise checkpoint.error(
            "drafts in parallel (it has mask_hidden), but config.json names no mask token: give 'mask_token_id' in speculative_config."
        )
    layers = sorted(given.tapped or (2, num_layers // 2, num_layers - 3))
    if given.use_aux_hidden_state and (layers[0] < 0 or layers[-1] > num_layers):
        raise checkpoint.error(
            f"reads hidden states {layers} (0: the embeddings, i: after i layers), but the target has {num_layers} layers."
            + trained_for(checkpoint)
        )
    # In speculators' format, in SGLang and in vLLM, `norm_output` says what is fed back. In SpecForge's files, which `recycle_normed`
    # tells from those of `hf-specdec train`, it says whether there is a norm before the language-model head; they feed back the
    # state before it.
    is_specforge = bool(_SPECFORGE & set(given.architectures)) and given.kind is given.recycle_normed is None
    stated = given.recycle_normed if recycle_normed is None else recycle_normed
    normed = given.norm_before_residual
    return Eagle3Options(
        taps=Taps(layers=tuple(layers)) if given.use_aux_hidden_state else Taps(last_hidden=True),
        norm_before_residual=given.kind == "eagle3" if normed is None else normed,
        norm_output=stated if stated is not None else bool(given.norm_output) and not is_specforge,
        logit_scale=given.logit_scale,
        mask_token=mask_token if has_mask else None,
        window_stays=given.kind == "eagle3" and "sliding_attention" in (checkpoint.section(LAYERS).get("layer_types") or ()),
        norm_before_head=not is_specforge or given.norm_output is not False,
        softcap=getattr(given, "final_logit_softcapping", None),
    )  # fmt: skip


def _check_target(checkpoint: Checkpoint, given: Any, plan: Plan, options: Eagle3Options, target: PackedModel) -> None:
    """Raise CheckpointError if the head does not fit the target's width, number of layers or vocabulary (which d2t may map)."""
    sizes = [plan.matrix("embed_tokens.weight")[0]] if "embed_tokens.weight" in plan else []
    sizes += list(checkpoint.shape("t2d")[:1]) if "t2d" in checkpoint else []
    sizes += [] if given.vocab_size is None else [given.vocab_size]
    target_parts.check_target(checkpoint, target, given.target_hidden_size, None)
    for size in sizes:
        target_parts.check_vocabulary(checkpoint, target, min(size, target.vocab_size) if "d2t" in plan else size)
    width, count = target.config.hidden_size, len(options.taps.layers)
    if "fc.weight" in plan and count and (columns := plan.matrix("fc.weight")[1]) != width * count:
        raise checkpoint.error(
            f"fc reads {columns} numbers per token; the target's hidden states after {options.taps.layers} layers have "
            f"{count} × {width}." + trained_for(checkpoint)
        )


@dataclass
class Eagle3Config(HeadConfig):
    """EAGLE-3: a head drafts from hidden states of three of the target's layers, in chains, static trees or dynamic trees
    (`top_k`, `total_tokens`, `depth`). P-EAGLE heads draft all depths in one forward."""

    name = "eagle3"
    requires = ("an EAGLE-3 or P-EAGLE head trained for the target: 'model'",)

    parallel_drafting: bool | None = config_key(
        None, "P-EAGLE: all depths in one forward; the checkpoint decides, and a contradiction is an error"
    )

    mask_token_id: int | None = config_key(
        None, "P-EAGLE: the mask token, if the checkpoint's config.json names none", minimum=0
    )
    recycle_normed: bool | None = config_key(
        None,
        "whether a draft step reads the previous step's output after the head's last norm (true) or before it (false); by "
        "default as it was trained",
    )


@register(Eagle3Config)
class Eagle3Generator(FeatureGenerator, HasHead):
    """Drafts with an EAGLE-3 or a P-EAGLE head.

    P-EAGLE has EAGLE-3's network, trained so that one forward drafts all depths. After each text the head reads one row for every
    further depth: the mask token's embedding, with the head's `mask_hidden` in place of features. Row d predicts what EAGLE-3 would
    after d drafted tokens, whatever they are, so all nodes of one depth share it. The next text overwrites the keys and values of
    these rows.

    Attributes:
        mask_token: P-EAGLE's token in mask rows; None: the head drafts step by step.
    """

    def __init__(self, config: Eagle3Config, target: PackedModel, context: DrafterContext | None = None):
        checkpoint = config.open_head()
        given = config.mask_token_id, config.recycle_normed
        loaded = load_once(
            config, target, lambda: load_eagle3(checkpoint, target, config.prepack_weights, *given), *given
        )
        self.head_module = loaded.head.module
        options = self.head_module.options
        self.mask_token, self.window_stays = options.mask_token, options.window_stays
        drafts_at_once = self.mask_token is not None
        self.expands_alone = not drafts_at_once
        if config.parallel_drafting not in (None, drafts_at_once):
            how = "all depths at once" if drafts_at_once else "step by step"
            raise config.fail(
                "parallel_drafting", f"is {not drafts_at_once}, but this head drafts {how}: leave it out."
            )
        if not drafts_at_once and config.mask_token_id is not None:
            raise config.fail("mask_token_id", "is for P-EAGLE heads, which this one is not: leave it out.")
        # graphs have one position per token, used for rotation and window
        has_loop = not drafts_at_once and not self.window_stays
        super().__init__(config.with_default_length(proposed_length(checkpoint)), target, context, has_loop=has_loop)
        self.taps = options.taps
        self.use(loaded, graphs=not self.window_stays)
        self.made: AllDepths | None = None  # P-EAGLE's logits of the current round

    def features(self, output: PackedOutput, index: torch.Tensor) -> torch.Tensor:
        """The target's hidden states, concatenated [n, L * Ht], which the head projects when it reads them; P-EAGLE's features [n, H]
        are projected already."""
        layers: Any = [output.layers[i] for i in self.taps.layers] or [output.last_hidden]
        states = gather_features(layers, index, self.head.device, self.head.dtype)
        if self.mask_token is None:
            return states
        with torch.no_grad():
            return self.head_module.fuse(states)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head_module.logits(hidden, self.lm_head)

    def scoring_modules(self) -> list[nn.Module]:
        return [self.head_module.norm, self.lm_head]

    def roots(self, sequences: list[Sequence], limits: list[int]) -> tuple[torch.Tensor, ...]:
        """As in the base. P-EAGLE: read all unread rows of each text, then its mask rows; logits [R, Vd] of the token after each text."""
        if self.mask_token is None:
            return super().roots(sequences, limits)
        self.read_all_but_last_chunk(sequences)
        inputs, text_features = self.take(sequences, self.config.prefill_chunk_size)
        features, wanted, packed = [], [], 0
        for row, taken, limit in zip(inputs, text_features, limits, strict=True):
            end = packed + len(taken)
            row.tokens = np.concatenate([row.tokens, np.full(limit - 1, self.mask_token)])
            row.num_tokens += limit - 1
            features += [taken, self.head_module.mask_features.expand(limit - 1, -1)]
            wanted.append(np.arange(end - 1, end - 1 + limit))
            packed = end + limit - 1
        hidden = self.head.forward(inputs, torch.cat(features), self.cache)
        for seq, row, taken in zip(sequences, inputs, text_features, strict=True):
            self.has_read(seq, row.start + len(taken))
        self.made = AllDepths(self.logits(hidden[upload(np.concatenate(wanted), hidden.device)]), limits)
        return (self.made.at()[:, 0],)

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        return super().begin(*roots) if self.mask_token is None else roots[0]

    def expand(self, level: DraftLevel) -> torch.Tensor:
        """As in the base. P-EAGLE: logits [R, 1, Vd], which the nodes of one depth share."""
        return super().expand(level) if self.made is None else self.made.at(level)
