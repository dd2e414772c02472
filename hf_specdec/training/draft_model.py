"""A small causal language model, distilled from the target on its own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from .base import Exported, Guesses, HeadTrainer, StepLoss, every_anchor, register
from .batch import Batch
from .draft_layer import layer_shape, main_directions
from .losses import TAUGHT, scored
from .options import DraftModelOptions, TrainingError


@register(DraftModelOptions)
class DraftModelTrainer(HeadTrainer):
    """Distillation (Leviathan et al. 2023; Zhou et al. 2024, DistillSpec) of a Llama of a few layers with the target's
    tokens: KL(target || draft) at every token of an answer. Its tied embeddings are initialised with the target's, projected on
    their main directions."""

    formats = ("transformers",)
    options: DraftModelOptions
    head: LlamaForCausalLM

    def build(self, token_counts: torch.Tensor) -> nn.Module:
        """A random Llama with the target's projected embeddings."""
        draft: Any = LlamaForCausalLM(draft_config(self.options, self.target)).float()
        table: torch.Tensor = self.target.embed_tokens.weight  # pyright: ignore[reportAssignmentType]
        with torch.no_grad():
            directions = main_directions(table, draft.config.hidden_size)
            draft.model.embed_tokens.weight.copy_(table.float() @ directions.T)
        draft.config._attn_implementation = "sdpa"
        self.num_guesses = self.options.num_draft_tokens
        return draft.to(self.target.device)

    def _hidden(self, batch: Batch) -> torch.Tensor:
        return self.head.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state

    def loss(self, batch: Batch) -> StepLoss:
        """The sum of the losses of the answers' tokens."""
        counts, size, teacher = batch.ahead(batch.loss_mask, 1), self.target.vocab_size, None
        labels = batch.ahead(batch.input_ids, 1)[counts]
        if self.options.loss in TAUGHT:
            teacher = self.target.probabilities(batch.hidden()[counts])
            labels = teacher.argmax(-1)
        hidden = self._hidden(batch)[counts]
        losses, right = scored(self.options.loss, self.head.lm_head, size, hidden, labels, teacher)
        return StepLoss(losses.sum(), counts.sum(), {"accuracy_1": (right.sum(), counts.sum())})

    def guesses(self, batch: Batch) -> Guesses:
        """Greedy guesses; guess k reads the k tokens of the text that follow the newest one."""
        choices = self.head.lm_head(self._hidden(batch)).argmax(-1)
        ahead = [batch.ahead(choices, 1 + k) for k in range(self.num_guesses)]
        return every_anchor(torch.stack(ahead, dim=-1))

    def exported(self, form: str) -> Exported:
        """The model as `save_pretrained` writes it, with the tokenizer."""
        config = {key: value for key, value in self.head.config.to_dict().items() if key != "dtype"}
        config["architectures"] = [type(self.head).__name__]
        tensors = {name: value for name, value in self.head.state_dict().items() if name != "lm_head.weight"}  # tied
        return Exported(tensors, config, write_others=self._write_tokenizer)

    def _write_tokenizer(self, folder: Path) -> None:
        self.target.tokenizer.save_pretrained(folder)
        GenerationConfig(**special_tokens(self.target)).save_pretrained(folder)


def special_tokens(target) -> dict[str, Any]:
    """The ids that begin, end and pad the target's texts."""
    source = target.model.generation_config
    return {key: getattr(source, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def draft_config(options: DraftModelOptions, target) -> LlamaConfig:
    """The draft model's configuration, with the target's vocabulary and positions; raises TrainingError if the shape is impossible."""
    shape = layer_shape(target, 2048)
    width = options.width or max(2, target.hidden_size // 2)
    if width > target.hidden_size:
        raise TrainingError(f"--width {width} is more than the target's {target.hidden_size}: drafts are smaller.")
    heads = options.num_heads or max(1, width // shape["head_dim"])
    kv_heads = options.num_kv_heads or max(1, heads // 2)
    if width % heads or (width // heads) % 2 or heads % kv_heads:
        raise TrainingError(
            f"A width of {width} does not divide into {heads} heads of an even size with {kv_heads} for keys and values: "
            "give --width, --num-heads and --num-kv-heads that do."
        )
    kept = {key: shape[key] for key in ("vocab_size", "max_position_embeddings", "rope_parameters")}
    return LlamaConfig(
        **kept,
        hidden_size=width,
        intermediate_size=options.intermediate_size or 3 * width,
        num_hidden_layers=options.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-6,
        initializer_range=width**-0.5,
        tie_word_embeddings=True,
        **special_tokens(target),
    )
