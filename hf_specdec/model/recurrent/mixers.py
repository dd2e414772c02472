"""Runs a model's layers with a state over packed rows: each layer's forward gets the rows as lines, and states from the pool."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from ...cache.state_pool import StatePool
from ...core.errors import UnsupportedModel
from ...core.names import cache_argument
from ...kernels.dispatch import uses_triton
from ..functions import ModuleFunctions
from ..threads import replaced_values
from .families import CONVOLUTION, Inputs, RecurrentFamily, Rule, mixers_of
from .plan import LinesOnDevice, PromptPart


class RecurrentLayers:
    """The layers of a model that have a state. Each keeps its own forward, which is called with lines, and a `View` as its cache.

    Args:
        model: its mixers are transformers' own modules (see `mixers_of`).

    Attributes:
        chunk_size: tokens that the chunk form reads at once.
        num_calls: how many of their forwards a forward of the model runs.
    """

    def __init__(self, model: PreTrainedModel, family: RecurrentFamily):
        self.family = family
        self.mixers = mixers_of(model, family)
        self.num_calls = len(self.mixers)
        if self.mixers and not family.steps:
            source: Any = sys.modules[type(self.mixers[0]).__module__]
            names = {} if family.rule is None else {"chunk": family.rule.chunk}
            self._functions = ModuleFunctions.of(source, convolution=CONVOLUTION, **names)
            self._one_token: Any = None if family.rule is None else getattr(source, family.rule.one_token)
        # Gated DeltaNet's chunks are 64 tokens, and its modules do not say so.
        self.chunk_size = max(64, *(getattr(mixer, "chunk_size", 0) for mixer in self.mixers), 0)
        self._examples: dict[int, tuple[torch.Tensor, torch.Tensor | None, Inputs]] = {}

    @property
    def chunks_continue(self) -> bool:
        """True if the chunk form can start from a state."""
        return self.family.rule is None or self.family.rule.continues

    def cut(self, start: int, end: int) -> int:
        """Where to end a part of a prompt that may end at `end`: at a multiple of the chunk form's chunk if possible, because parts
        that end elsewhere differ more in rounding."""
        aligned = end // self.chunk_size * self.chunk_size
        return aligned if aligned > start else end

    @property
    def is_measured(self) -> bool:
        """True once every layer has run, so that the sizes of the states are known."""
        return len(self._examples) == self.num_calls

    def bytes_of_row(self, num_drafts: int, replays: bool) -> int:
        """Memory of a sequence with a draft of `num_drafts` nodes: slots in a StatePool for the nodes, for the last token and for the
        token before it."""
        slots, total = num_drafts + 2, 0
        for conv, state, inputs in self._examples.values():
            total += slots * conv.nbytes + (0 if state is None else state.nbytes * (1 if replays else slots))
            total += slots * sum(tensor.nbytes for tensor in inputs) if replays else 0
        return total

    def active(self) -> contextlib.AbstractContextManager[None]:
        """Inside the context, the mixers read packed rows when they are given a paged cache that is running a batch."""
        return replaced_values(
            (vars(mixer), "forward", self._packed_forward(mixer, mixer.forward)) for mixer in self.mixers
        )

    def _packed_forward(self, mixer: Any, original: Callable) -> Callable:
        """The forward of a mixer for packed rows, in place of the `original`, which others still get."""
        signature = inspect.signature(original)
        name = cache_argument(signature.parameters)

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            batch = getattr(given.get(name), "batch", None)
            if batch is None:
                return original(*args, **kwargs)
            batch.states.num_calls += 1
            return self._read(mixer, original, name, given, batch)

        return forward

    def _read(self, mixer: Any, original: Callable, name: str, given: dict[str, Any], batch: Any) -> Any:
        """What a mixer returns for the packed hidden states [1, T, H] among the arguments `given`; `name`: that of its cache."""

        def run(hidden: torch.Tensor, view: View) -> torch.Tensor:
            out = original(hidden, **{name: view, "attention_mask": None})
            if view.size == 0 or (view.state is None) != (self.family.rule is None):
                raise UnsupportedModel(f"{type(mixer).__name__} did not give its states to the cache.")
            return out

        layer, hidden, pool = int(mixer.layer_idx), given["hidden_states"], batch.cache.states
        if not pool.is_allocated(layer):
            pool.allocate(layer, *self._example(layer, run, hidden))
        out = torch.empty_like(hidden)
        for prompt in batch.states.prompts:
            self._read_prompt(layer, run, hidden, pool, prompt, out)
        if batch.states.lines is not None:
            self._read_lines(layer, run, hidden, pool, batch.states.lines.on(hidden.device), out)
        return out

    def _example(
        self, layer: int, run: Callable, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, Inputs]:
        """A layer's states after one token and this token's inputs, for their shapes and types."""
        if layer not in self._examples:
            view, inputs, rule = View({}), [], self.family.rule

            def record(chunk: Callable, *args: Any, **kwargs: Any):
                assert rule is not None
                inputs.extend(argument[:, 0] for argument in rule.bind(self._one_token, *args, **kwargs)[0])
                return chunk(*args, **kwargs)

            with self._functions.replaced(**({} if rule is None else {"chunk": record})):
                run(hidden[:, :1], view)
            self._examples[layer] = view.windows_at(1), view.state, tuple(inputs)
        return self._examples[layer]

    def _read_prompt(self, layer, run, hidden, pool: StatePool, prompt: PromptPart, out: torch.Tensor) -> None:
        """Read a part of a prompt in chunk form, as plain generate() does."""
        count, lines = prompt.end - prompt.first, hidden[:, prompt.first : prompt.end]
        if prompt.base is None:
            view = View({})
            out[:, prompt.first : prompt.end] = run(lines, view)
        else:
            assert not prompt.base.replayed  # drafts come after prompts
            states, slot, state = pool.recurrent.get(layer), prompt.base.slot, prompt.base.state
            recurrent = None if states is None else states[state : state + 1].clone()
            view = View({"conv": pool.conv[layer][slot : slot + 1], "recurrent": recurrent})
            if count > 1:
                out[:, prompt.first : prompt.end] = run(lines, view)
            else:  # given one token and a state, the layer would use its one-token rule
                with self._functions.replaced(**({} if self.family.rule is None else {"chunk": _of_first_token})):
                    out[:, prompt.first : prompt.end] = run(lines.expand(-1, 2, -1), view)[:, :1]
        pool.conv[layer][prompt.slot] = view.windows_at(count)[0]
        if view.state is not None:
            pool.recurrent[layer][prompt.state] = view.state[0]

    def _read_lines(self, layer, run, hidden, pool: StatePool, lines: LinesOnDevice, out: torch.Tensor) -> None:
        """Read tokens after kept states, one by one, and keep the states that may be needed."""
        states = pool.recurrent.get(layer)
        base = None if states is None else states.index_select(0, lines.states)
        inputs = pool.conv[layer].index_select(0, lines.bases)
        view, rule = View({"conv": inputs, "recurrent": base}), self.family.rule
        by_kernels, replacements = uses_triton(hidden.device), {}
        kept_windows, windows = (None, None) if by_kernels else lines.windows(inputs.shape[-1])
        if rule is not None and base is not None:
            of_rule = rule, self._one_token
            heads = itertools.count() if self.family.by_head else None
            if by_kernels and rule.over_lines is not None:
                replacements["chunk"] = _rule_over_lines(*of_rule, lines, base, pool, layer)
            else:
                replacements["chunk"] = _token_by_token(*of_rule, lines, base, pool, layer, heads)
        if by_kernels:
            replacements["convolution"] = _convolution_over_lines(lines, pool.conv[layer])
        elif windows is not None:
            replacements["convolution"] = _over_windows(windows)
        with self._functions.replaced(**replacements):
            read = run(hidden[0, lines.packed], view)
        out[0].index_copy_(0, lines.targets, read[lines.real])
        if kept_windows is None:  # the kernel has kept the convolution's inputs
            return
        kept = view.inputs.transpose(1, 2)[lines.kept[0][:, None], kept_windows]  # [m, k, channels]
        pool.conv[layer].index_copy_(0, lines.slots, kept.transpose(1, 2))


class View:
    """The cache that a mixer sees.

    Attributes:
        kept: its states [n, ..] by kind; none, or None: the texts begin here. The mixer replaces them.
        inputs, size: after the call, the convolution's inputs [n, channels, k + T], those before the lines first, and k.
        state: the recurrent state that the mixer returned.
    """

    def __init__(self, kept: dict[str, Any]):
        self.kept, self.inputs, self.size = kept, torch.empty(0), 0
        self.state: torch.Tensor | None = None

    def windows_at(self, count: int) -> torch.Tensor:
        """The convolution's last k inputs [n, channels, k] after `count` tokens."""
        return self.inputs[..., count : count + self.size].clone()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The convolution's last inputs [n, channels, k]."""
        return self.kept.get("conv")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The recurrent states [n, ..]."""
        return self.kept.get("recurrent")

    def is_recording_past(self, layer_idx: int) -> bool:
        """True, so that the convolution takes its path for many tokens, which changes no state in place."""
        return True

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """The inputs of the convolution: the new ones [n, channels, T], after those before. Without `conv_kernel_size`: its state."""
        if conv_kernel_size is None:
            self.kept["conv"] = conv_states
            return conv_states
        before = self.kept.get("conv")
        joined = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        self.inputs = torch.nn.functional.pad(joined, (conv_kernel_size, 0)) if before is None else joined
        self.kept["conv"], self.size = self.inputs[..., -conv_kernel_size:], conv_kernel_size
        return joined

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int = 0, state_idx: int = 0
    ) -> torch.Tensor:
        """Keep the state; it is not written in place, because the caller may still read the one before."""
        self.kept["recurrent"] = self.state = recurrent_states
        return recurrent_states


# ---- replacements of a module's functions during a call ------------------------------------------------------------------


def _of_first_token(chunk: Callable, *args: Any, **kwargs: Any):
    """The chunk form of the first of two tokens [1, 2, ..]; the second one is padding."""

    def first(tensor: Any) -> Any:
        return (
            tensor[:, :1]
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 2 and tensor.shape[:2] == (1, 2)
            else tensor
        )

    kept = {"initial_state", "initial_states"}
    given = {name: value if name in kept else first(value) for name, value in kwargs.items()}
    out, state = chunk(*map(first, args), **given)
    return torch.cat([out, torch.zeros_like(out)], dim=1), state


def _token_by_token(
    rule: Rule,
    one_token: Callable,
    lines: LinesOnDevice,
    base: torch.Tensor,
    pool: StatePool,
    layer: int,
    heads: Iterator[int] | None,
):
    """The rule over lines, level by level, from the states `base` [n, ..], instead of the chunk form; writes what is kept to the pool.
    `heads`: the next call's head; None: a call reads all of them."""

    def replacement(chunk: Callable, first: torch.Tensor, *args: Any, **kwargs: Any):
        inputs, step = rule.bind(one_token, first, *args, **kwargs)
        out, state = torch.empty(0), base
        kept_states, kept_inputs = pool.recurrent[layer], pool.inputs.get(layer, ())
        if heads is not None:
            head = next(heads)
            state, kept_states = state[:, head], kept_states[:, head]
            kept_inputs = kept_inputs[head * len(inputs) : (head + 1) * len(inputs)]
        for has, slots in lines.replays:
            before = state if has is None else state.index_select(0, has)
            _, after = step(tuple(kept_input.index_select(0, slots) for kept_input in kept_inputs), before)
            state = after if has is None else state.index_copy(0, has, after.to(state.dtype))
        for depth, (at, parents, kept, into) in enumerate(lines.levels):
            state = state if parents is None else state.index_select(0, parents)
            read, state = step(tuple(tensor[at] for tensor in inputs), state)
            state = state.to(kept_states.dtype)
            kept_states.index_copy_(0, into, state if kept is None else state.index_select(0, kept))
            if depth == 0:
                shape = (first.shape[0], first.shape[2], first.shape[1]) if rule.tokens_last else first.shape[:2]
                out = read.new_zeros(*shape, *(() if rule.tokens_last else read.shape[1:]))
            out[at] = read
        for pool_of_input, given in zip(kept_inputs, inputs, strict=bool(kept_inputs)):
            pool_of_input.index_copy_(0, lines.slots, given[lines.kept])
        return (out.transpose(1, 2) if rule.tokens_last else out), state

    return replacement


def _over_windows(windows: torch.Tensor):
    """The convolution of tokens whose last k inputs, columns `windows` int64 [n, T, k], are not beside each other."""
    count, length, _ = windows.shape

    def replacement(convolution: Callable, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        places = torch.arange(count, device=x.device)[:, None, None]
        windowed = x.transpose(1, 2)[places, windows]  # [n, T, k, channels]
        out = convolution(windowed.flatten(0, 1).transpose(1, 2).contiguous(), *args, **kwargs)[..., -1]
        return out.view(count, length, -1).transpose(1, 2)

    return replacement


# ---- the same by our kernels, for all tokens of the lines at once ----

_SILU = ("silu", "swish")


def _rule_over_lines(
    rule: Rule, one_token: Callable, lines: LinesOnDevice, base: torch.Tensor, pool: StatePool, layer: int
):
    """The rule over lines in one launch, as `_token_by_token`; `base` [n, ..]: the states before what each line replays."""
    kept_inputs, (replays, walk, _) = pool.inputs.get(layer, ()), lines.walk
    num_replays = replays.shape[1]

    def replacement(chunk: Callable, *args: Any, **kwargs: Any):
        inputs, _ = rule.bind(one_token, *args, **kwargs)
        walked = inputs
        if num_replays:
            before = (kept_input[replays] for kept_input in kept_inputs)
            walked = tuple(torch.cat(both, dim=1) for both in zip(before, inputs, strict=True))
        assert rule.over_lines is not None
        out = rule.over_lines(*args, **kwargs)(walked, base, walk, pool.recurrent[layer])
        for pool_of_input, read in zip(kept_inputs, inputs, strict=bool(kept_inputs)):
            pool_of_input.index_copy_(0, lines.slots, read[lines.kept])
        return out[:, num_replays:], base

    return replacement


def _convolution_over_lines(lines: LinesOnDevice, pool: torch.Tensor):
    """The convolution of lines, instead of the module's; writes kept inputs to a pool [slots, C, k]. ValueError: unknown activation."""

    def replacement(
        convolution: Callable,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if activation is not None and activation not in _SILU:
            raise ValueError(f"A convolution followed by {activation!r} is not known to the kernels.")
        from ...kernels.recurrent import triton as kernels

        windows = lines.windows_of(weight.shape[-1])
        return kernels.convolution(x, windows, weight, bias, activation is not None, lines.walk[2], pool)

    return replacement
