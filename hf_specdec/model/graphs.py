"""Forwards as CUDA graphs: a step's rows are padded to a bucket, whose buffers never move, and what was captured runs again.

A transformers model launches hundreds of kernels a step; launched one by one they cost the host more than a small batch
costs the GPU. A graph is one launch. Ragged drafts keep it: rows and tokens that fill up a bucket belong to nobody, write
no keys, and their outputs are not read.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from ..cache import PagedStaticCache
from ..core.errors import UnsupportedModel
from ..core.rows import RowInput
from ..kernels.attention import (
    AttentionInputs,
    InputSizes,
    RowDescription,
    attention_for,
    fill_inputs,
    sizes_of,
)
from ..kernels.cache import writer_for
from ..kernels.dispatch import VARIABLE, can_capture_steps, current
from ..kernels.transfer import HostStaging
from .buckets import bucket_of
from .options.invariant_ops import InvariantOps
from .packed_batch import copy_ids, describe, describe_lines, write_ids

if TYPE_CHECKING:
    from .packed_head import PackedHead
    from .packed_model import PackedModel

logger = logging.getLogger(__name__)

MOST_TOKENS = 1024  # packed tokens of a step; beyond that launches are hidden behind the work
MOST_TOKENS_OF_A_ROW = 64  # longer rows are prompts
MOST_BYTES = 2**31  # that the graphs of one model may hold in outputs: float32 logits of every token of a bucket


class Capture(Protocol):
    """How functions are captured."""

    def __call__(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What it returned, and a function that runs it again into the same outputs."""
        ...

    def forget(self) -> None:
        """Nothing that was captured is used any more."""
        ...


# ---- buffers --------------------------------------------------------------------------------------------------------


@dataclass
class StaticBatch:
    """What a captured forward reads, in buffers that stay where they are; stands in for a PackedBatch.

    Attributes:
        input_ids, position_ids: int64 [1, T].
        slots: int64 [T], where keys and values go; -1: nowhere.
        inputs: what attention reads of its B rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    slots: torch.Tensor
    inputs: AttentionInputs
    cache: PagedStaticCache
    attention_calls: int = 0
    invariant: InvariantOps | None = None

    gather = False
    captured = True
    read_slots = None

    @property
    def write_slots(self) -> torch.Tensor:
        """`slots`, as layers ask for them."""
        return self.slots

    @property
    def write(self) -> Callable[..., Any]:
        """Writes keys and values to slots."""
        return writer_for(self.slots.device)

    @property
    def attend(self) -> Callable[..., torch.Tensor]:
        """Attention over the buffers."""
        return attention_for(self.slots.device, self.invariant is not None)

    @property
    def num_keys(self) -> int:
        """Most keys of a row."""
        return self.inputs.max_key_length

    def on(self, device: torch.device) -> StaticBatch:
        """Its own slots: graphs are for models on one device."""
        return self

    def attention_inputs(self, device: torch.device) -> AttentionInputs:
        """Views of the buffers."""
        return self.inputs


class StepBuffers:
    """The buffers of one bucket of steps.

    Attributes:
        batch: views of them.
        block_size: of the block tables: the cache's, or 1 where rows name their keys one by one.
        features: [T, F] what a draft head reads with the tokens; None for whole models.
    """

    def __init__(
        self,
        sizes: InputSizes,
        cache: PagedStaticCache,
        device: torch.device,
        block_size: int,
        features: torch.Tensor | None = None,
    ):
        self.sizes, self.cache, self.device, self.block_size = sizes, cache, device, block_size
        # Ids, positions and slots int64 [3, T], then what attention reads, int32, at a multiple of 16 bytes.
        self._attention_start = -(-24 * sizes.num_tokens // 16) * 16
        size = self._attention_start + 4 * sizes.starts["end"]
        memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._staging = HostStaging(memory)
        integers = memory[: 24 * sizes.num_tokens].view(torch.long).view(3, -1)
        inputs = sizes.inputs(memory[self._attention_start :].view(torch.int32), block_size)
        self.batch = StaticBatch(integers[0:1], integers[1:2], integers[2], inputs, cache)
        self.features = None if features is None else features.new_zeros(sizes.num_tokens, features.shape[1])

    def fill(
        self,
        rows: list[RowInput],
        counts: list[int],
        described: list[RowDescription],
        features: torch.Tensor | None = None,
    ) -> None:
        """Put a step's rows into the buffers, in one copy (and one each for ids that are on the device, and features).

        Args:
            counts: tokens of each row.
            described: what attends to what: the rows, or parts of them one after the other.
        """
        memory = self._staging.fresh()
        ids, positions, slots = memory[: 24 * self.sizes.num_tokens].view(np.int64).reshape(3, -1)
        parts = self.sizes.views(memory[self._attention_start :].view(np.int32))
        fill_inputs(parts, described, self.block_size, self.sizes)
        pieces, first = write_ids(rows, ids), 0
        for row, count in zip(rows, counts, strict=True):
            slots[first : first + count] = self.cache.tables[row.seq_id].slots[row.start : row.start + count]
            first += count
        positions[:first] = parts["positions"][:first]
        slots[first:] = -1
        self._staging.send()
        copy_ids(pieces, self.batch.input_ids[0])
        if self.features is not None and features is not None:
            self.features[:first].copy_(features)


# ---- graphs ---------------------------------------------------------------------------------------------------------


class Captures:
    """Functions captured by bucket; all are forgotten when the pools or weights they read are no longer those in use, and the one
    that was used longest ago when their outputs are more than MOST_BYTES.

    Args:
        name: whose, for the log.
        capture: how; tests run the same again in Python.
    """

    def __init__(self, name: str, capture: Capture | None = None):
        self.name, self.capture = name, capture or CudaGraphCapture()
        self.refused = False  # something in it cannot be captured: found once, not tried again
        self._found: dict[Hashable, tuple[Any, Any, Callable[[], None]]] = {}
        self._made_for: tuple = ()

    def __len__(self) -> int:
        return len(self._found)

    def clear(self) -> None:
        """Forget all, and with them the pools they read."""
        self._found.clear()
        self.capture.forget()

    def get(
        self, key: Hashable, made_for: tuple, make: Callable[[], tuple[Any, Callable[[], Any]]]
    ) -> tuple[Any, Any, Callable[[], None]] | None:
        """(buffers, outputs, replay) of a bucket; None if it cannot be captured.

        Args:
            made_for: where the pools and weights are.
            make: the bucket's buffers, filled, and what to run on them, if the bucket is seen for the first time.
        """
        if self.refused:
            return None
        if made_for != self._made_for:
            self.clear()
            self._made_for = made_for
        if key not in self._found:
            buffers, function = make()
            try:
                self._found[key] = buffers, *self.capture(function)
            except RuntimeError as error:
                self.refused = True
                self.clear()
                logger.warning("%s runs without CUDA graphs: %s", self.name, error)
                return None
            self._make_room()
        self._found[key] = self._found.pop(key)  # the newest last
        return self._found[key]

    def _make_room(self) -> None:
        sizes = {key: num_bytes(outputs) for key, (_, outputs, _) in self._found.items()}
        while sum(sizes.values()) > MOST_BYTES and len(sizes) > 1:
            if torch.cuda.is_available():  # it may be running
                torch.cuda.synchronize()
            oldest = next(iter(sizes))
            del self._found[oldest], sizes[oldest]


class GraphRunner:
    """Graphs of one model's or head's forwards, captured when a bucket is first needed.

    What a graph returns stays valid until the same model's next forward.

    Args:
        model: on one device, attending through the Triton kernels.
        function: what is captured, of batches and, where `run` is given them, features; the model's `forward_batch`.
        by_lines: attend as deterministic models do (see `describe_lines`).
        capture, name: see `Captures`; "{}" stands for the model's class.
    """

    def __init__(
        self,
        model: PackedModel | PackedHead,
        function: Callable[..., Any] | None = None,
        by_lines: bool = False,
        capture: Capture | None = None,
        name: str = "{}",
    ):
        self.model, self.function, self.by_lines = model, function or model.forward_batch, by_lines
        self.captures = Captures(name.format(type(model.module).__name__), capture)

    def run(self, views: list[list[RowInput]], cache: PagedStaticCache, features: torch.Tensor | None = None) -> Any:
        """A forward, as the model's; None where it is none for a graph (a prompt, a model that cannot be captured).

        Args:
            views: the rows of each batch that the function takes: the same tokens, which may see other keys in each.
        """
        rows = views[0]
        counts = [row.num_tokens for row in rows]
        count = sum(counts)
        if self.captures.refused or not count or max(counts) > MOST_TOKENS_OF_A_ROW:
            return None
        if not cache.is_allocated:  # pools come with the first write, which is no step to be repeated
            return None
        describes, block_size = (describe_lines, 1) if self.by_lines else (describe, cache.block_size)
        described = [describes(view, cache) for view in views]
        sizes = tuple(bucket_of(sizes_of(each)) for each in described)
        if sizes[0].num_tokens > MOST_TOKENS:
            return None

        def make() -> tuple[list[StepBuffers], Callable[[], Any]]:
            buffers = [
                StepBuffers(size, cache, self.model.device, block_size, None if i else features)
                for i, size in enumerate(sizes)
            ]
            fill(buffers)
            arguments = [each.batch for each in buffers]
            given = {} if features is None else {"features": buffers[0].features}
            return buffers, functools.partial(self.function, *arguments, **given)

        def fill(buffers: list[StepBuffers]) -> None:
            for i, (each, view) in enumerate(zip(buffers, views, strict=True)):
                each.fill(view, counts, described[i], None if i else features)

        with current(self.model.device):
            found = self.captures.get(sizes, (cache.identity, places_of([self.model.module])), make)
            if found is None:
                return None
            buffers, output, replay = found
            fill(buffers)
            replay()
        return output[:count] if torch.is_tensor(output) else output.first(count, _wanted(rows, counts))


def num_bytes(outputs: Any) -> int:
    """Of the tensors in what a function returned: tensors, sequences and dictionaries of such, or an object with such fields."""
    if torch.is_tensor(outputs):
        return outputs.nbytes
    if isinstance(outputs, (list, tuple)):
        return sum(map(num_bytes, outputs))
    fields = outputs if isinstance(outputs, dict) else getattr(outputs, "__dict__", {})
    return sum(map(num_bytes, fields.values()))


def places_of(modules: list[nn.Module]) -> tuple[int, ...]:
    """Where modules' weights are, by the first of each: what was captured reads these and no others."""

    def place(module: nn.Module) -> int:
        weight = _first_tensor(module, "_parameters")
        weight = _first_tensor(module, "_buffers") if weight is None else weight
        return 0 if weight is None else weight.data_ptr()

    return tuple(map(place, modules))


def _first_tensor(module: nn.Module, kind: str) -> torch.Tensor | None:
    """Found by hand, as `parameters()` takes longer to set out than this takes to arrive, and it is asked in every step."""
    for tensor in getattr(module, kind).values():
        if type(tensor) in (nn.Parameter, torch.Tensor):  # quantized ones have no place of their own
            return tensor
    found = (_first_tensor(child, kind) for child in module._modules.values() if child is not None)
    return next((tensor for tensor in found if tensor is not None), None)


def uses_graphs(wanted: bool | None, model: PackedModel | PackedHead) -> bool:
    """Whether forwards of a model or head are to be CUDA graphs: as wanted; None: where they can be, but for mixtures of experts
    that wait for the device to choose: a capture that fails is not free.

    Raises:
        UnsupportedModel: they are wanted and cannot be.
    """
    if wanted:
        check_capturable(model)
    if wanted is not None:
        return wanted
    return is_capturable(model) and not experts_wait(model.module, model.device)


def experts_wait(module: nn.Module, device: torch.device) -> bool:
    """Whether a module has experts that the host must hear of before it can launch them.

    transformers' "batched_mm" never asks, its loop ("eager") does. "grouped_mm" is one launch where torch has a kernel for it: bfloat16
    on compute capability 9 and 10 (`_grouped_mm_cuda` in ATen/native/cuda/GroupedBlas.cpp); elsewhere torch copies the
    groups' ends to the host. Of other experts nothing is known.
    """

    def waits(experts: nn.Module) -> bool:
        how = getattr(getattr(experts, "config", None), "_experts_implementation", None)
        in_bfloat16 = all(parameter.dtype == torch.bfloat16 for parameter in experts.parameters())
        if how == "grouped_mm" and in_bfloat16:
            return torch.cuda.get_device_capability(device)[0] not in (9, 10)
        return how != "batched_mm"

    return any(waits(each) for name, each in module.named_modules() if name.rpartition(".")[2] == "experts")


def is_capturable(model: PackedModel | PackedHead) -> bool:
    """Whether forwards of a model or head can be CUDA graphs."""
    if model.gather or not can_capture_steps(model.device):
        return False
    return len({parameter.device for parameter in model.module.parameters()}) == 1


def check_capturable(model: PackedModel | PackedHead) -> None:
    """Raise UnsupportedModel, with what to do, unless forwards of a model or head can be CUDA graphs."""
    if not is_capturable(model):
        spread = {parameter.device for parameter in model.module.parameters()}
        raise UnsupportedModel(
            f"'cuda_graphs' needs a model on transformers' attention interface, on one CUDA device that Triton's kernels serve (compute "
            f"capability 8.0 and above, Triton installed, {VARIABLE} not 'reference'); "
            f"this {type(model.module).__name__} is on {', '.join(sorted(map(str, spread)))}. Leave the key out."
        )


def _wanted(rows: list[RowInput], counts: list[int]) -> np.ndarray | None:
    """Which of the tokens need logits; None: all."""
    if all(row.logits == count for row, count in zip(rows, counts, strict=True)):
        return None
    ends = np.cumsum(counts)
    return np.concatenate([np.arange(end - row.logits, end) for row, end in zip(rows, ends, strict=True)])


class CudaGraphCapture:
    """Captures functions as CUDA graphs that share memory: one's outputs are read before another runs."""

    def __init__(self) -> None:
        self._pool: Any = None

    def forget(self) -> None:
        """The next captures get memory of their own: a pool ends with the last graph in it."""
        self._pool = None

    def __call__(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Run `function` twice on a stream of its own, so that kernels are compiled and memory is there, then capture it."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        before = torch.cuda.current_stream()
        stream = torch.cuda.Stream()
        stream.wait_stream(before)
        try:
            with torch.cuda.stream(stream):
                for _ in range(2):
                    function()
            before.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = function()
        finally:
            torch.cuda.set_stream(before)  # a capture that fails leaves its own behind
        return output, graph.replay
