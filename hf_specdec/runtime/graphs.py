"""Forwards as CUDA graphs: a step's rows are padded to a bucket, whose buffers never move, and what was captured runs again.

A transformers model launches hundreds of kernels a step; launched one by one they cost the host more than a small batch
costs the GPU. A graph is one launch. Ragged drafts keep it: rows and tokens that fill up a bucket belong to nobody, write
no keys, and their outputs are not read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..cache import PagedStaticCache
from ..kernels.attention_inputs import AttentionInputs, InputSizes, RowDescription, flat_inputs, sizes_of
from .packed_batch import RowInput, describe

if TYPE_CHECKING:
    from .packed_model import PackedModel, PackedOutput

logger = logging.getLogger(__name__)

MOST_TOKENS = 1024  # packed tokens of a step; beyond that launches are hidden behind the work
MOST_TOKENS_OF_A_ROW = 64  # longer rows are prompts
LEAST_BLOCKS = 16  # columns of the block tables

# (what to run) -> (its outputs, a function that runs it again into the same outputs)
Capture = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


def bucket_of(needed: InputSizes) -> InputSizes:
    """The bucket that serves rows of these sizes: rows and tokens per row at powers of two (rows beyond 8 at multiples
    of 8), so that at most half of a bucket is padding and there are few of them."""
    rows = _power_of_two(needed.num_rows) if needed.num_rows <= 8 else -(-needed.num_rows // 8) * 8
    per_row = _power_of_two(-(-needed.num_tokens // rows))
    return InputSizes(
        num_rows=rows,
        num_tokens=rows * per_row,
        max_query_length=_power_of_two(needed.max_query_length),
        max_blocks=max(_power_of_two(needed.max_blocks), LEAST_BLOCKS),
        num_words=_power_of_two(needed.num_words) if needed.num_words else 0,
    )


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class StaticBatch:
    """The buffers of one bucket; stands in for a PackedBatch while a forward is captured.

    Attributes:
        input_ids, position_ids: int64 [1, T].
        slots: int64 [T], where keys and values go; -1: nowhere.
    """

    gather = False

    def __init__(self, sizes: InputSizes, cache: PagedStaticCache, device: torch.device):
        self.sizes, self.cache, self.device = sizes, cache, device
        count = sizes.num_tokens
        self._integers = torch.zeros(3, count, dtype=torch.long, device=device)
        self._flat = torch.zeros(sizes.starts["end"], dtype=torch.int32, device=device)
        self.input_ids, self.position_ids, self.slots = self._integers[0:1], self._integers[1:2], self._integers[2]
        self.slots.fill_(-1)
        self._inputs = sizes.inputs(self._flat, cache.block_size)
        self.num_keys = sizes.max_blocks * cache.block_size
        self.attention_calls = 0
        self.write_slots, self.read_slots = self.slots, None

    def fill(self, rows: list[RowInput], described: list[RowDescription]) -> None:
        """Put a step's rows into the buffers, in two copies (and one for ids that are on the device already)."""
        host = np.zeros(self._integers.shape, dtype=np.int64)
        host[2] = -1
        on_device, first = [], 0
        for row, each in zip(rows, described, strict=True):
            count = len(row.tokens)
            where = slice(first, first + count)
            if isinstance(row.tokens, torch.Tensor) and row.tokens.device.type != "cpu":
                on_device.append((where, row.tokens))
            else:
                host[0, where] = row.tokens
            end = row.start + count
            host[1, where] = np.arange(row.start, end) if each.positions is None else each.positions
            host[2, where] = self.cache.tables[row.seq_id].slots[row.start : end]
            first += count
        self._integers.copy_(torch.from_numpy(host))
        if on_device:
            places = np.concatenate([np.arange(where.start, where.stop) for where, _ in on_device])
            index = torch.from_numpy(places).to(self.device)
            self.input_ids[0].index_copy_(0, index, torch.cat([tokens for _, tokens in on_device]))
        self._flat.copy_(flat_inputs(described, self.cache.block_size, self.sizes))

    def on(self, device: torch.device) -> StaticBatch:
        """Its own slots: graphs are for models on one device."""
        return self

    def attention_inputs(self, device: torch.device) -> AttentionInputs:
        """Views of the buffers."""
        return self._inputs


class GraphRunner:
    """Graphs of one model's forwards, captured when a bucket is first needed.

    What a graph returns stays valid until the same model's next forward.

    Args:
        model: on one device, attending through the Triton kernels.
        capture: how; tests run the same again in Python.
    """

    def __init__(self, model: PackedModel, capture: Capture | None = None):
        self.model, self.capture = model, capture or CudaGraphCapture()
        self._graphs: dict[InputSizes, tuple[StaticBatch, PackedOutput, Callable[[], None]]] = {}
        self._made_for: tuple = ()
        self._refused = False

    def run(self, rows: list[RowInput], cache: PagedStaticCache) -> PackedOutput | None:
        """A forward, as `PackedModel.forward`; None where it is none for a graph (a prompt, a model that cannot be captured)."""
        count = sum(len(row.tokens) for row in rows)
        if self._refused or not count or max(len(row.tokens) for row in rows) > MOST_TOKENS_OF_A_ROW:
            return None
        described = describe(rows, cache)
        sizes = bucket_of(sizes_of(described))
        if sizes.num_tokens > MOST_TOKENS:
            return None
        made_for = (cache.identity, *(p.data_ptr() for p in (next(self.model.model.parameters()),)))
        if made_for != self._made_for:  # other pools or weights than those captured
            self._graphs.clear()
            self._made_for = made_for
        if sizes not in self._graphs:
            if not cache.is_allocated:  # pools come with the first write, which is no step to be repeated
                return None
            batch = StaticBatch(sizes, cache, self.model.device)
            batch.fill(rows, described)
            try:
                output, replay = self.capture(lambda: self.model.forward_batch(batch))
            except RuntimeError as error:
                self._refused = True
                logger.warning("%s runs without CUDA graphs: %s", type(self.model.model).__name__, error)
                return None
            self._graphs[sizes] = batch, output, replay
        batch, output, replay = self._graphs[sizes]
        batch.fill(rows, described)
        replay()
        return output.first(count, _wanted(rows, count))


def _wanted(rows: list[RowInput], count: int) -> np.ndarray | None:
    """Which of the tokens need logits; None: all."""
    if sum(row.logits for row in rows) == count:
        return None
    ends = np.cumsum([len(row.tokens) for row in rows])
    return np.concatenate([np.arange(end - row.logits, end) for row, end in zip(rows, ends, strict=True)])


class CudaGraphCapture:
    """Captures forwards as CUDA graphs that share memory: one's outputs are read before another runs."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, forward: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """Run `forward` twice on a stream of its own, so that kernels are compiled and memory is there, then capture it."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                forward()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = forward()
        return output, graph.replay
