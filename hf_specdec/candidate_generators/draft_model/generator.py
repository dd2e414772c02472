"""Drafting with a smaller language model (Leviathan et al. 2023; Chen et al. 2023), in chains or trees."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ...cache import PagedStaticCache
from ...core.draft_trees import DraftTrees
from ...core.outcome import StepOutcome
from ...core.rows import RowInput
from ...core.sequence import Sequence
from ...model.packed_model import PackedModel
from ...model.prepare import ModelOptions, prepare
from ..base import DrafterContext, RunsModel
from ..growing.grower import CachedGenerator
from ..growing.levels import Draft, Level
from ..registry import register
from .config import DraftModelConfig
from .head import load_drafter
from .vocabulary import make_bridge


@register(DraftModelConfig)
class DraftModelGenerator(CachedGenerator, RunsModel):
    """Drafts with a causal language model, run like the target by a PackedModel over a paged cache."""

    has_loop = True
    config: DraftModelConfig

    def __init__(self, config: DraftModelConfig, target: PackedModel, context: DrafterContext | None = None):
        super().__init__(config, target, context)
        context = context or DrafterContext()
        model = load_drafter(config, target, context)
        if model is target.model and config.quantization is not None:
            raise config.fail(
                "quantization",
                "cannot be given: the target drafts for itself. Use 'target_quantization', or leave it out.",
            )
        if config.early_exit is not None and config.early_exit >= target.config.num_hidden_layers:
            raise config.fail("early_exit", f"must be less than the target's {target.config.num_hidden_layers} layers.")
        options = ModelOptions(
            prepack_weights=config.prepack_weights,
            # A target that drafts for itself shares its layers.
            keep_linears=config.deterministic and model is target.model,
            cuda_graphs=config.cuda_graphs,
            quantization=config.quantization,
            owned=config.model is not None,
            compile=config.compile,
            native=config.native,
        )
        borrowed = model is context.assistant_model
        self.drafter = prepare(model, options, num_layers=config.early_exit, borrowed=borrowed)
        self.run_as_graphs(self.drafter.graphs is not None)
        self.bridge = self.vocabulary = make_bridge(config, target, self.drafter, context)
        self.cache = self.new_cache(1, config.block_size)
        # per sequence, the cache index of each node of the last draft (or -1)
        self.kept_nodes: dict[int, list[int]] = {}
        self.texts: dict[int, list[int]] = {}  # per sequence of the current round, its text in the drafter's tokens

    # ---- memory -----------------------------------------------------------------------------------------------------

    def new_cache(self, num_blocks: int, block_size: int) -> PagedStaticCache:
        """A cache for the drafter's layers, which grows up to `num_blocks`."""
        return self.drafter.new_cache(num_blocks, block_size, self.bridge.nodes_are_drafter_tokens, grows=True)

    def own_tokens(self, num_tokens: int) -> int:
        """The most tokens that a text can have in the drafter's vocabulary."""
        return self.bridge.max_drafter_tokens(num_tokens)

    def evict(self, seq: Sequence) -> None:
        """Give the KV blocks back; they are recomputed from the tokens."""
        super().evict(seq)
        self.kept_nodes.pop(seq.id, None)

    def stop(self, seq: Sequence) -> None:
        """Free the cache entry."""
        super().stop(seq)
        self.kept_nodes.pop(seq.id, None)
        self.texts.pop(seq.id, None)
        self.bridge.forget(seq)

    def active(self):
        """A context in which the drafter's attention reads pages."""
        return self.drafter.active()

    # ---- drafting ---------------------------------------------------------------------------------------------------

    def propose(self, sequences: list[Sequence], limits: list[int]) -> DraftTrees:
        """Grow chains or trees, one depth per forward of the drafter, in the target's tokens."""
        trees = super().propose(sequences, limits)
        texts = [self.texts.get(seq.id, []) for seq in sequences]
        self.texts = {}
        return self.bridge.to_target(trees, sequences, texts) if trees.num_nodes else trees

    def ready(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """The limits; 0 for rows whose text and draft do not fit into the drafter's positions or free blocks."""
        self.sequences = sequences
        self.texts = {
            seq.id: self.bridge.to_drafter(seq) for seq, limit in zip(sequences, limits, strict=True) if limit
        }
        one_forward = max(map(len, self.texts.values()), default=0) <= self.config.prefill_chunk_size
        return [
            limit if limit and self._make_room(seq, self.texts[seq.id], limit, share_now=one_forward) else 0
            for seq, limit in zip(sequences, limits, strict=True)
        ]

    def _make_room(self, seq: Sequence, text: list[int], limit: int, share_now: bool) -> bool:
        if self.drafter.max_positions is not None and len(text) + limit > self.drafter.max_positions:
            return False
        self.cache.truncate(seq.id, self.bridge.num_unchanged(seq, text))
        self.cache.match_prefix(seq.id, text)
        if not self.try_reserve(seq, len(text) + self.shape.num_expanded(limit)):
            return False
        if share_now:  # one forward writes all texts, so later rows may share these blocks
            self.cache.register_prefix(seq.id, text, len(text))
        return True

    def modules(self) -> list[nn.Module]:
        """The drafter."""
        return [self.drafter.model]

    def roots(self, sequences: list[Sequence]) -> tuple[torch.Tensor, ...]:
        """Read all new tokens of the texts, a chunk at a time; logits [R, V] of the token after each text."""
        chunk = self.config.prefill_chunk_size
        rows = [(seq, self.texts[seq.id]) for seq in sequences]
        tables = [self.cache.tables[seq.id] for seq in sequences]
        while any(len(text) - table.length > chunk for (_, text), table in zip(rows, tables, strict=True)):
            self._forward_texts(
                [row for row, table in zip(rows, tables, strict=True) if len(row[1]) - table.length > chunk], chunk
            )
        logits = self._forward_texts(rows, chunk)
        for seq, text in rows:
            self.cache.register_prefix(seq.id, text, len(text))
        return (logits,)

    def _forward_texts(self, rows: list[tuple[Sequence, list[int]]], chunk: int) -> torch.Tensor:
        inputs = []
        for seq, text in rows:
            start = self.cache.tables[seq.id].length
            tokens = np.asarray(text[start : start + chunk], dtype=np.int64)
            inputs.append(RowInput(seq.id, tokens, start, prompt=seq.num_chunked(start, start + len(tokens))))
        logits = self.drafter.forward(inputs, self.cache).logits
        for row in inputs:
            self.cache.tables[row.seq_id].length = row.start + len(row.tokens)
        return logits

    def expand(self, level: Level) -> torch.Tensor:
        """Run the drafter over the nodes of one depth: logits [R, F, V]."""
        rows, count = level.tokens.shape
        tokens = self.bridge.drafter_ids(level.tokens)
        if self.loop is not None:
            output = self.drafter.forward_batch(self.loop.batch(level.depth, tokens, level.ancestors))
        else:
            seq_ids = [self.sequences[i].id for i in level.rows]
            positions = [len(self.texts[seq_id]) - 1 for seq_id in seq_ids]
            output = self.drafter.forward(self.level_inputs(level, tokens, seq_ids, positions), self.cache)
        return output.logits.view(rows, count, -1)

    def drafted(self, sequences: list[Sequence], draft: Draft) -> None:
        """Keep the cache indices of the draft's nodes."""
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
