"""Drafting with Gemma 4 assistants, in chains and trees; keys of method `gemma4_assistant`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from ...cache import PagedStaticCache
from ...core.errors import UnsupportedModel
from ...core.outcome import StepOutcome
from ...core.rows import RowInput
from ...core.sequence import Sequence
from ...model.attention import replaced_attention
from ...model.packed_batch import PackedBatch
from ...model.packed_model import PackedModel
from ..base import DrafterContext
from ..checkpoints.target_parts import load_once, target_embeddings
from ..growing.last_hidden import LastHiddenConfig, LastHiddenGenerator
from ..growing.tree_growth import DraftLevel
from ..registry import register
from .checkpoint import is_assistant, layers_with_keys, load_assistant

_DEEPEST = 64  # tokens: a bound of drafts that nobody needs, because the position of a round's queries does not move


@dataclass
class Gemma4AssistantConfig(LastHiddenConfig):
    """Gemma 4 assistants draft token by token with a few layers without keys of their own: they attend to the target's. By default
    drafts are as long as the assistant's generation_config.json says."""

    name = "gemma4_assistant"
    requires = ("a Gemma 4 assistant made for the target: 'model'",)
    default_num_speculative_tokens = 4  # if that file names no length; mlx-vlm's best were 2 to 4


@register(Gemma4AssistantConfig)
class Gemma4AssistantGenerator(LastHiddenGenerator):
    """Drafts with a Gemma 4 assistant.

    A pass takes the embedding of a token and the target's hidden state before it; below the text's newest token, in place of the latter,
    what the pass before returned. All passes of a round have the position after the text's last key. They see all keys of the text, or in
    sliding layers the last `sliding_window` + 1, as in transformers, and write none.

    Attributes:
        keys: the target's cache; None before the first step.
    """

    config: Gemma4AssistantConfig

    def __init__(self, config: Gemma4AssistantConfig, target: PackedModel, context: DrafterContext | None = None):
        checkpoint = config.open_head(is_assistant)
        self.assistant: Any = load_once(config, target, lambda: load_assistant(checkpoint, target))
        settings: GenerationConfig = self.assistant.generation_config
        config = config.with_default_length(settings.num_assistant_tokens)
        super().__init__(config, target, self.assistant, _DEEPEST, has_loop=False)
        self.embeddings = target_embeddings(target)
        self.suppressed = torch.tensor(settings.suppress_tokens or [], dtype=torch.long, device=self.device)
        self.keys: PagedStaticCache | None = None
        self._texts: list[Sequence] = []  # of the current round
        self._read = layers_with_keys(target)
        for layer in self.assistant.model.layers:
            layer.self_attn.layer_idx = self._read[layer.self_attn.layer_type]  # by it, attention finds the pages

    def observe(self, outcome: StepOutcome) -> None:
        """As in the base. The keys are where the step has written them."""
        super().observe(outcome)
        self.keys = outcome.cache
        if self.keys is None:
            raise UnsupportedModel(
                "A Gemma 4 assistant reads the target's keys in our pages, which transformers' own loop does not have: pass "
                "speculative_config to generate() in place of assisted_loop()."
            )

    def release(self) -> None:
        super().release()
        self.keys, self._texts = None, []

    def active(self) -> contextlib.AbstractContextManager:
        stack = contextlib.ExitStack()
        stack.enter_context(super().active())
        stack.enter_context(replaced_attention([self.assistant.config.text_config]))
        return stack

    # ---- the round --------------------------------------------------------------------------------------------------

    def ready(self, sequences: list[Sequence], limits: list[int]) -> list[int]:
        """The limits; 0 for rows whose hidden state or keys are not known, or whose text is shorter than the tree is wide."""
        limits = super().ready(sequences, limits)
        return [
            limit if limit and self._num_keys(seq) == len(seq.tokens) - 1 >= self.shape.widest else 0
            for seq, limit in zip(sequences, limits, strict=True)
        ]

    def _num_keys(self, seq: Sequence) -> int:
        return 0 if self.keys is None else self.keys.tables[seq.id].length

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
        assert self.keys is not None
        keys, assistant, count = self.keys, self.assistant, tokens.shape[1]
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
