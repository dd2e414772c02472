"""Layers whose modules are run whole over packed rows, one token of each row at a time: their functions cannot be replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from .families import RecurrentFamily
from .mixers import RecurrentLayers, View

# Calls a mixer on packed tokens int64 [n, t], given the states before them [n, size] (None: texts begin here). Returns what the mixer
# returns, [n, t, ..] each, and the states after them.
_Run = Callable[[torch.Tensor, "torch.Tensor | None"], tuple[tuple[torch.Tensor, ...], torch.Tensor]]


class SteppedLayers(RecurrentLayers):
    """As RecurrentLayers, for modules that may convolve in any way and may keep several states. Prompts are read at once; other tokens
    level by level of the draft trees, with what the module has put into its cache for the level before.
    """

    def __init__(self, model: PreTrainedModel, family: RecurrentFamily):
        super().__init__(model, family)
        config: Any = model.config.get_text_config(decoder=True)
        again = getattr(config, "loop_num_passes", 1) - 1  # of some layers, each time with states of their own
        first, end = (getattr(config, f"loop_layer_index_{name}", 0) for name in ("start", "end"))
        mixers: list[Any] = self.mixers
        self.num_calls += again * sum(first <= int(mixer.layer_idx) < end for mixer in mixers)
        self._layouts: dict[Any, dict[str, torch.Tensor]] = {}  # layer → kind of state → an empty one [0, ..]

    def _read(self, mixer: Any, original: Callable, name: str, given: dict[str, Any], batch: Any) -> Any:
        hidden, more = given["hidden_states"], given.pop("kwargs", {})
        layer = mixer.layer_idx + given.get("cache_offset", 0), getattr(mixer, "conv_idx", 0)
        given["conv_mask"] = None  # of padding, which packed rows do not have
        by_token = {
            key: value[0]
            for key, value in given.items()
            if isinstance(value, torch.Tensor) and value.shape[:2] == hidden.shape[:2]
        }

        def run(tokens: torch.Tensor, before: torch.Tensor | None) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
            view = View({} if before is None else self._unpacked(layer, before))
            of_tokens = {key: value[tokens] for key, value in by_token.items()}
            returned = original(**{**given, **of_tokens, name: view}, **more)
            return returned if isinstance(returned, tuple) else (returned,), self._packed(layer, view.kept)

        outputs = self._read_all(layer, run, hidden, batch)
        return outputs if len(outputs) > 1 else outputs[0]

    def _packed(self, layer: Any, states: dict[str, torch.Tensor]) -> torch.Tensor:
        """A layer's states [n, ..] of all kinds as one tensor [n, size], in float32 or more."""
        layout = self._layouts.setdefault(layer, {kind: state[:0].clone() for kind, state in states.items()})
        dtype = functools.reduce(torch.promote_types, (state.dtype for state in states.values()), torch.float32)
        return torch.cat([states[kind].flatten(1).to(dtype) for kind in layout], dim=1)

    def _unpacked(self, layer: Any, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        layout = self._layouts[layer]
        parts = packed.split([empty.shape[1:].numel() for empty in layout.values()], dim=1)
        return {
            kind: part.unflatten(1, empty.shape[1:]).to(empty.dtype)
            for (kind, empty), part in zip(layout.items(), parts, strict=True)
        }

    def _read_all(self, layer: Any, run: _Run, hidden: torch.Tensor, batch: Any) -> list[torch.Tensor]:
        """What the mixer returns for all packed tokens, [1, T, ..] each."""
        pool, plan, device, outputs = batch.cache.states, batch.states, hidden.device, []
        if not pool.is_allocated(layer):
            if layer not in self._examples:
                _, state = run(torch.zeros(1, 1, dtype=torch.int64, device=device), None)
                self._examples[layer] = state.new_zeros(1, 0, 0), state, ()
            pool.allocate(layer, *self._examples[layer])
        states = pool.recurrent[layer]

        def read(tokens: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
            returned, after = run(tokens, before)
            if not outputs:
                outputs.extend(part.new_zeros(1, hidden.shape[1], *part.shape[2:]) for part in returned)
            for output, part in zip(outputs, returned, strict=True):
                output[0, tokens] = part
            return after

        for prompt in plan.prompts:
            before = None if prompt.base is None else states[prompt.base.state][None]
            states[prompt.state] = read(torch.arange(prompt.first, prompt.end, device=device)[None], before)[0]
        if plan.lines is not None:
            lines = plan.lines.on(device)
            after = states.index_select(0, lines.states)
            for (rows, columns), parents, kept, into in lines.levels:
                before = after if parents is None else after.index_select(0, parents)
                after = read(lines.packed[rows, columns][:, None], before)
                states.index_copy_(0, into, after if kept is None else after.index_select(0, kept))
        return outputs
