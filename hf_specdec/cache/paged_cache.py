"""PagedStaticCache: a transformers `Cache` whose memory is one pool of blocks per layer, allocated once."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..kernels import reference as ops
from ..kernels.dispatch import uses_triton
from ..kernels.layer_reference import rotate
from ..kernels.transfer import upload
from .block_pool import BlockPool

logger = logging.getLogger(__name__)


@dataclass
class BlockTable:
    """One sequence's blocks in order, the slots they hold, and how many of its tokens have valid KV."""

    blocks: list[int] = field(default_factory=list)
    slots: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    length: int = 0
    contiguous: bool = True
    hashes: list[bytes] = field(default_factory=list)  # content of the leading full blocks
    device_slots: torch.Tensor | None = None  # `slots` as a tensor, built when a gather needs it


class PagedLayer(CacheLayerMixin):
    """One layer's pools: keys [slots, heads, width] and values [slots, heads, value width], allocated at the first write."""

    is_sliding = False

    def __init__(self, owner: PagedStaticCache):
        super().__init__()
        self.owner = owner

    @torch.compiler.disable  # once; there is nothing to gain from tracing it
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the pools for states [1, heads, T, width]; keys and values may differ in heads and width (MLA)."""
        slots = self.owner.num_slots
        # Zeros, not empty: masked slots are multiplied by zero weights, and 0 * NaN would be NaN.
        self.keys = key_states.new_zeros(slots, key_states.shape[1], key_states.shape[3])
        self.values = value_states.new_zeros(slots, value_states.shape[1], value_states.shape[3])
        self.is_initialized = True
        self.owner.note_allocated(self)

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the packed states [1, heads, T, width] to the current batch's slots.

        Returns the new states themselves (attention reads the pages), or, for models that attend to what the cache
        returns, the keys and values of all rows, one row after the other: [1, heads, S_total, width].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch = self.owner.batch
        there = batch.on(key_states.device)
        self.write(there.write_slots, key_states[0].transpose(0, 1), value_states[0].transpose(0, 1), there.uses_triton)
        if not batch.gather:
            return key_states, value_states
        read = there.read_slots
        keys, values = self.keys.index_select(0, read), self.values.index_select(0, read)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def rotate_and_update(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """`update` with keys [1, Hk, T, D] that are rotated first by angles [1, T, D]; the queries [1, H, T, D], rotated too."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if uses_triton(keys.device):
            from ..kernels.cache_ops import write_keys_values

            rotated = write_keys_values(
                *(states[0].transpose(0, 1) for states in (keys, values)), self.keys, self.values,
                self.owner.batch.on(keys.device).write_slots, query=query[0].transpose(0, 1),
                cos=cos[0].contiguous(), sin=sin[0].contiguous(),
            )  # fmt: skip
            assert rotated is not None
            return rotated.transpose(0, 1)[None]
        self.update(rotate(keys, cos[0], sin[0]), values)
        return rotate(query, cos[0], sin[0])

    def write(
        self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, by_triton: bool | None = None
    ) -> None:
        """Write keys [T, heads, width] and values to `slots` [T]; `by_triton`: whether kernels do it, where that is known."""
        if uses_triton(keys.device) if by_triton is None else by_triton:
            from ..kernels.cache_ops import write_keys_values

            write_keys_values(keys, values, self.keys, self.values, slots)
        else:
            ops.write_slots(self.keys, slots, keys)
            ops.write_slots(self.values, slots, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """What transformers' mask helpers ask for; our masks are already made."""
        return (self.owner.batch.num_keys if self.owner.batch is not None else query_length), 0

    def get_seq_length(self) -> int:
        """Positions are passed explicitly; any non-zero value says the cache is in use."""
        return self.owner.batch.num_keys if self.owner.batch is not None else 0

    def get_max_length(self) -> int:
        """Slots in the pool."""
        return self.owner.num_slots

    get_max_cache_shape = get_max_length  # its name before transformers 5.20


class PagedStaticCache(Cache):
    """KV of many sequences in `num_blocks` blocks of `block_size` slots, shared by prefix, written once, never moved
    except to close the gaps a draft tree leaves.

    A sequence is known by its id. Its tokens' KV are at logical indices 0, 1, ..; drafts are written behind `length` into
    lookahead slots, and `commit` decides which of them stay.
    """

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, share_prefixes: bool = True):
        super().__init__(layers=[PagedLayer(self) for _ in range(num_layers)])
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.share_prefixes = share_prefixes
        self.tables: dict[int, BlockTable] = {}
        self.batch: Any = None  # the PackedBatch whose forward is running
        self._pool_tables: dict[torch.device, Any] = {}  # of the Triton kernel that moves slots
        self._identity: tuple[int, ...] | None = None  # until pools are added
        self.num_bytes = 0

    @property
    def num_slots(self) -> int:
        """Slots in the pool."""
        return self.pool.num_blocks * self.block_size

    @property
    def is_allocated(self) -> bool:
        """Whether every layer has its pools."""
        return all(layer.is_initialized for layer in self.layers)

    def can_serve(self, num_blocks: int, block_size: int, exactly: bool = False) -> bool:
        """Whether the pools are there and have (`exactly`) so many blocks of that size."""
        fits = self.pool.num_blocks == num_blocks if exactly else self.pool.num_blocks >= num_blocks
        return self.is_allocated and self.block_size == block_size and fits

    @property
    def identity(self) -> tuple[int, ...]:
        """Where the pools are: what has been captured reads these and no others."""
        if self._identity is None:
            self._identity = tuple(layer.keys.data_ptr() if layer.is_initialized else 0 for layer in self.layers)
        return self._identity

    def note_allocated(self, layer: PagedLayer) -> None:
        """Keep count of the memory, and say how much it is once every layer has its pools."""
        self._pool_tables.clear()
        self._identity = None
        self.num_bytes += layer.keys.nbytes + layer.values.nbytes
        if self.is_allocated:
            logger.info(
                "KV cache: %d blocks of %d tokens, %.1f MiB on %s (%s).",
                self.pool.num_blocks, self.block_size, self.num_bytes / 2**20, layer.keys.device, layer.keys.dtype,
            )  # fmt: skip

    # ---- sequences --------------------------------------------------------------------------------------------------

    def add(self, seq_id: int) -> None:
        """Give a new sequence an empty block table."""
        if seq_id in self.tables:
            raise ValueError(f"Sequence {seq_id} is already in the cache.")
        self.tables[seq_id] = BlockTable()

    def remove(self, seq_id: int) -> None:
        """Release a sequence's blocks. Unknown ids are an error: something was lost."""
        self.pool.release(self.tables.pop(seq_id).blocks)

    def clear(self) -> None:
        """Release every sequence and forget all prefixes (after an error the contents cannot be trusted)."""
        for seq_id in list(self.tables):
            self.remove(seq_id)
        self.pool.forget()
        self.batch = None

    def match_prefix(self, seq_id: int, tokens: list[int]) -> int:
        """Let an empty sequence share the blocks that already hold a prefix of `tokens`.

        At least the last token is left to compute, since its logits are needed. Returns the number of tokens covered.
        """
        table = self.tables[seq_id]
        if not self.share_prefixes or table.blocks:
            return 0
        shared = []
        for content in self._block_hashes(tokens, (len(tokens) - 1) // self.block_size, []):
            block = self.pool.lookup(content)
            if block is None:
                break
            shared.append(block)
            table.hashes.append(content)
        self.pool.retain(shared)
        self._append(table, shared)
        table.length = len(shared) * self.block_size
        return table.length

    def register_prefix(self, seq_id: int, tokens: list[int], length: int) -> None:
        """Declare that the KV of `tokens[:length]` are (or are being) written, so that full blocks can be shared."""
        if not self.share_prefixes:
            return
        table = self.tables[seq_id]
        known = len(table.hashes)
        if length // self.block_size <= known:
            return
        table.hashes += self._block_hashes(tokens, length // self.block_size, table.hashes)
        for block, content in zip(table.blocks[known:], table.hashes[known:], strict=False):
            self.pool.register(block, content)

    def _block_hashes(self, tokens: list[int], count: int, known: list[bytes]) -> list[bytes]:
        hashes = []
        parent = known[-1] if known else b""
        for i in range(len(known), count):
            chunk = np.asarray(tokens[i * self.block_size : (i + 1) * self.block_size], dtype=np.int64).tobytes()
            parent = hashlib.blake2b(parent + chunk, digest_size=16).digest()
            hashes.append(parent)
        return hashes

    # ---- slots ------------------------------------------------------------------------------------------------------

    def blocks_missing(self, seq_id: int, num_slots: int) -> int:
        """How many more blocks the sequence needs to have `num_slots` slots."""
        return max(0, -(-num_slots // self.block_size) - len(self.tables[seq_id].blocks))

    def reserve(self, seq_id: int, num_slots: int) -> None:
        """Give the sequence at least `num_slots` slots, next to those it has if possible.

        Raises:
            OutOfBlocks: there are not enough; nothing was taken.
        """
        table = self.tables[seq_id]
        missing = self.blocks_missing(seq_id, num_slots)
        if missing:
            self._append(table, self.pool.allocate(missing, after=table.blocks[-1] if table.blocks else None))

    def _append(self, table: BlockTable, blocks: list[int]) -> None:
        if not blocks:
            return
        joined = table.blocks + blocks
        table.contiguous = joined == list(range(joined[0], joined[0] + len(joined)))
        table.blocks = joined
        starts = np.asarray(blocks, dtype=np.int64)[:, None] * self.block_size
        table.slots = np.concatenate([table.slots, (starts + np.arange(self.block_size)).ravel()])
        table.device_slots = None

    def row(self, seq_id: int, start: int, end: int, length: int, device: torch.device) -> ops.AttentionRow:
        """The sequence's first `length` slots as attention reads them, for the packed queries `start:end`."""
        table = self.tables[seq_id]
        if table.contiguous:
            return ops.AttentionRow(start, end, length, int(table.slots[0]), None)
        if table.device_slots is None:
            table.device_slots = torch.from_numpy(table.slots).to(device)
        return ops.AttentionRow(start, end, length, -1, table.device_slots[:length])

    # ---- after verification -----------------------------------------------------------------------------------------

    def commit(self, kept: list[tuple[int, int, list[int]]]) -> None:
        """Keep some of the drafts' KV and drop the rest.

        Args:
            kept: per sequence (id, start, offsets): of the tokens written at logical indices `start`, `start + 1`, ..
                those at `start + offset` (ascending) stay and become `start`, `start + 1`, .. The length becomes start + len(offsets).
        """
        moves: list[tuple[np.ndarray, np.ndarray]] = []
        for seq_id, start, offsets in kept:
            table = self.tables[seq_id]
            if offsets and offsets[-1] >= len(offsets):  # ascending: some were left out
                own, index = np.asarray(offsets, dtype=np.int64), np.arange(len(offsets))
                moved = own != index
                moves.append((table.slots[start + own[moved]], table.slots[start + index[moved]]))
            table.length = start + len(offsets)
        if moves:
            self._move(moves)

    def _move(self, moves: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Copy slots to slots in every layer; per sequence (sources, targets), both ascending."""
        written = [layer for layer in self.layers if layer.is_initialized]
        for device in {layer.keys.device for layer in written}:
            layers = [layer for layer in written if layer.keys.device == device]
            if uses_triton(device):
                from ..kernels.cache_ops import PoolTable, move_slots

                if device not in self._pool_tables:
                    pools = [pool for layer in layers for pool in (layer.keys, layer.values)]
                    self._pool_tables[device] = PoolTable.of(pools)
                padded = np.full((2, len(moves), max(len(each[0]) for each in moves)), -1, dtype=np.int64)
                for row, pair in enumerate(moves):
                    padded[:, row, : len(pair[0])] = pair
                on_device = upload(padded, device)
                move_slots(self._pool_tables[device], on_device[0], on_device[1])
                continue
            flat = np.stack([np.concatenate([each[i] for each in moves]) for i in range(2)])
            on_device = upload(flat, device)
            for layer in layers:
                ops.move_slots(layer.keys, on_device[0], on_device[1])
                ops.move_slots(layer.values, on_device[0], on_device[1])

    def truncate(self, seq_id: int, length: int) -> None:
        """Roll back to the first `length` tokens (bookkeeping only).

        Raises:
            ValueError: that would reopen blocks whose content was declared and may be shared.
        """
        table = self.tables[seq_id]
        if length < len(table.hashes) * self.block_size:
            raise ValueError(f"Sequence {seq_id} cannot be rolled back to {length} tokens: later blocks may be shared.")
        table.length = min(table.length, length)

    # ---- to and from transformers' own caches -----------------------------------------------------------------------

    def read(self, seq_id: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A sequence's valid keys and values in one layer: [length, heads, width] each (copies)."""
        table = self.tables[seq_id]
        pools = self.layers[layer]
        slots = torch.from_numpy(table.slots[: table.length]).to(pools.keys.device)
        return pools.keys.index_select(0, slots), pools.values.index_select(0, slots)

    def load(self, seq_id: int, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values [n, heads, width] of a sequence's first n tokens; its slots must be reserved."""
        pools = self.layers[layer]
        if not pools.is_initialized:
            pools.lazy_initialization(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
        slots = torch.from_numpy(self.tables[seq_id].slots[: keys.shape[0]]).to(pools.keys.device)
        pools.write(slots, keys, values)
