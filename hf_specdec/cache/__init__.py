"""KV memory: who owns which block (`block_pool`) and the tensors themselves (`paged_cache`)."""

from .block_pool import BlockPool, OutOfBlocks
from .paged_cache import BlockTable, PagedStaticCache

__all__ = ["BlockPool", "BlockTable", "OutOfBlocks", "PagedStaticCache"]
