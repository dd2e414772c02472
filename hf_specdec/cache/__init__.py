"""KV memory: the owners of blocks (`block_pool`) and the tensors (`paged_cache`)."""

from .block_pool import BlockPool, OutOfBlocks
from .paged_cache import BlockTable, PagedStaticCache

__all__ = ["BlockPool", "BlockTable", "OutOfBlocks", "PagedStaticCache"]
