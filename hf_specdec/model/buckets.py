"""Buckets: the sizes that graphs are captured for, which serve every batch that fits."""

from __future__ import annotations

from ..kernels.attention import InputSizes

LEAST_BLOCKS = 16  # columns of the block tables


def bucket_of(needed: InputSizes) -> InputSizes:
    """The bucket that serves rows of these sizes."""
    rows = rows_bucket(needed.num_rows)
    per_row = power_of_two(-(-needed.num_tokens // rows))
    return InputSizes(
        num_rows=rows,
        num_tokens=rows * per_row,
        max_query_length=power_of_two(needed.max_query_length),
        max_blocks=blocks_bucket(needed.max_blocks),
        num_words=power_of_two(needed.num_words) if needed.num_words else 0,
    )


def rows_bucket(num_rows: int) -> int:
    """Powers of two, beyond 8 multiples of 8: at most half of a bucket is padding, and there are few of them."""
    return power_of_two(num_rows) if num_rows <= 8 else -(-num_rows // 8) * 8


def blocks_bucket(num_blocks: int) -> int:
    """Columns of the block tables: powers of two."""
    return max(power_of_two(num_blocks), LEAST_BLOCKS)


def power_of_two(n: int) -> int:
    """The least one that is not below `n`."""
    return 1 << max(n - 1, 0).bit_length()
