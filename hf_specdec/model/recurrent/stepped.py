"""Layers whose modules are run whole over packed rows, one token of each row at a time: their functions cannot be replaced."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from ...core.names import cache_argument
from .families import RecurrentFamily
from .mixers import RecurrentLayers

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

    def _packed_forward(self, mixer: Any, own: Callable) -> Callable:
        signature = inspect.signature(own)
        name = cache_argument(signature.parameters)

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            batch = getattr(given.get(name), "batch", None)
            if batch is None:
                return own(*args, **kwargs)
            hidden, more = given["hidden_states"], given.pop("kwargs", {})
            layer = mixer.layer_idx + given.get("cache_offset", 0), getattr(mixer, "conv_idx", 0)
            given["conv_mask"] = None  # of padding, which packed rows do not have
            by_token = {
                key: value[0]
                for key, value in given.items()
                if isinstance(value, torch.Tensor) and value.shape[:2] == hidden.shape[:2]
            }

            def run(tokens: torch.Tensor, before: torch.Tensor | None) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
                view = _States({} if before is None else self._unpacked(layer, before))
                own_inputs = {key: value[tokens] for key, value in by_token.items()}
                read = own(**{**given, **own_inputs, name: view}, **more)
                return read if isinstance(read, tuple) else (read,), self._packed(layer, view.kept)

            batch.states.num_calls += 1
            read = self._read(layer, run, hidden, batch)
            return read if len(read) > 1 else read[0]

        return forward

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

    def _read(self, layer: Any, run: _Run, hidden: torch.Tensor, batch: Any) -> list[torch.Tensor]:
        """What the mixer returns for all packed tokens, [1, T, ..] each."""
        pool, plan, device, outputs = batch.cache.states, batch.states, hidden.device, []
        if not pool.is_allocated(layer):
            if layer not in self._examples:
                _, state = run(torch.zeros(1, 1, dtype=torch.int64, device=device), None)
                self._examples[layer] = state.new_zeros(1, 0, 0), state, ()
            pool.allocate(layer, *self._examples[layer])
        states = pool.recurrent[layer]

        def read(tokens: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
            found, after = run(tokens, before)
            if not outputs:
                outputs.extend(each.new_zeros(1, hidden.shape[1], *each.shape[2:]) for each in found)
            for output, each in zip(outputs, found, strict=True):
                output[0, tokens] = each
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


class _States:
    """The cache that a mixer sees: its states [n, ..] by kind."""

    def __init__(self, kept: dict[str, torch.Tensor]):
        self.kept = kept

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.kept.get("conv")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.kept.get("recurrent")

    def is_recording_past(self, layer_idx: int) -> bool:
        """True, so that a convolution takes its path for many tokens, which changes no state in place."""
        return True

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """The inputs of the convolution: the new ones [n, channels, t], after those before. Without `conv_kernel_size`: its state."""
        if conv_kernel_size is None:
            self.kept["conv"] = conv_states
            return conv_states
        before = self.kept.get("conv")
        joined = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        padded = torch.nn.functional.pad(joined, (conv_kernel_size, 0)) if before is None else joined
        self.kept["conv"] = padded[..., -conv_kernel_size:]
        return joined

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        self.kept["recurrent"] = recurrent_states
        return recurrent_states
