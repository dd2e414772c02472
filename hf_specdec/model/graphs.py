"""Forwards as CUDA graphs: a step's rows are padded to a bucket with fixed buffers, and the bucket's captured graph is replayed.

A transformers model launches hundreds of kernels per step. Launched one by one, they cost the host more time than a small
batch costs the GPU; a graph is one launch. Ragged drafts work too: padding rows and tokens write no keys, and their outputs
are not read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..cache import PagedStaticCache
from ..core.rows import RowInput
from ..kernels.attention import attention_for
from ..kernels.attention.inputs import AttentionInputs, InputSizes, RowDescription, fill_inputs, sizes_of
from ..kernels.cache import write_keys_values
from ..kernels.dispatch import current, next_power_of_two
from ..kernels.transfer import HostStaging
from .captures import Capturable, Captures
from .options.invariant_ops import InvariantOps
from .packed_batch import copy_ids, write_ids
from .row_descriptions import describe, describe_lines

# Packed tokens of a step. A larger one keeps the GPU busy for longer than its launches take: on an H200 an 8B model's 1,024 tokens
# take 27 ms, and its launches one by one 20 to 45 ms.
MOST_TOKENS = 2048
MOST_TOKENS_OF_A_ROW = 64  # longer rows are prompts
LEAST_BLOCKS = 16  # minimum number of columns of the block tables


@dataclass
class CapturedBatch:
    """The batch of a captured forward: a PackedBatch in buffers with fixed addresses.

    Attributes:
        input_ids, position_ids: int64 [1, T].
        write_slots: int64 [T], where keys and values are written; -1: nowhere.
        inputs: the attention kernel's view of the B rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    write_slots: torch.Tensor
    inputs: AttentionInputs
    cache: PagedStaticCache
    attention_calls: int = 0
    invariant: InvariantOps | None = None

    gather = False
    captured = True
    read_slots = states = None

    @property
    def write(self) -> Callable[..., Any]:
        """Writes keys and values to their slots."""
        return write_keys_values.on(self.write_slots.device)

    @property
    def attend(self) -> Callable[..., torch.Tensor]:
        """The implementation of attention."""
        return attention_for(self.write_slots.device, self.invariant is not None)

    @property
    def num_keys(self) -> int:
        """The most keys of a row."""
        return self.inputs.max_key_length

    def on(self, device: torch.device) -> CapturedBatch:
        """Itself: graphs are only for models on one device."""
        return self

    def attention_inputs(self, device: torch.device) -> AttentionInputs:
        """The rows as the Triton kernels read them."""
        return self.inputs


class StepBuffers:
    """The buffers of one bucket of steps.

    Args:
        block_size: block size of the block tables: the cache's, or 1 where rows list the slots of their keys.
        features: a tensor like the features to come, which sets their width, dtype and device.

    Attributes:
        batch: views of the buffers.
        features: [T, F] features that a draft head reads with the tokens; None for whole models.
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
        # First int64 [3, T]: ids, positions, slots. Then, at a multiple of 16 bytes, the int32 attention inputs.
        self._attention_start = -(-24 * sizes.num_tokens // 16) * 16
        size = self._attention_start + 4 * sizes.starts["end"]
        memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._staging = HostStaging(memory)
        integers = memory[: 24 * sizes.num_tokens].view(torch.long).view(3, -1)
        inputs = sizes.inputs(memory[self._attention_start :].view(torch.int32), block_size)
        self.batch = CapturedBatch(integers[0:1], integers[1:2], integers[2], inputs, cache)
        self.features = None if features is None else features.new_zeros(sizes.num_tokens, features.shape[1])

    def fill(
        self,
        rows: list[RowInput],
        counts: list[int],
        described: list[RowDescription],
        features: torch.Tensor | None = None,
    ) -> None:
        """Write a step's rows into the buffers with one copy to the device.

        Draft ids and features that are on the device already take one more copy each.

        Args:
            counts: number of tokens of each row.
            described: the rows as attention reads them; a row may be split into several consecutive ones.
        """
        memory = self._staging.fresh()
        ids, positions, slots = memory[: 24 * self.sizes.num_tokens].view(np.int64).reshape(3, -1)
        parts = self.sizes.views(memory[self._attention_start :].view(np.int32))
        fill_inputs(parts, described, self.block_size, self.sizes)
        pieces, first = write_ids(rows, ids), 0
        for row, count in zip(rows, counts, strict=True):
            slots[first : first + count] = self.cache.tables[row.seq_id].slots[row.start : row.start + count]
            first += count
        positions[:first] = parts["positions"][:first] + np.repeat([row.offset for row in rows], counts)
        slots[first:] = -1
        self._staging.send()
        copy_ids(pieces, self.batch.input_ids[0])
        if self.features is not None and features is not None:
            self.features[:first].copy_(features)


class GraphRunner:
    """Graphs of a model's or head's forwards, captured when a bucket is first needed.

    The output of a graph is valid until the model's next forward.

    Args:
        model: on one device, attending through the Triton kernels.
        function: the function to capture, which takes the batches and, if `run` is given features, `features=`; None: the
            model's `forward_batch`.
        by_lines: attend as deterministic models do (see `describe_lines`).
    """

    def __init__(
        self,
        model: Capturable,
        function: Callable[..., Any] | None = None,
        by_lines: bool = False,
        name: str = "{}",
    ):
        self.model, self.function, self.by_lines = model, function or model.forward_batch, by_lines
        self.captures = Captures(name.format(type(model.module).__name__), model.modules)

    def run(self, views: list[list[RowInput]], cache: PagedStaticCache, features: torch.Tensor | None = None) -> Any:
        """Run one forward through a captured graph; None if it must run eagerly (a prompt, or a model that cannot be captured).

        Args:
            views: the rows of each batch that the function takes. All have the same tokens, which may see different keys.
            features: [T, F] of a draft head's tokens.
        """
        rows = views[0]
        counts = [row.num_tokens for row in rows]
        count = sum(counts)
        if self.captures.refused or not count or max(counts) > MOST_TOKENS_OF_A_ROW:
            return None
        if not all(isinstance(row.offset, int) for row in rows):  # positions of several axes
            return None
        if not cache.is_allocated:  # the first write allocates the pools, so there is nothing to capture on yet
            return None
        describes, block_size = (describe_lines, 1) if self.by_lines else (describe, cache.block_size)
        described = [describes(view, cache) for view in views]
        sizes = tuple(bucket_of(sizes_of(batch)) for batch in described)
        if sizes[0].num_tokens > MOST_TOKENS:
            return None

        def make() -> tuple[list[StepBuffers], Callable[[], Any]]:
            buffers = [
                StepBuffers(size, cache, self.model.device, block_size, None if i else features)
                for i, size in enumerate(sizes)
            ]
            fill(buffers)
            arguments = [buffer.batch for buffer in buffers]
            given = {} if features is None else {"features": buffers[0].features}
            return buffers, functools.partial(self.function, *arguments, **given)

        def fill(buffers: list[StepBuffers]) -> None:
            for i, (buffer, view) in enumerate(zip(buffers, views, strict=True)):
                buffer.fill(view, counts, described[i], None if i else features)

        with current(self.model.device):
            capture = self.captures.get(sizes, cache.identity, make)
            if capture is None:
                return None
            buffers, output, replay = capture
            fill(buffers)
            replay()
        return output[:count] if torch.is_tensor(output) else output.first(count, _wanted(rows, counts))


def _wanted(rows: list[RowInput], counts: list[int]) -> np.ndarray | None:
    """Indices of the packed tokens that need logits; None: all."""
    if all(row.logits == count for row, count in zip(rows, counts, strict=True)):
        return None
    ends = np.cumsum(counts)
    return np.concatenate([np.arange(end - row.logits, end) for row, end in zip(rows, ends, strict=True)])


# ---- buckets: the sizes that graphs are captured for. A bucket serves every batch that fits into it ----


def bucket_of(needed: InputSizes) -> InputSizes:
    """The smallest bucket that a batch of these sizes fits into."""
    return InputSizes(
        num_rows=rows_bucket(needed.num_rows),
        num_tokens=_rounded_up(needed.num_tokens, 32, 4),
        max_query_length=next_power_of_two(needed.max_query_length),
        max_blocks=blocks_bucket(needed.max_blocks),
        num_words=next_power_of_two(needed.num_words) if needed.num_words else 0,
    )


def _rounded_up(number: int, small: int, steps: int) -> int:
    """The next power of two up to `small`, where padding costs nothing beside reading the weights; above, one of `steps` numbers per
    doubling, where each token costs its arithmetic."""
    if number <= small:
        return next_power_of_two(number)
    step = next_power_of_two(number) // (2 * steps)
    return -(-number // step) * step


def rows_bucket(num_rows: int) -> int:
    """Number of rows, rounded up to a power of two or, above 8, half-way between two. Rows without tokens cost little, and a batch
    whose rows end one by one captures few graphs."""
    return _rounded_up(num_rows, 8, 2)


def blocks_bucket(num_blocks: int) -> int:
    """Number of columns of the block tables, rounded up to a power of two."""
    return max(next_power_of_two(num_blocks), LEAST_BLOCKS)
