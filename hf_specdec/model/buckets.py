"""Buckets: the sizes that graphs are captured for. A bucket serves every batch that fits into it."""

from __future__ import annotations

from ..kernels.attention_inputs import InputSizes

LEAST_BLOCKS = 16  # minimum number of columns of the block tables


def bucket_of(needed: InputSizes) -> InputSizes:
    """The smallest bucket that a batch of these sizes fits into."""
    num_rows = rows_bucket(needed.num_rows)
    tokens_per_row = power_of_two(-(-needed.num_tokens // num_rows))
    return InputSizes(
        num_rows=num_rows,
        num_tokens=num_rows * tokens_per_row,
        max_query_length=power_of_two(needed.max_query_length),
        max_blocks=blocks_bucket(needed.max_blocks),
        num_words=power_of_two(needed.num_words) if needed.num_words else 0,
    )


def rows_bucket(num_rows: int) -> int:
    """Number of rows, rounded up to a power of two or, above 8, to a multiple of 8: few buckets, at most half padding."""
    return power_of_two(num_rows) if num_rows <= 8 else -(-num_rows // 8) * 8


def blocks_bucket(num_blocks: int) -> int:
    """Number of columns of the block tables, rounded up to a power of two."""
    return max(power_of_two(num_blocks), LEAST_BLOCKS)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()
