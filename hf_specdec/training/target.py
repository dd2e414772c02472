"""TargetModel: the frozen target, which provides hidden states and logits for training."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..core.errors import UnsupportedModel
from ..core.output import Taps
from ..model.architectures import check_supported, tapping
from ..model.encoder_decoder import family_of
from .batch import Batch
from .options import TrainingError

_LOGITS_AT_ONCE = 2**27  # maximum number of logits held at once when only their argmax is needed


class TargetModel:
    """A frozen target. `config` is the text model's; `vocab_size` the number of logits; `device` that of its hidden states, and of heads.
    Raises UnsupportedModel: speculative decoding does not support this model.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str):
        check_supported(model)
        if family_of(model) is not None:
            raise UnsupportedModel(
                f"{type(model).__name__} has an encoder, and heads are trained for decoder-only models: name one."
            )
        self.model, self.tokenizer, self.name = model.eval().requires_grad_(False), tokenizer, name
        self.config = model.config.get_text_config(decoder=True)
        self.hidden_size, self.num_layers = self.config.hidden_size, self.config.num_hidden_layers
        self.embed_tokens: nn.Module = model.get_input_embeddings()
        self.lm_head: Any = model.get_output_embeddings()
        self.vocab_size, self.device = len(self.lm_head.weight), self.lm_head.weight.device
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._check_logits()

    def lm_head_float32(self) -> nn.Module:
        """The language-model head for heads that share it: frozen, float32 (a copy, if the target is in another dtype)."""
        head = self.lm_head
        return head if head.weight.dtype == torch.float32 else copy.deepcopy(head).float().requires_grad_(False)

    @property
    def end_tokens(self) -> set[int]:
        """Ids that end an answer."""
        ids = self.model.generation_config.eos_token_id
        out = set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
        return out if self.tokenizer.eos_token_id is None else out | {self.tokenizer.eos_token_id}

    @torch.no_grad()
    def capture(self, batch: Batch, taps: Taps) -> Batch:
        """The batch with the hidden states in `taps`, float32, on the target's device; runs one forward. Rows are padded on the right and
        attention is causal, so no mask is needed.
        """
        batch = batch.to(self.device)
        found: dict[Any, torch.Tensor] = {}
        with torch.autocast(self.device.type, enabled=False), tapping(self.model, taps, found.__setitem__):
            self._forward(batch.input_ids)
        last = found.pop("last_hidden", None)
        layers = {index: found[index].float() for index in taps.layers}
        return replace(batch, last_hidden=None if last is None else last.float(), layers=layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's logits [.., V], float32, from final hidden states [.., H]; differentiable in `hidden`."""
        head = self.lm_head
        logits = head(hidden.to(head.weight.dtype)).float()
        config = self.config
        if scale := getattr(config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if divisor := getattr(config, "logits_scaling", None):  # Granite
            logits = logits / divisor
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.no_grad()
    def choices(self, batch: Batch) -> torch.Tensor:
        """The target's greedy choice after each token, int64 [B, S]: at t, for x_{t+1}."""
        hidden = batch.hidden().flatten(0, 1)
        rows = max(1, _LOGITS_AT_ONCE // self.vocab_size)
        parts = [self.logits(part).argmax(-1) for part in hidden.split(rows)]
        return torch.cat(parts).view(batch.input_ids.shape)

    def _forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, 1, V] of the last position, or of all positions if the model has no `logits_to_keep`."""
        kept = {"logits_to_keep": 1} if self._keeps_logits else {}
        return self.model(input_ids=input_ids, use_cache=False, return_dict=True, **kept).logits

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Raise TrainingError if `logits` differs from the model's own logits: families process them in different ways."""
        input_ids = torch.arange(4, device=self.device)[None] % self.vocab_size
        found: dict[Any, torch.Tensor] = {}
        with tapping(self.model, Taps(last_hidden=True), found.__setitem__):
            theirs = self._forward(input_ids)[:, -1].float()
        ours = self.logits(found["last_hidden"][:, -1])
        worst = float((ours - theirs).abs().max())
        if not worst <= 1e-2 * max(1.0, float(theirs.abs().max())):
            raise TrainingError(
                f"{type(self.model).__name__} does something to its logits that training cannot reproduce (they differ by "
                f"{worst:.3g} from its lm_head on its final hidden states), so heads cannot be trained for it."
            )
