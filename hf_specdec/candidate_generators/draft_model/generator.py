"""Drafting with a smaller language model (Leviathan et al. 2023; Chen et al. 2023), in chains or trees; keys of method `draft_model`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...bundled import resolve_model
from ...cache import OutOfBlocks, PagedStaticCache
from ...config import SpeculativeConfigError, config_key
from ...core.draft_trees import DraftTrees
from ...core.outcome import StepOutcome
from ...core.rows import RowInput
from ...core.sequence import Sequence
from ...model.architectures import has_repository_code
from ...model.encoder_decoder import FAMILIES, is_encoder_decoder
from ...model.packed_model import PackedModel
from ..base import DrafterContext, MayMissSteps
from ..checkpoints.files import Checkpoint, register_format
from ..checkpoints.target_parts import draft_ids, load_once, rows_of
from ..growing.model_drafter import ModelDrafter
from ..growing.own_cache import OwnsCache
from ..growing.tree_growth import Draft
from ..growing.tree_shapes import TreeDraftingConfig
from ..registry import register
from .vocabulary import BRIDGES, SharedVocabulary, make_bridge


@dataclass
class DraftModelConfig(TreeDraftingConfig):
    """A smaller causal language model drafts token by token. With `early_exit`, the target's first layers draft.
    Drafters with another tokenizer are bridged by shared tokens or by text."""

    name = "draft_model"
    uses_assistant_model = True
    requires = ("a smaller model: 'model', generate(assistant_model=...) or 'early_exit'",)

    model: str | None = config_key(None, "drafter: bundled name, folder or Hub id")
    revision: str | None = config_key(None, "Hub revision of the drafter")
    early_exit: int | None = config_key(None, "draft with this many of the target's own first layers", minimum=1)
    vocabulary_bridge: str | None = config_key(
        None,
        "for a drafter with another tokenizer: 'intersection' (tokens both have) or 'text' (re-encode)",
        choices=BRIDGES,
    )

    def __post_init__(self) -> None:
        if callable(self.model):
            raise SpeculativeConfigError(
                "speculative_config['model'] must be the name or folder of a model; pass a loaded model as "
                "generate(assistant_model=...)."
            )
        super().__post_init__()
        if self.model is not None and self.early_exit is not None:
            raise self.fail("early_exit", "cannot be combined with 'model': the target drafts for itself.")


def _matches(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("model_type") in {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *FAMILIES} and checkpoint.any(
        r"(model|transformer|gpt_neox|decoder|backbone)\."
    )


register_format("a causal language model of transformers", "draft_model", _matches, last=True)

_loading = threading.Lock()


def load_drafter(config: DraftModelConfig, target: PackedModel, context: DrafterContext) -> PreTrainedModel:
    """The drafter: the target itself (early exit), `generate(assistant_model=)`, or the configured model, loaded once per target."""
    if context.assistant_model is not None:
        given = "model" if config.model is not None else "early_exit" if config.early_exit is not None else None
        if given is not None:
            raise config.fail(given, "and generate(assistant_model=...) both name a drafter: pass one of them.")
        return context.assistant_model
    if config.early_exit is not None:
        return target.model
    if config.model is None:
        raise config.fail(
            "model", "is missing: name a smaller model, pass assistant_model= to generate(), or set 'early_exit'."
        )
    name = resolve_model(config.model)
    ids = draft_ids(config, target, context)
    shards = config.draft_tensor_parallel_size or 1
    sharding = {}
    if shards > 1 and target.ranks is not None:  # as the target is, over the same ranks
        from transformers.distributed.configuration_utils import DistributedConfig

        sharding["distributed_config"] = DistributedConfig(tp_size=shards)

    def load() -> Any:
        try:
            revision = config.revision or "main"
            trusted = has_repository_code(target.model) and not is_known(name, revision)
            kind: Any = AutoModelForCausalLM if target.family is None else class_of(name, revision, target)
            model = kind.from_pretrained(
                name, revision=revision, dtype=target.model.dtype, trust_remote_code=trusted, **sharding
            )
        except (OSError, ValueError) as error:
            raise config.fail("model", f"could not be loaded from {name!r}: {error}") from error
        if ids is not None:
            fail = functools.partial(config.fail, "draft_vocabulary")
            model.set_output_embeddings(rows_of(model.get_output_embeddings(), ids, fail))
        return (model if sharding else model.to(target.device)).eval()

    # transformers patches its own classes while it loads: two loads at once would leave them patched.
    with _loading:
        return load_once(config, target, load, len(sharding), ids is not None and ids.numpy().tobytes())


def is_known(name: str, revision: str) -> bool:
    """True if transformers has the code of a model: then no code of its repository is run."""
    values, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    return values.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def class_of(name: str, revision: str, target: PackedModel) -> Any:
    """The class that a checkpoint names; for a Whisper with the target's encoder, that of its decoder."""
    values, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    ours, sizes = target.model.config.to_dict(), ("model_type", "d_model", "encoder_layers")
    if ours["model_type"] == "whisper" and all(values.get(name) == ours[name] for name in sizes):
        return AutoModelForCausalLM
    return getattr(transformers, (values.get("architectures") or ["AutoModelForCausalLM"])[0], AutoModelForCausalLM)


@register(DraftModelConfig)
class DraftModelGenerator(OwnsCache, ModelDrafter, MayMissSteps):
    """Drafts with a causal language model, run like the target by a PackedModel over a paged cache."""

    config: DraftModelConfig
    has_loop = True

    def __init__(self, config: DraftModelConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        context = context or DrafterContext()
        model = load_drafter(config, target, context)
        if config.early_exit is not None and config.early_exit >= target.config.num_hidden_layers:
            raise config.fail("early_exit", f"must be less than the target's {target.config.num_hidden_layers} layers.")
        if hasattr(model, "pre_projection"):
            raise config.fail(
                "method",
                "is for whole models, and this is a Gemma 4 assistant: name its folder or Hub id as 'model', without a method.",
            )
        self.draft_with(model, config.early_exit, model is context.assistant_model, config.model is not None)
        if self.drafter.family is not None and target.family is None:
            raise config.fail(
                "model", f"needs what an encoder has read, and {type(target.model).__name__} has no encoder."
            )
        if not is_encoder_decoder(model) and self.drafter.family is not None:
            width, theirs = (packed.model.config.hidden_size for packed in (self.drafter, target))
            if width != theirs:
                raise config.fail(
                    "model", f"reads the output of an encoder of width {width}, and the target's has {theirs}."
                )
        self.bridge = self.vocabulary = make_bridge(config, config.vocabulary_bridge, target, self.drafter, context)
        self.has_graphs = self.drafter.graphs is not None
        self.grow_as(config.shape(), has_loop=self.has_loop and self.has_graphs)
        # per sequence, the cache index of each node of the last draft (or -1)
        self.kept_nodes: dict[int, list[int]] = {}
        self.texts: dict[int, list[int]] = {}  # per sequence of the current round, its text in the drafter's tokens

    # ---- memory -----------------------------------------------------------------------------------------------------

    def new_cache(self, num_blocks: int, block_size: int) -> PagedStaticCache:
        return self.drafter.new_cache(num_blocks, block_size, self.bridge.nodes_are_drafter_tokens, grows=True)

    def own_tokens(self, num_tokens: int) -> int:
        return self.bridge.max_drafter_tokens(num_tokens)

    def evict(self, seq: Sequence) -> None:
        super().evict(seq)
        self.kept_nodes.pop(seq.id, None)

    def stop(self, seq: Sequence) -> None:
        super().stop(seq)
        self.kept_nodes.pop(seq.id, None)
        self.texts.pop(seq.id, None)
        self.bridge.forget(seq)

    # ---- drafting ---------------------------------------------------------------------------------------------------

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """Grow chains or trees, one depth per forward of the drafter, in the target's tokens."""
        trees = super().propose(sequences, limits)
        texts = [self.texts.get(seq.id, []) for seq in sequences]
        self.texts = {}
        return self.bridge.to_target(trees, sequences, texts) if trees.num_nodes else trees

    def begin_round(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        self.wake()
        self.texts = {
            seq.id: self.bridge.to_drafter(seq) for seq, limit in zip(sequences, limits, strict=True) if limit
        }
        # one forward then writes all texts, so later rows may share blocks of those before
        self.shares_at_once = max(map(len, self.texts.values()), default=0) <= self.config.prefill_chunk_size
        return super().begin_round(sequences, limits)

    def reach(self, seq: Sequence, limit: int) -> int:
        """The limit; 0 if text and draft do not fit into the drafter's positions or free blocks."""
        text = self.texts[seq.id]
        if self.drafter.max_positions is not None and len(text) + limit > self.drafter.max_positions:
            return 0
        try:
            self.drafter.read_source(self.cache, seq.id, seq.source)
        except OutOfBlocks:
            return 0
        self.cache.truncate(seq.id, self.bridge.num_unchanged(seq, text))
        self.cache.match_prefix(seq.id, text)
        if not self.try_reserve(seq, len(text) + self.shape.num_expanded(limit)):
            return 0
        if self.shares_at_once:
            self.cache.register_prefix(seq.id, text, len(text))
        return limit

    def score_only(self, rows: Callable[[nn.Module], nn.Module]) -> None:
        """Check that the model was loaded with these rows, and that they are the target's tokens."""
        if self.config.model is None:
            raise self.config.fail(
                "draft_vocabulary", "is for a drafter that is loaded for this target: name it in 'model'."
            )
        if type(self.bridge) is not SharedVocabulary:
            raise self.config.fail("draft_vocabulary", "cannot be used: the drafter has another tokenizer.")

    def roots(self, sequences: list[Sequence], limits: list[int]) -> tuple[torch.Tensor, ...]:
        """Read all new tokens of the texts, a chunk at a time; logits [R, V] of the token after each text."""
        chunk = self.config.prefill_chunk_size
        rows = [(seq, self.texts[seq.id]) for seq in sequences]
        while long := [(seq, text) for seq, text in rows if len(text) - self.num_read(seq) > chunk]:
            self._forward_texts(long, chunk)
        logits = self._forward_texts(rows, chunk)
        for seq, text in rows:
            self.cache.register_prefix(seq.id, text, len(text))
        return (logits,)

    def _forward_texts(self, rows: list[tuple[Sequence, list[int]]], chunk: int) -> torch.Tensor:
        """Read up to `chunk` new tokens of each text, and `after_text` where that is all; logits [R, V] of the last tokens."""
        inputs, ends = [], []
        for seq, text in rows:
            start = self.num_read(seq)
            end = min(start + chunk, len(text))
            ends.append(end)
            after = self.after_text(seq) if end == len(text) else []
            tokens = np.asarray(text[start:end] + after, dtype=np.int64)
            prompt = seq.num_chunked(start, end)
            inputs.append(RowInput(seq.id, tokens, start, logits=1 + len(after), prompt=prompt))
        logits = self.drafter.forward(inputs, self.cache).logits
        for row, end in zip(inputs, ends, strict=True):
            self.cache.tables[row.seq_id].length = end
        return logits

    def after_text(self, seq: Sequence) -> list[int]:
        """The drafter's tokens that are read after a whole text; their keys and values do not stay."""
        return []

    def drafter_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.bridge.drafter_ids(tokens)

    def round_programs(self) -> tuple[Any, None] | None:
        return super().round_programs() if type(self.bridge) is SharedVocabulary else None

    def drafted(self, sequences: list[Sequence], draft: Draft) -> None:
        if self.bridge.nodes_are_drafter_tokens:
            for seq, length, at in zip(sequences, draft.trees.lengths, draft.expanded, strict=True):
                if length:
                    self.kept_nodes[seq.id] = at.tolist()

    def observe(self, outcome: StepOutcome) -> None:
        """Keep the KV of accepted nodes, drop the others."""
        kept = []
        for seq, path in zip(outcome.sequences, outcome.accepted, strict=True):
            at = self.kept_nodes.pop(seq.id, None)
            if at is not None:
                start = self.cache.tables[seq.id].length
                kept.append((seq.id, start, [at[node] for node in path if at[node] >= 0]))
        if kept:
            self.cache.commit(kept)
