"""A smaller language model drafts (Leviathan et al. 2023; Chen et al. 2023), in chains or top-k trees."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
import torch

from ..cache import OutOfBlocks
from ..config import SpeculativeConfig, SpeculativeConfigError
from ..runtime import DraftTrees, PackedModel, Sequence
from ..runtime.packed_batch import RowInput
from .base import CandidateGenerator, DrafterContext, StepOutcome
from .registry import register
from .tree_growth import TreeGrowth
from .vocabulary import load_drafter, make_bridge

BRIDGES = ("intersection", "text")


@dataclass
class DraftModelConfig(SpeculativeConfig):
    """A smaller causal language model drafts token by token, with a KV cache of its own; or the target drafts for itself
    through its first layers (`early_exit`). Drafters with another tokenizer are bridged by shared tokens or by text."""

    name = "draft_model"
    requires = ("a smaller model: 'model', generate(assistant_model=...) or 'early_exit'",)

    model: str | None = field(default=None, metadata={"help": "drafter: bundled name, folder or Hub id"})
    revision: str | None = field(default=None, metadata={"help": "Hub revision of the drafter"})
    early_exit: int | None = field(
        default=None, metadata={"help": "draft with the target's own first layers, this many"}
    )
    branching_factors: list[int] | None = field(
        default=None,
        metadata={"help": "children per node at each depth, e.g. [3, 2, 1]: draft a tree instead of a chain"},
    )
    vocabulary_bridge: str | None = field(
        default=None,
        metadata={
            "help": "for a drafter with another tokenizer: 'intersection' (tokens both have) or 'text' (re-encode)"
        },
    )

    def __post_init__(self) -> None:
        if self.branching_factors is not None:
            factors = self.branching_factors
            are_counts = isinstance(factors, list) and all(type(f) is int and f >= 1 for f in factors)
            if not factors or not are_counts:
                raise self.fail("branching_factors", f"must be a list of integers of at least 1, not {factors!r}.")
            if self.num_speculative_tokens not in (None, len(factors)):
                raise self.fail(
                    "branching_factors",
                    f"has {len(factors)} depths, but num_speculative_tokens is {self.num_speculative_tokens}.",
                )
            self.num_speculative_tokens = len(factors)
        super().__post_init__()
        if isinstance(self.model, os.PathLike):
            self.model = os.fspath(self.model)
        if self.model is not None and not isinstance(self.model, str):
            hint = (
                "pass a loaded model as generate(assistant_model=...)"
                if callable(self.model)
                else f"not {self.model!r}"
            )
            raise SpeculativeConfigError(f"speculative_config['model'] must be the name or folder of a model; {hint}.")
        self.check_text("model")
        self.check_text("revision")
        self.check_int("early_exit", minimum=1, optional=True)
        self.check_choice("vocabulary_bridge", BRIDGES, optional=True)
        if self.model is not None and self.early_exit is not None:
            raise self.fail("early_exit", "cannot be combined with 'model': the target drafts for itself.")

    @property
    def widths(self) -> list[int]:
        """Children per node at each depth."""
        return self.branching_factors or [1] * (self.num_speculative_tokens or 1)


@register(DraftModelConfig)
class DraftModelGenerator(CandidateGenerator):
    """Drafts with a causal language model run by the same PackedModel and paged cache as the target."""

    config: DraftModelConfig
    uses_assistant_model = True

    def __init__(self, config: DraftModelConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        context = context or DrafterContext()
        model = load_drafter(config, target, context)
        if config.early_exit is not None and config.early_exit >= target.config.num_hidden_layers:
            raise config.fail("early_exit", f"must be less than the target's {target.config.num_hidden_layers} layers.")
        self.drafter = PackedModel(model, num_layers=config.early_exit, prepack_weights=config.prepack_weights)
        self.bridge = make_bridge(config, target, self.drafter, context)
        self.cache = self.drafter.new_cache(1, config.block_size)
        self.drafted: dict[int, int] = {}  # nodes of the last draft whose KV the drafter has

    # ---- memory -----------------------------------------------------------------------------------------------------

    @property
    def max_draft_nodes(self) -> int:
        """Nodes of the whole tree."""
        return int(np.cumprod(self.config.widths).sum())

    def allocate(self, num_tokens: int, num_sequences: int, block_size: int) -> None:
        """A cache like the target's, plus room for one draft per sequence."""
        extra = -(-(self.max_draft_nodes + block_size) // block_size) * num_sequences
        num_blocks = -(-self.bridge.max_drafter_tokens(num_tokens) // block_size) + extra
        self.cache = self.drafter.new_cache(num_blocks, block_size, share_prefixes=self.bridge.nodes_are_drafter_tokens)

    def release(self) -> None:
        """Drop the cache."""
        self.cache = self.drafter.new_cache(1, self.config.block_size)

    def start(self, seq: Sequence) -> None:
        """An empty cache entry; the prompt is read at the first proposal."""
        self.cache.add(seq.id)

    def evict(self, seq: Sequence) -> None:
        """Give the KV blocks back; they are recomputed from the tokens."""
        self.cache.remove(seq.id)
        self.cache.add(seq.id)
        self.drafted.pop(seq.id, None)

    def stop(self, seq: Sequence) -> None:
        """Free the cache entry."""
        self.cache.remove(seq.id)
        self.drafted.pop(seq.id, None)
        self.bridge.forget(seq)

    def active(self):
        """The drafter reads pages."""
        return self.drafter.active()

    # ---- drafting ---------------------------------------------------------------------------------------------------

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """Chains or top-k trees, grown one depth per drafter forward; rows whose limit is reached drop out."""
        depth = len(self.config.widths)
        limits = [min(limit, depth) for limit in limits]
        texts = [self.bridge.to_drafter(seq) if limit else [] for seq, limit in zip(sequences, limits, strict=True)]
        one_forward = max(map(len, texts)) <= self.config.prefill_chunk_size
        limits = [
            limit if limit and self._make_room(seq, text, limit, share_now=one_forward) else 0
            for seq, text, limit in zip(sequences, texts, limits, strict=True)
        ]
        rows = [i for i, limit in enumerate(limits) if limit]
        if not rows:
            return DraftTrees.empty(len(sequences), self.target.device)
        logits = self._read([(sequences[i], texts[i]) for i in rows])
        growth = TreeGrowth(self, sequences, [len(text) for text in texts], limits)
        trees = growth.grow(logits)
        for i in rows:
            self.drafted[sequences[i].id] = growth.num_forwarded[i]
        return self.bridge.to_target(trees, sequences, texts)

    def _make_room(self, seq: Sequence, text: list[int], limit: int, share_now: bool) -> bool:
        """Whether the drafter has positions and blocks for the text and a draft of that depth; they are reserved."""
        nodes = int(np.cumprod(self.config.widths[:limit]).sum())
        if self.drafter.max_positions is not None and len(text) + limit > self.drafter.max_positions:
            return False
        self.cache.truncate(seq.id, self.bridge.num_unchanged(seq, text))
        self.cache.match_prefix(seq.id, text)
        try:
            self.cache.reserve(seq.id, len(text) + nodes)
        except OutOfBlocks:
            return False
        if share_now:  # all texts are written in one forward, so later rows may already read these blocks
            self.cache.register_prefix(seq.id, text, len(text))
        return True

    def _read(self, rows: list[tuple[Sequence, list[int]]]) -> torch.Tensor:
        """Bring the drafter's KV up to the rows' texts, a chunk at a time; logits [rows, V] after each last token."""
        chunk = self.config.prefill_chunk_size
        tables = [self.cache.tables[seq.id] for seq, _ in rows]
        while any(len(text) - table.length > chunk for (_, text), table in zip(rows, tables, strict=True)):
            self._forward_texts(
                [row for row, table in zip(rows, tables, strict=True) if len(row[1]) - table.length > chunk], chunk
            )
        logits = self._forward_texts(rows, chunk)
        for seq, text in rows:
            self.cache.register_prefix(seq.id, text, len(text))
        return logits

    def _forward_texts(self, rows: list[tuple[Sequence, list[int]]], chunk: int) -> torch.Tensor:
        inputs = []
        for seq, text in rows:
            start = self.cache.tables[seq.id].length
            inputs.append(RowInput(seq.id, np.asarray(text[start : start + chunk], dtype=np.int64), start))
        logits = self.drafter.forward(inputs, self.cache).logits
        for row in inputs:
            self.cache.tables[row.seq_id].length = row.start + len(row.tokens)
        return logits

    def observe(self, outcome: StepOutcome) -> None:
        """Keep the KV of accepted nodes, drop the others."""
        kept = []
        for seq, path in zip(outcome.sequences, outcome.accepted, strict=True):
            forwarded = self.drafted.pop(seq.id, 0)
            if forwarded and self.bridge.nodes_are_drafter_tokens:
                start = self.cache.tables[seq.id].length
                kept.append((seq.id, start, [node for node in path if node < forwarded]))
        if kept:
            self.cache.commit(kept)
