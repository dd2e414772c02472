"""Choose tile sizes and splits of the attention kernel from shapes that the host knows."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..dispatch import next_power_of_two

# Measured on an H100 with 8 key heads of 128 elements, in bfloat16.
SPLIT_KEYS = 64  # the least keys of a split: one tile (512 keys take 6.4 us in 8 splits, 7.6 in 4, 12.0 in one)
UNSPLIT_KEYS = 128  # a tile takes about 1 us, a merge about 2
TILE_SPLITS = 8  # up to 8 splits may have one tile each; with more splits, each gets two (1024 keys: 8.15 us in 8 splits, 8.20 in 16)
MOST_SPLITS = 64
# With more than DEEP_SPLITS splits, IN_FLIGHT bytes of keys and values in flight per multiprocessor are enough: 32k keys in 33
# splits take 65 us, and 67 us with 1.5 times as many bytes.
DEEP_SPLITS = 16
IN_FLIGHT = 128 * 1024


@dataclass(frozen=True)
class AttentionLaunch:
    """Tile sizes of one launch.

    Attributes:
        block_m: queries of a tile, counting each head of a group; a power of two, at least 16.
        block_n: keys of a tile; a power of two, at least 16.
        num_warps, num_stages: options of Triton.
        num_splits: programs that share the keys of a row; 1: no merge launch.
        keys_per_split: the least keys of a split, a multiple of block_n.
        fixed_splits: splits start at multiples of `keys_per_split`, independent of the row's length and the batch.
        peel: process tiles of keys that all queries see in a loop without masks.
        early_merge: launch the merge while attention runs (programmatic dependent launch).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_splits: int = 1
    keys_per_split: int = 256
    fixed_splits: bool = False
    peel: bool = True
    early_merge: bool = False


@dataclass(frozen=True)
class AttentionShape:
    """The shapes that the choice depends on.

    `max_query_length` and `max_key_length` are bucket sizes; widths are in elements; `masks_load`: every tile of keys must load
    which keys its queries see; `shared`: values are the first columns of the keys, loaded with them.
    """

    num_rows: int
    num_tokens: int
    max_query_length: int
    max_key_length: int
    num_kv_heads: int
    group: int
    key_width: int
    value_width: int
    itemsize: int
    masks_load: bool = False
    shared: bool = False


@dataclass(frozen=True)
class DeviceLimits:
    """Number of multiprocessors, bytes of shared memory per block, and whether launches may overlap (Hopper and later)."""

    num_sms: int
    shared_memory: int
    dependent_launch: bool = False


H200 = DeviceLimits(132, 227 * 1024, True)


def head_widths(width: int) -> tuple[int, int]:
    """A key width as one or two powers of two of at least 16 (80 → 64, 16; 576 → 512, 64; 128 → 128, 0)."""
    if width <= 16:
        return 16, 0
    first = 1 << (width.bit_length() - 1)
    return first, max(next_power_of_two(width - first), 16) if width > first else 0


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a CUDA device; the interpreter on a CPU counts as one multiprocessor."""
    if device.type != "cuda":
        return DeviceLimits(1, 100 * 1024)
    properties = torch.cuda.get_device_properties(device)
    overlap = torch.version.hip is None and properties.major >= 9
    return DeviceLimits(properties.multi_processor_count, properties.shared_memory_per_block_optin, overlap)


def num_tiles(shape: AttentionShape, block_m: int) -> tuple[int, int]:
    """Tiles of queries per key head, and per row (0: each row has as many as it needs, and programs search for theirs)."""
    uniform = -(-shape.max_query_length * shape.group // block_m)
    ragged = shape.num_tokens * shape.group // block_m + shape.num_rows
    if shape.num_rows * uniform <= ragged:
        return shape.num_rows * uniform, uniform
    return ragged, 0


def choose_splits(programs: int, max_key_length: int, at_once: int) -> int:
    """Splits per row: enough for `programs` to fill a device that runs `at_once`, but no more than have enough work."""
    if max_key_length <= UNSPLIT_KEYS:
        return 1
    tiles = -(-max_key_length // SPLIT_KEYS)
    worth = min(tiles, max(tiles // 2, TILE_SPLITS), MOST_SPLITS)
    return max(min(worth, at_once // programs), 1)


def merge_tile(value_width: int, launch: AttentionLaunch) -> tuple[int, int]:
    """Value columns and splits that one merge program reads at once: all splits, unless their number must not change any bit."""
    block_v = min(max(next_power_of_two(value_width), 16), 128)
    return block_v, 8 if launch.fixed_splits else min(max(next_power_of_two(launch.num_splits), 8), MOST_SPLITS)


@functools.lru_cache(maxsize=1024)
def choose_launch(shape: AttentionShape, limits: DeviceLimits, invariant: bool = False) -> AttentionLaunch:
    """Choose tile sizes and splits.

    Args:
        invariant: depend only on widths and dtype, so that a query's result is the same bits in every batch, however many
            tokens are verified at once.
    """
    width = max(shape.key_width, shape.value_width)
    queries = max(shape.max_query_length * shape.group, 1)
    if shape.itemsize == 4:  # exact float32 products run on CUDA cores, whose operands are in registers
        block_m = block_n = 16
        num_warps = 4 if width <= 256 else 8
    else:
        # Wider tiles of latent attention would spill: the sums alone take 128 registers per thread.
        largest_m = 32 if width > 256 else 128 if width <= 128 and queries >= 512 and not invariant else 64
        block_m = largest_m if invariant else min(max(next_power_of_two(queries), 16), largest_m)
        block_n = 64 if width <= 128 else 32
        num_warps = 8 if block_m == 128 or width > 256 else 4
    programs_at_once = 1 if num_warps == 8 else 2
    key_bytes = (shape.key_width + (0 if shape.shared else shape.value_width)) * shape.itemsize
    room = limits.shared_memory // programs_at_once - block_m * shape.key_width * shape.itemsize
    while block_n > 16 and limits.shared_memory - block_m * shape.key_width * shape.itemsize < 2 * block_n * key_bytes:
        block_n //= 2
    # From 64 queries on, Hopper multiplies asynchronously, which holds one more tile of keys.
    in_flight = min(max(room // (block_n * key_bytes) - (1 if block_m >= 64 else 0), 1), 3)
    if invariant:
        keys_per_split = 1024
        num_splits = max(-(-shape.max_key_length // keys_per_split), 1)
        return AttentionLaunch(
            block_m, block_n, num_warps, 1 + in_flight, num_splits, keys_per_split, fixed_splits=True
        )
    tiles, _ = num_tiles(shape, block_m)
    at_once = programs_at_once * limits.num_sms
    num_splits = choose_splits(tiles * shape.num_kv_heads, shape.max_key_length, at_once)
    if num_splits > DEEP_SPLITS:
        in_flight = min(in_flight, -(-IN_FLIGHT // (programs_at_once * block_n * key_bytes)))
    # For few queries, masks cost less than a separate loop, which would start with an empty pipeline.
    peel = shape.masks_load or block_m > 32 or shape.itemsize == 4
    early = limits.dependent_launch
    return AttentionLaunch(
        block_m, block_n, num_warps, 1 + in_flight, num_splits, SPLIT_KEYS, peel=peel, early_merge=early
    )
