"""Host memory: the slab, the pool and its pages, and the key index beside it."""

from herald.kvstore.host_memory import HostSlab
from herald.kvstore.key_index import KeyIndex
from herald.kvstore.layout import RowLayout, choose_page_size
from herald.kvstore.pages import PageAllocator
from herald.kvstore.pool import HostPool
from herald.kvstore.prefix_cache import CachedPage, PrefixCache

__all__ = [
    "CachedPage",
    "HostPool",
    "HostSlab",
    "KeyIndex",
    "PageAllocator",
    "PrefixCache",
    "RowLayout",
    "choose_page_size",
]
