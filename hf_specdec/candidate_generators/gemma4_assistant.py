"""Gemma 4 assistants: drafters whose layers attend to the target's own keys and values; method `gemma4_assistant`."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ..core.rows import RowInput
from ..core.sequence import Sequence
from ..model import architectures
from ..model.attention import replaced_attention
from ..model.packed_batch import PackedBatch
from ..model.packed_model import PackedModel
from .base import DrafterContext
from .checkpoints.files import BAD_VALUES, Checkpoint, register_format
from .checkpoints.keys import ANYTHING, FLAG, Key, Table, integer, one_of
from .checkpoints.target_parts import check_target, device_and_dtype, load_once, target_embeddings
from .growing.last_hidden import LastHiddenConfig, LastHiddenGenerator
from .growing.target_keys import ReadsTargetKeys
from .growing.tree_growth import DraftLevel
from .registry import register

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
# Keys of `text_config` besides the fields of transformers' class, which reads them.
_OF_LAYERS = {"model_type", "per_layer_config", "global_head_dim", "num_global_key_value_heads"}
TABLE = Table(
    {
        "model_type": Key(one_of(*TYPES), default=...),
        "backbone_hidden_size": Key(integer(), default=...),
        "text_config": Key(ANYTHING, default=...),
        "use_ordered_embeddings": Key(FLAG, default=False),
        "num_centroids": Key(integer()),
        "centroid_intermediate_top_k": Key(integer()),
    },
    has_layers=False,
)


register_format(
    "Gemma 4 assistant (google/gemma-4-*-it-assistant: model_type gemma4_assistant, pre_projection, post_projection)",
    "gemma4_assistant",
    lambda checkpoint: checkpoint.config.get("model_type") in TYPES,
)


def load_assistant(checkpoint: Checkpoint, target: PackedModel) -> PreTrainedModel:
    """transformers' model of an assistant, on the device and in the dtype for heads. Raises CheckpointError: a key without a meaning,
    tensors that do not fit, or another target's assistant."""
    device, dtype = device_and_dtype(target)
    check_target(
        checkpoint,
        target,
        TABLE.read(checkpoint).backbone_hidden_size,
        checkpoint.section("text_config").get("vocab_size"),
    )
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (*BAD_VALUES, OSError) as error:
        raise checkpoint.error(f"transformers cannot load it: {error}") from error
    model, report = loaded
    problems = [f"{kind.removesuffix('_keys')} {name}" for kind, names in report.items() for name in names]
    if problems:
        raise checkpoint.error(f"does not fit {type(model).__name__}: {'; '.join(problems[:12])}.")
    layers = model.config.text_config
    known = _OF_LAYERS | {field.name for field in dataclasses.fields(type(layers))}
    for name, value in checkpoint.section("text_config").items():
        if name not in known and value is not None and not TABLE.means_nothing(name):
            raise checkpoint.error(
                f"config.json has text_config.{name} = {value!r}, which {type(layers).__name__} does not have."
            )
    if layers.final_logit_softcapping is not None:
        raise checkpoint.error(
            f"has final_logit_softcapping = {layers.final_logit_softcapping!r}; only null is supported here."
        )
    _check_keys(checkpoint, model, target)
    return model.to(device).requires_grad_(False).eval()


def _check_keys(checkpoint: Checkpoint, model: Any, target: PackedModel) -> None:
    """Raise CheckpointError if the assistant's layers cannot read the target's keys."""
    if target.ranks is not None:
        raise checkpoint.error("reads keys of the whole target, and this target is sharded over several processes.")
    read, device = layers_with_keys(target), device_and_dtype(target)[0]
    for reader in (layer.self_attn for layer in model.model.layers):
        kind = reader.layer_type
        if kind not in read:
            raise checkpoint.error(
                f"reads keys of {kind}, and no layer of the target has any. It is for another target."
            )
        attention: Any = architectures.decoder_layers(target.model)[read[kind]].self_attn
        there = attention.q_proj.weight.device
        if there not in (device, reader.q_proj.weight.device):
            raise checkpoint.error(
                f"drafts on {device}, and the keys that it reads are on {there}: load the target on one device."
            )
        num_keys = attention.k_proj.weight.shape[0] // attention.head_dim
        if reader.head_dim != attention.head_dim or reader.config.num_attention_heads % num_keys:
            raise checkpoint.error(
                f"has {reader.config.num_attention_heads} heads of width {reader.head_dim} for {kind}; the target has {num_keys} of width "
                f"{attention.head_dim}. It is for another target."
            )


def layers_with_keys(target: PackedModel) -> dict[str, int]:
    """For each kind of attention, the index of the target's last layer of that kind with keys of its own: assistants read these."""
    count = target.config.num_hidden_layers - (getattr(target.config, "num_kv_shared_layers", 0) or 0)
    return {kind: index for index, kind in enumerate((getattr(target.config, "layer_types", None) or [])[:count])}


_DEEPEST = 64  # tokens: a bound of drafts that nobody needs, because the position of a round's queries does not move


@dataclass
class Gemma4AssistantConfig(LastHiddenConfig):
    """Gemma 4 assistants draft token by token with a few layers without keys of their own: they attend to the target's. By default
    drafts are as long as the assistant's generation_config.json says."""

    name = "gemma4_assistant"
    requires = ("a Gemma 4 assistant made for the target: 'model'",)
    default_num_speculative_tokens = 4  # if that file names no length; mlx-vlm's best were 2 to 4


@register(Gemma4AssistantConfig)
class Gemma4AssistantGenerator(ReadsTargetKeys, LastHiddenGenerator):
    """Drafts with a Gemma 4 assistant.

    A pass takes the embedding of a token and the target's hidden state before it; below the text's newest token, in place of the latter,
    what the pass before returned. All passes of a round have the position after the text's last key. They see all keys of the text, or in
    sliding layers the last `sliding_window` + 1, as in transformers, and write none.
    """

    config: Gemma4AssistantConfig

    def __init__(self, config: Gemma4AssistantConfig, target: PackedModel, context: DrafterContext | None = None):
        checkpoint = config.open_head()
        self.assistant: Any = load_once(config, target, lambda: load_assistant(checkpoint, target))
        settings: GenerationConfig = self.assistant.generation_config
        config = config.with_default_length(settings.num_assistant_tokens)
        super().__init__(config, target, self.assistant, _DEEPEST, has_loop=False)
        self.embeddings = target_embeddings(target)
        self.suppressed = torch.tensor(settings.suppress_tokens or [], dtype=torch.long, device=self.device)
        self._texts: list[Sequence] = []  # of the current round
        self._read = layers_with_keys(target)
        for layer in self.assistant.model.layers:
            layer.self_attn.layer_idx = self._read[layer.self_attn.layer_type]  # by it, attention finds the pages

    def release(self) -> None:
        super().release()
        self._texts = []

    def active(self) -> contextlib.AbstractContextManager:
        stack = contextlib.ExitStack()
        stack.enter_context(super().active())
        stack.enter_context(replaced_attention([self.assistant.config.text_config]))
        return stack

    # ---- the round --------------------------------------------------------------------------------------------------

    def reach(self, seq: Sequence, limit: int) -> int:
        """The limit; 0 if its hidden state or keys are not known, or its text is shorter than the tree is wide."""
        return super().reach(seq, limit) if self.has_keys(seq) and len(seq.tokens) > self.shape.widest else 0

    def roots(self, sequences: list[Sequence], limits: list[int]) -> tuple[torch.Tensor, ...]:
        self._texts = sequences
        return super().roots(sequences, limits)

    def begin(self, *roots: torch.Tensor) -> torch.Tensor:
        hidden, tokens = roots
        return self._pass(self._texts, tokens[:, None], hidden[:, None])[:, 0]

    def expand(self, level: DraftLevel) -> torch.Tensor:
        return self._pass([self.sequences[i] for i in level.rows], level.tokens, self.carried(level))

    @torch.no_grad()
    def _pass(self, texts: list[Sequence], tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Logits [R, F, V] after `tokens` [R, F], from hidden states `before` them [R, F, Ht]; sets the children's state."""
        keys, assistant, count = self.cache, self.assistant, tokens.shape[1]
        rows = []
        for seq in texts:
            length = keys.tables[seq.id].length
            # The text's last slots stand for the queries' own: nothing is written there, and all queries see them.
            row = RowInput(
                seq.id, np.zeros(count, dtype=np.int64), length - count, logits=count, offset=seq.position_offset
            )
            row.positions = np.full(count, length)
            row.visibility = np.ones((count, count), dtype=bool)
            row.region_positions, row.window_positions = np.arange(length - count, length), row.positions - 2
            rows.append(row)
        batch = PackedBatch.pack(rows, keys, self.device, gather=False)
        shared = {}
        for kind, index in self._read.items():
            pools = keys.layers[index]
            shared[kind] = tuple(
                pool.new_empty(1, pool.shape[1], 0, pool.shape[2]) for pool in (pools.keys, pools.values)
            )
        embedded = self.embeddings(tokens.to(self.target.device)).to(before)
        inputs = assistant.pre_projection(torch.cat([embedded, before], dim=-1)).view(1, len(texts) * count, -1)
        masks = dict.fromkeys(shared)  # what a query sees is in the batch
        hidden = assistant.model(
            inputs_embeds=inputs, attention_mask=masks, position_ids=batch.position_ids, shared_kv_states=shared, use_cache=False,
            logits_to_keep=None, specdec=batch,
        ).last_hidden_state.view(len(texts), count, -1)  # fmt: skip
        self.state = assistant.post_projection(hidden)
        return self._scores(hidden)

    def _scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, F, V] from the assistant's normalised hidden states [R, F, H].

        With ordered embeddings only the tokens of the likeliest clusters are scored. The others get minus infinity, as in vLLM:
        transformers' own value depends on the other rows.
        """
        clusters, weight = self.assistant.masked_embedding, self.assistant.lm_head.weight
        if clusters is None:
            logits = self.assistant.lm_head(hidden)
        else:
            nearest = clusters.centroids(hidden).topk(clusters.centroid_intermediate_top_k, dim=-1).indices
            ids = clusters.token_ordering.view(clusters.num_centroids, -1)[nearest].flatten(2)
            scores = (weight[ids] @ hidden[..., None])[..., 0]
            logits = hidden.new_full((*hidden.shape[:2], len(weight)), float("-inf")).scatter_(2, ids, scores)
        return logits.index_fill_(2, self.suppressed, float("-inf")) if len(self.suppressed) else logits
