"""TargetModel: the frozen target, which provides hidden states and logits for training."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..core.errors import UnsupportedModel
from ..core.output import Taps
from ..core.sequence import end_ids
from ..model.architectures import check_supported, tapping
from ..model.encoder_decoder import family_of
from .batch import Batch
from .options import TrainingError

LogitsOf = Callable[[torch.Tensor], torch.Tensor]
_LOGITS_AT_ONCE = 2**26  # the most logits of which the argmax or the probabilities are computed together


def _parts(hidden: torch.Tensor, size: int) -> tuple[torch.Tensor, ...]:
    return hidden.split(max(1, _LOGITS_AT_ONCE // size))


def argmax_of(logits_of: LogitsOf, hidden: torch.Tensor, size: int) -> torch.Tensor:
    """Argmax [n] of logits over `size` tokens from hidden states [n, H], a part at a time."""
    return torch.cat([logits_of(part).argmax(-1) for part in _parts(hidden, size)])


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
    def end_tokens(self) -> frozenset[int]:
        """Ids that end an answer."""
        return end_ids(self.model.generation_config.eos_token_id) | end_ids(self.tokenizer.eos_token_id)

    @torch.no_grad()
    def capture(self, batch: Batch, taps: Taps) -> Batch:
        """The batch with the hidden states in `taps`, float32, on the target's device; runs one forward. Rows are padded on the right and
        attention is causal, so no mask is needed.
        """
        batch = batch.to(self.device)
        states: dict[Any, torch.Tensor] = {}
        with torch.autocast(self.device.type, enabled=False), tapping(self.model, taps, states.__setitem__):
            self._forward(batch.input_ids)
        last = states.pop("last_hidden", None)
        layers = {index: states[index].float() for index in taps.layers}
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
        return argmax_of(self.logits, batch.hidden().flatten(0, 1), self.vocab_size).view(batch.input_ids.shape)

    @torch.no_grad()
    def probabilities(self, hidden: torch.Tensor, among: torch.Tensor | None = None) -> torch.Tensor:
        """Probabilities, float32 [n, V], from final hidden states [n, H]; renormalised over the tokens `among` [Vd], if given."""
        logits = (self.logits(part) for part in _parts(hidden, self.vocab_size))
        parts = [(scores if among is None else scores[:, among]).softmax(-1, dtype=torch.float32) for scores in logits]
        return torch.cat(parts)

    def _forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, 1, V] of the last position, or of all positions if the model has no `logits_to_keep`."""
        kept = {"logits_to_keep": 1} if self._keeps_logits else {}
        return self.model(input_ids=input_ids, use_cache=False, return_dict=True, **kept).logits

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Raise TrainingError if `logits` differs from the model's own logits: families process them in different ways."""
        input_ids = torch.arange(4, device=self.device)[None] % self.vocab_size
        states: dict[Any, torch.Tensor] = {}
        with tapping(self.model, Taps(last_hidden=True), states.__setitem__):
            theirs = self._forward(input_ids)[:, -1].float()
        ours = self.logits(states["last_hidden"][:, -1])
        worst = float((ours - theirs).abs().max())
        if not worst <= 1e-2 * max(1.0, float(theirs.abs().max())):
            raise TrainingError(
                f"{type(self.model).__name__} does something to its logits that training cannot reproduce (they differ by "
                f"{worst:.3g} from its lm_head on its final hidden states), so heads cannot be trained for it."
            )
