"""PagedStaticCache: a transformers `Cache` with one pool of blocks per layer, which grows on demand."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from ..kernels.attention.inputs import AttentionRow, Window
from ..kernels.cache import SlotMover
from . import memory
from .block_pool import BlockPool
from .paged_layer import INDEX, PagedLayer, RunningBatch
from .segments import SegmentSize
from .state_pool import PrefixStates, StatePool

logger = logging.getLogger(__name__)

# The most unused memory of a pool, as a share of the model's weights and the pool: see `PagedStaticCache`.
EXTENT = 0.04
LEAST_EXTENT = 2**24  # bytes
MOST_AT_ONCE = 2**18  # blocks: address space is free, but the records of a pool are not


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


@dataclass(eq=False)
class BlockTable:
    """The blocks of one sequence in order, their slots, and the number of tokens with valid KV.

    `place`: blocks (first, end) that others avoid while they can, so that the sequence's own blocks form one run.
    `root`: the hash before the first token, which texts of one adapter have in common.
    `is_hidden`: the keys are those of images whose tiles the text does not see (see `model.image_layers`).
    """

    place: tuple[int, int] | None = None
    root: bytes = b""
    is_hidden: bool = False
    blocks: list[int] = field(default_factory=list)
    slots: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    slots_at: int = 0  # address of `slots`
    length: int = 0
    contiguous: bool = True
    hashes: list[bytes] = field(default_factory=list)  # content of the leading full blocks
    device_slots: torch.Tensor | None = None  # `slots` as a tensor, built when first needed
    branch: int = 0  # end of the prefix that it has in common with another text, if no state was kept there


class PagedStaticCache(Cache):
    """KV of many sequences in blocks of `block_size` slots, shared by prefix and written once. Slots move only to close the gaps that
    rejected nodes of a draft tree leave.

    A sequence is known by its id. The KV of its tokens are at logical indices 0, 1, ..; drafts are written after `length` into
    lookahead slots, and `commit` decides which of them stay.

    Memory is taken as it is used. On a CPU, the pools are address space (see `memory`): all blocks exist at once, take memory when
    they are written, and never move. Each sequence can get a place, so that its blocks form one run. On other devices, the pools
    start with what the first texts need and grow by extents, up to `num_blocks`, layer by layer: the peak is the new pool plus one
    layer of the old one. An extent is 4 % of the weights and the pool together, at least 16 MiB: the most that is ever unused.

    Args:
        num_layers: layers with keys and values.
        num_blocks: the most blocks.
        weights: the weights of the model that this cache serves; empty: allocate all blocks at the start.
        ahead: keys and values of a token also depend on this many tokens after it: 1 for heads that read each token with the
            feature before it. Blocks are shared only if these tokens are equal, too.
        keyless: layers that have no keys and values.
        window: tokens see at most so many of the last tokens, themselves included, and the first ones, whatever the model's layers say;
            None: as they say.
        states: the pool of recurrent and convolutional states; None: no layer has a state. With states, a prefix is shared only if
            `prefix_states` has the states after it, because blocks hold no states.
        has_other_keys: equal texts may have other keys, because rows also attend to something else, in `cross`, or count padding.
        is_latent: layers cache compressed keys (see `PagedLayer.pools`).
        segments: by index, how layers compress segments of the text.
        is_quantized: keys and values are in int8 (see `PagedLayer.quantized`).
    """

    layers: list[PagedLayer]  # pyright: ignore[reportIncompatibleVariableOverride] (made below, and never others)
    cross: PagedStaticCache | None  # see `keep_source`

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        share_prefixes: bool = True,
        weights: Iterable[torch.Tensor] = (),
        ahead: int = 0,
        keyless: frozenset[int] = frozenset(),
        states: StatePool | None = None,
        window: int | Window | None = None,
        has_other_keys: bool = False,
        is_latent: bool = False,
        segments: Mapping[int, SegmentSize] = MappingProxyType({}),
        is_quantized: bool = False,
    ):
        super().__init__(layers=[PagedLayer(self) for _ in range(num_layers)])
        for index, size in segments.items():
            self.layers[index].segment = size
        weights = list(weights)
        self.block_size, self.most_blocks = block_size, num_blocks
        self.is_lazy = memory.takes_memory_when_written(weights)
        self._bytes_beside = sum(weight.nbytes for weight in weights)
        at_once = num_blocks if not weights else min(num_blocks, MOST_AT_ONCE) if self.is_lazy else min(num_blocks, 1)
        self.pool = BlockPool(at_once)
        self.states, self.window = states, window
        self.prefix_states: PrefixStates | None = None
        self._with_keys = [layer for index, layer in enumerate(self.layers) if index not in keyless]
        self.has_other_keys, self.cross, self.is_latent = has_other_keys, None, is_latent
        self.is_quantized = is_quantized
        self.share_prefixes, self.ahead = share_prefixes, ahead
        self.tables: dict[int, BlockTable] = {}
        self.batch: RunningBatch | None = None  # see `running`
        self.windows: dict[int, int | None] = {}  # sliding windows by layer, as attention finds them
        self._next_place = 0
        self.of_pools: dict[Any, Any] = {}  # what follows from the pools' addresses, until pools are added or grow
        self.bytes_per_token = 0  # of keys and values in all layers that have pools

    @property
    def num_slots(self) -> int:
        """Number of slots in the pool."""
        return self.pool.num_blocks * self.block_size

    @property
    def share_prefixes(self) -> bool:
        """True if equal prefixes share blocks."""
        known = self.states is None or self.prefix_states is not None
        return self._share_prefixes and known and not self.has_other_keys

    @share_prefixes.setter
    def share_prefixes(self, wanted: bool) -> None:
        """Ask for sharing, or forbid it."""
        self._share_prefixes = wanted

    @property
    def is_allocated(self) -> bool:
        """True if every layer with keys has its pools."""
        return all(layer.is_initialized for layer in self._with_keys)

    @property
    def num_bytes(self) -> int:
        """Memory of the pools and of the states. On a CPU, only as many blocks count as were in use at the peak."""
        blocks = self.pool.most_used if self.is_lazy else self.pool.num_blocks
        beside = sum(part.num_bytes for part in (self.states, self.prefix_states, self.cross) if part is not None)
        return blocks * self.block_size * self.bytes_per_token + beside

    def can_serve(self, block_size: int) -> bool:
        """True if the pools exist and have blocks of this size."""
        return self.is_allocated and self.block_size == block_size

    @property
    def identity(self) -> tuple[int, ...]:
        """Addresses and size of the pools. Captured graphs read exactly these pools."""
        if "identity" not in self.of_pools:
            places = (layer.keys.data_ptr() if layer.is_initialized else 0 for layer in self.layers)
            self.of_pools["identity"] = (self.num_slots, *places)
        return self.of_pools["identity"]

    def note_allocated(self, pools: list[torch.Tensor]) -> None:
        """Count the memory of a layer's new pools, and log the total once every layer has its own."""
        self.of_pools.clear()
        self.bytes_per_token += sum(pool.nbytes for pool in pools) // self.num_slots
        if self.is_allocated:
            logger.info(
                "KV cache: up to %d blocks of %d tokens, %.1f KiB each, on %s (%s); %d of them allocated.",
                self.most_blocks, self.block_size, self.bytes_per_token * self.block_size / 2**10, pools[0].device,
                pools[0].dtype, self.pool.num_blocks,
            )  # fmt: skip

    def grow_up_to(self, num_blocks: int) -> None:
        """Allow growth up to `num_blocks` for another call. Existing blocks stay."""
        self.most_blocks = max(num_blocks, self.pool.num_blocks)

    def grow_to_the_end(self) -> None:
        """Allocate all blocks now. From then on no pool moves, so others may keep its address."""
        if self.pool.num_blocks < self.most_blocks:
            self._grow(self.most_blocks)

    def slots_each(self, num_slots: int, num_sequences: int) -> int:
        """Slots for each of `num_sequences` sequences: `num_slots`, or an equal share of the pool if that is less."""
        return min(num_slots, self.pool.num_blocks // max(num_sequences, 1) * self.block_size)

    # ---- growth -----------------------------------------------------------------------------------------------------

    def slots_at_first(self, bytes_per_slot: int) -> int:
        """Number of slots to allocate for a layer without pools; `bytes_per_slot`: in this layer."""
        if not self.is_lazy and not any(layer.is_initialized for layer in self.layers):
            self.pool.grow(self._size_with(self._extent(bytes_per_slot * len(self._with_keys))))
        return self.num_slots

    def _extent(self, bytes_per_slot: int) -> int:
        """Number of blocks of an extent; 0 while the size of a slot is unknown."""
        if not bytes_per_slot:
            return 0
        per_block = bytes_per_slot * self.block_size
        return int(max(EXTENT * (self._bytes_beside + self.pool.num_blocks * per_block), LEAST_EXTENT) / per_block)

    def _size_with(self, more: int) -> int:
        return min(self.pool.num_blocks + more, self.most_blocks)

    def _grow(self, num_blocks: int) -> None:
        runs = [(first * self.block_size, end * self.block_size) for first, end in self.pool.taken_runs()]
        before, layers = self.num_slots, [layer for layer in self.layers if layer.is_initialized]
        self.of_pools.clear()
        try:
            for layer in layers:
                layer.grow(num_blocks * self.block_size, runs)
        except BaseException:
            for layer in layers:
                layer.shrink(before)
            raise
        self.pool.grow(num_blocks)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """What makes the indices of the batch's tokens positions, for models that compute distances to gathered keys: int64 [T]."""
        batch: Any = self.batch
        return batch.offsets[0] if batch is not None and batch.gather else self.get_seq_length()

    # ---- sequences --------------------------------------------------------------------------------------------------

    def add(self, seq_id: int, num_slots: int = 0, adapter: str | None = None) -> None:
        """Give a new sequence an empty block table.

        Args:
            num_slots: the most slots it may need; pass it only if all sequences are added before the first one has blocks. On a CPU,
                each then gets a place for them, because rows in one run are read without a copy. A place takes no memory.
            adapter: what computes its keys and values; only sequences of the same adapter share prefixes.
        """
        if seq_id in self.tables:
            raise ValueError(f"Sequence {seq_id} is already in the cache.")
        self._next_place = self._next_place if self.tables else 0
        end = self._next_place - (-num_slots // self.block_size)
        place = None
        if self.is_lazy and num_slots and end <= self.pool.num_blocks:
            place, self._next_place = (self._next_place, end), end
        self.tables[seq_id] = BlockTable(place, b"" if adapter is None else _digest(adapter.encode()))

    def evict(self, seq_id: int, keep_states: bool = False) -> None:
        """Release the blocks of a sequence that will be read again later, its states and the keys of its source. `keep_states`: these two
        cannot be computed again."""
        table = self.tables[seq_id]
        self.pool.release(table.blocks)
        self.tables[seq_id] = BlockTable(table.place, table.root)
        if not keep_states:
            self._drop_beside(seq_id)

    def remove(self, seq_id: int) -> None:
        """Release a sequence's blocks. An unknown id raises KeyError."""
        self.pool.release(self.tables.pop(seq_id).blocks)
        self._drop_beside(seq_id)

    def holds_source(self, seq_id: int) -> bool:
        """True if `cross` has the keys of a sequence's source or images."""
        return self.cross is not None and seq_id in self.cross.tables

    def keep_source(self, seq_id: int, num_keys: int, layers: Callable[[], list], num_blocks: int, weights) -> None:
        """Write the keys and values of a sequence's source or images to `cross`, which the first one makes, of at most `num_blocks`, beside
        `weights`. `layers`: makes what `load_all` takes. Raises OutOfBlocks: they do not fit; nothing was done."""
        if self.cross is None:
            self.cross = PagedStaticCache(len(self.layers), num_blocks, self.block_size, False, weights)
        self.cross.add(seq_id)
        try:
            self.cross.reserve(seq_id, num_keys)
            self.cross.load_all(seq_id, layers()[: len(self.layers)])
        except BaseException:
            self.cross.remove(seq_id)
            raise

    def _drop_beside(self, seq_id: int) -> None:
        if self.states is not None:
            self.states.drop(seq_id)
        if self.cross is not None and seq_id in self.cross.tables:
            self.cross.remove(seq_id)

    def clear(self) -> None:
        """Release every sequence and forget all prefixes, because contents cannot be trusted after an error."""
        for seq_id in list(self.tables):
            self.remove(seq_id)
        self.cross = None
        self.forget_prefixes()

    @contextlib.contextmanager
    def running(self, batch: RunningBatch) -> Iterator[None]:
        """Inside the context, the layers serve a forward over this batch: they write new keys and values to its slots."""
        self.batch = batch
        try:
            yield
        finally:
            self.batch = None

    def forget_prefixes(self) -> None:
        """Drop all prefix hashes and the states of prefixes, because the contents of blocks can no longer be trusted."""
        self.pool.forget()
        if self.prefix_states is not None:
            self.prefix_states.forget()

    def known_prefix(self, seq_id: int, tokens: list[int]) -> int:
        """How many of `tokens` the sequence could share. The last token is never among them, because its logits are needed."""
        return len(self.known_blocks(seq_id, tokens)) * self.block_size

    def match_prefix(self, seq_id: int, tokens: list[int], most: int | None = None) -> int:
        """Let an empty sequence share the blocks that already hold a prefix of `tokens`, of at most `most` tokens, and continue from
        the states after the prefix. Returns the number of covered tokens; see `known_prefix`."""
        table = self.tables[seq_id]
        if table.blocks:
            return 0
        known = self.known_blocks(seq_id, tokens)[: None if most is None else most // self.block_size]
        in_common = len(known) * self.block_size
        if self.prefix_states is not None:
            known = known[: self.prefix_states.longest([content for content, _ in known])]
        shared = [block for _, block in known]
        table.hashes += [content for content, _ in known]
        self.pool.retain(shared)
        self._append(table, shared)
        table.length = len(shared) * self.block_size
        if self.prefix_states is not None and self.states is not None:
            if known:
                self.states.load(seq_id, self.prefix_states.get(known[-1][0]), table.length)
            table.branch = in_common // self.prefix_states.every * self.prefix_states.every
        return table.length

    def end_of_part(self, seq_id: int, end: int) -> int:
        """Where to stop reading a prompt that could be read up to `end`: where another text branched off, if that is
        before `end`, so that `keep_states` can keep the states there."""
        table = self.tables[seq_id]
        return table.branch if table.length < table.branch < end else end

    def keep_states(self, seq_id: int, length: int) -> None:
        """Keep the states after a sequence's first `length` tokens, all read in chunk form, for texts that begin alike."""
        prefixes, hashes = self.prefix_states, self.tables[seq_id].hashes
        if prefixes is None or self.states is None or not self.share_prefixes or length % prefixes.every:
            return
        count = length // self.block_size
        if 0 < count <= len(hashes) and hashes[count - 1] not in prefixes:
            states = self.states.copy(seq_id, length)
            if states is not None:
                prefixes.put(hashes[count - 1], states)

    def known_blocks(self, seq_id: int, tokens: list[int]) -> list[tuple[bytes, int]]:
        """(hash, block) of each leading block whose contents are in the pool."""
        known = []
        if self.share_prefixes:
            count = (len(tokens) - max(self.ahead, 1)) // self.block_size
            for content in self._block_hashes(tokens, count, [], self.tables[seq_id].root):
                block = self.pool.lookup(content)
                if block is None:
                    break
                known.append((content, block))
        return known

    def register_prefix(self, seq_id: int, tokens: list[int], length: int) -> None:
        """Declare that the KV of `tokens[:length]` are written or being written, so that full blocks can be shared. `tokens` must have
        at least `length + ahead` entries."""
        table = self.tables[seq_id]
        known = len(table.hashes)
        if not self.share_prefixes or length // self.block_size <= known:
            return
        table.hashes += self._block_hashes(tokens, length // self.block_size, table.hashes, table.root)
        for block, content in zip(table.blocks[known:], table.hashes[known:], strict=False):
            self.pool.register(block, content)

    def _block_hashes(self, tokens: list[int], count: int, known: list[bytes], root: bytes = b"") -> list[bytes]:
        hashes, parent = [], known[-1] if known else root
        for i in range(len(known), count):
            read = tokens[i * self.block_size : (i + 1) * self.block_size + self.ahead]
            parent = _digest(parent + np.asarray(read, dtype=np.int64).tobytes())
            hashes.append(parent)
        return hashes

    # ---- slots ------------------------------------------------------------------------------------------------------

    def blocks_missing(self, seq_id: int, num_slots: int) -> int:
        """How many more blocks the sequence needs to have `num_slots` slots."""
        return max(0, -(-num_slots // self.block_size) - len(self.tables[seq_id].blocks))

    def reserve(self, seq_id: int, num_slots: int) -> None:
        """Give the sequence at least `num_slots` slots, next to its present ones if possible.

        Raises:
            OutOfBlocks: there are not enough blocks. Nothing was taken.
        """
        table = self.tables[seq_id]
        if num_slots <= len(table.slots):
            return
        missing = self.blocks_missing(seq_id, num_slots)
        more = missing - self.pool.num_available
        if more > 0 and self.pool.num_blocks + more <= self.most_blocks:
            extent = self.pool.num_blocks if self.is_lazy else self._extent(self.bytes_per_token)
            self._grow(self._size_with(max(more, extent)))
        last = table.blocks[-1] if table.blocks else None
        if table.place is not None and (last is None or not table.place[0] <= last < table.place[1]):
            last = table.place[0] - 1  # its present blocks are shared with others
        self._append(table, self.pool.allocate(missing, after=last))

    def _append(self, table: BlockTable, blocks: list[int]) -> None:
        if not blocks:
            return
        first, end, size = blocks[0], blocks[0] + len(blocks), self.block_size
        is_run = blocks == list(range(first, end))
        table.contiguous = table.contiguous and is_run and (not table.blocks or table.blocks[-1] + 1 == first)
        table.blocks += blocks
        runs = [(first, end)] if is_run else [(block, block + 1) for block in blocks]
        slots = [np.arange(first * size, end * size, dtype=np.int64) for first, end in runs]
        table.slots = np.concatenate([table.slots, *slots])
        table.slots_at = table.slots.__array_interface__["data"][0]  # `.ctypes` takes several times as long
        table.device_slots = None

    def row(self, seq_id: int, start: int, end: int, length: int, device: torch.device) -> AttentionRow:
        """The sequence's first `length` slots as the attention definition reads them, for the packed queries `start:end`."""
        table = self.tables[seq_id]
        if table.contiguous:
            return AttentionRow(start, end, length, int(table.slots[0]), None)
        if table.device_slots is None:
            table.device_slots = torch.from_numpy(table.slots).to(device)
        return AttentionRow(start, end, length, -1, table.device_slots[:length])

    # ---- after verification -----------------------------------------------------------------------------------------

    def commit(self, kept: list[tuple[int, int, list[int]]]) -> None:
        """Keep some of the drafts' KV and drop the rest.

        Args:
            kept: (id, start, offsets) per sequence. Of the tokens written from logical index `start` on, those at `start + offset`
                (ascending) stay and become `start`, `start + 1`, .. The length becomes start + len(offsets).
        """
        moves: list[tuple[np.ndarray, np.ndarray]] = []  # one pair (sources, targets) per sequence, both ascending
        for seq_id, start, offsets in kept:
            table = self.tables[seq_id]
            if offsets and offsets[-1] >= len(offsets):  # offsets ascend, so some were left out
                starts, index = np.asarray(offsets, dtype=np.int64), np.arange(len(offsets))
                moved = starts != index
                moves.append((table.slots[start + starts[moved]], table.slots[start + index[moved]]))
            table.length = start + len(offsets)
            if self.states is not None:
                self.states.commit(seq_id, start, offsets)
        written = [layer for layer in self.layers if layer.is_initialized] if moves else []
        for device in {layer.keys.device for layer in written}:
            if device not in self.of_pools:
                layers = [layer for layer in written if layer.keys.device == device]
                self.of_pools[device] = SlotMover([pool for layer in layers for pool in layer.pools])
            self.of_pools[device].move(moves)

    def truncate(self, seq_id: int, length: int) -> None:
        """Roll back to the first `length` tokens, or to the text's beginning if no recurrent state was kept after that many tokens.
        This changes only records.

        Raises:
            ValueError: this would reopen blocks whose content was declared and may be shared.
        """
        table = self.tables[seq_id]
        if length < len(table.hashes) * self.block_size:
            raise ValueError(f"Sequence {seq_id} cannot be rolled back to {length} tokens: later blocks may be shared.")
        length = min(table.length, length)
        table.length = length if self.states is None or self.states.holds(seq_id, length) else 0

    # ---- to and from transformers' own caches -----------------------------------------------------------------------

    def read(self, seq_id: int) -> list[tuple[torch.Tensor, ...] | None]:
        """Copies of a sequence's valid `states`, as `load_all` takes them: per layer [length, heads, width] each; None for a layer that has
        stored none."""
        table, copies = self.tables[seq_id], []
        slots = torch.from_numpy(table.slots[: table.length])
        for pools in self.layers:
            if pools.is_initialized:
                slots = slots.to(pools.keys.device)
                copies.append(tuple(states.index_select(0, slots) for states in pools.states))
            else:
                copies.append(None)
        return copies

    def load_all(self, seq_id: int, layers: list[tuple[torch.Tensor, ...] | None]) -> None:
        """`load` every layer's states [n, heads, width]; None: the layer uses another layer's keys. The length becomes n."""
        for index, states in enumerate(layers):
            if states is not None:
                self.load(seq_id, index, *states)
                self.tables[seq_id].length = states[0].shape[0]

    def load(self, seq_id: int, layer: int, keys: torch.Tensor, values: torch.Tensor, *more: torch.Tensor) -> None:
        """Write the states [n, heads, width] of a sequence's first n tokens. Its slots must be reserved."""
        pools = self.layers[layer]
        if not pools.is_initialized:
            pools.lazy_initialization(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
        slots = torch.from_numpy(self.tables[seq_id].slots[: keys.shape[0]]).to(pools.keys.device)
        if keys.dtype == torch.int8:
            for pool, states in zip(pools.states, (keys, values, *more), strict=True):
                pool.index_copy_(0, slots, states.to(pool.device))
            return
        pools.write(slots, keys.to(pools.keys.device), values.to(pools.values.device))
        for index_keys in more:  # of an indexer, if the layer has one
            pools.write_further(INDEX, slots, index_keys.to(pools.keys.device))
