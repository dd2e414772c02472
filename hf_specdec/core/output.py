"""Taps: the features a drafter needs from the target's forward. PackedOutput: the results of a forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..kernels.transfer import upload


@dataclass(frozen=True)
class Taps:
    """The features a drafter needs from the target's forward, besides the logits that verification needs.

    Attributes:
        last_hidden: the final hidden states, after the last norm (the input of the language-model head).
        layers: indices into transformers' `hidden_states` (0: embeddings, i: output of layer i - 1).
        logits: the logits of every token fed.
        newest_only: hidden states are needed only of each text's newest token.
    """

    last_hidden: bool = False
    layers: tuple[int, ...] = ()
    logits: bool = False
    newest_only: bool = False

    @property
    def whole_text(self) -> bool:
        """Whether hidden states of every token are needed, except of those whose results the drafter has kept from earlier texts."""
        return bool(self.last_hidden or self.layers) and not self.newest_only

    def __or__(self, other: Taps) -> Taps:
        layers = tuple(dict.fromkeys(self.layers + other.layers))
        newest = (self.newest_only or other.newest_only) and not (self.whole_text or other.whole_text)
        return Taps(self.last_hidden or other.last_hidden, layers, self.logits or other.logits, newest)


@dataclass
class PackedOutput:
    """Results of one forward over T packed tokens.

    Attributes:
        logits: float32 [R, V], of the R tokens in the batch's `logit_index`.
        last_hidden: [T, H] or None.
        layers: {index: [T, H]} for the layers tapped.
        hidden_states: all of transformers' hidden states, [T, H] each, if asked for ([T, A, H] where a layer has A parallel
            states, as in Gemma 3n).
        input_ids: int64 [T], every token fed.
        all_logits: [T, V] in the model's dtype, if `taps.logits`.
    """

    logits: torch.Tensor
    last_hidden: torch.Tensor | None
    layers: dict[int, torch.Tensor]
    hidden_states: tuple[torch.Tensor, ...] | None = None
    input_ids: torch.Tensor | None = None
    all_logits: torch.Tensor | None = None

    def first(self, count: int, wanted: np.ndarray | None) -> PackedOutput:
        """The results of the first `count` tokens, where this output has logits of every token.

        Args:
            wanted: numpy [R], tokens whose logits to keep; None: all `count`.
        """
        first = self._each(lambda states: states[:count])
        if wanted is not None:
            first.logits = self.logits.index_select(0, upload(wanted, self.logits.device))
        return first

    def copied(self) -> PackedOutput:
        """A copy that stays valid after the model's next forward, which overwrites the outputs of a graph."""
        return replace(self._each(torch.Tensor.clone), hidden_states=self.hidden_states)

    def _each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedOutput:
        """The function's results for all tensors but `hidden_states`."""
        layers = {layer: function(states) for layer, states in self.layers.items()}
        others = (self.last_hidden, self.input_ids, self.all_logits)
        last_hidden, input_ids, all_logits = (None if tensor is None else function(tensor) for tensor in others)
        return PackedOutput(function(self.logits), last_hidden, layers, input_ids=input_ids, all_logits=all_logits)
