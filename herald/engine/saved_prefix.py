"""A document's pages between the pool and a folder: saved once, loaded by any engine of the same model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from herald.config import is_number
from herald.engine.reserve import grow_pool
from herald.errors import HostPoolTooSmall, InvalidOption, PrefixDamaged, PrefixMismatch
from herald.kvstore import CachedPage
from herald.kvstore.prefix_file import SavedPrefix, read_manifest, read_pages, write_prefix
from herald.kvstore.prefix_keys import FREE_PIECE, Made, exact_keys, root_key, token_keys
from herald.models.identity import model_identity

if TYPE_CHECKING:
    from herald.engine.engine import Engine


class LoadedPrefix:
    """A document in the pool, whose pages stay until `release`.

    Attributes:
        token_ids: of its pages, int64 [n]. Prompts that begin with them skip their prefill.
        text: of the prompt it was made of, None where that was token ids.
        chat: that text stood in the chat template.
    """

    def __init__(self, engine: Engine, last: CachedPage, saved: SavedPrefix) -> None:
        self._engine = engine
        self._last: CachedPage | None = last
        engine.memory.prefixes.pin(last)
        self.token_ids = saved.token_ids
        self.text: str | None = saved.about.get("text")
        self.chat = bool(saved.about.get("chat"))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def release(self) -> None:
        """Let its pages go when the pool needs them. Idempotent."""
        last, self._last = self._last, None
        if last is not None:
            self._engine.memory.prefixes.unpin(last)

    def __enter__(self) -> LoadedPrefix:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def require_sharing(engine: Engine) -> None:
    """Refuse an engine that shares no pages.

    Raises:
        InvalidOption: it does not.
    """
    if not engine.offload.enabled or not engine.offload.prefix_sharing:
        off = "enabled" if not engine.offload.enabled else "prefix_sharing"
        raise InvalidOption(f"{off}=False keeps no prefixes", f"use OffloadConfig({off}=True)")
    if not engine.prefixes.enabled:
        config = engine.model.config
        why = f"positions of {config.family} models see later ones, so no prefix of them is final"
        if config.windowed is not None:
            why = f"{config.family} models have layers with a window, whose rows are not in the host pool"
        raise InvalidOption(why, "use a block-causal model without such layers")


def check_document(engine: Engine, token_ids: Sequence[int]) -> None:
    """Refuse a document of which no page can be saved.

    Raises:
        InvalidOption: it is shorter than a page.
    """
    size = engine.memory.layout.page_size
    if len(token_ids) < size:
        raise InvalidOption(
            f"a document of {len(token_ids)} tokens fills no page",
            f"use {size} tokens or more, or a smaller page_size",
        )


def save_prefix(engine: Engine, token_ids: Sequence[int], folder: Path, about: dict[str, Any]) -> int:
    """Write the pages of a document that the engine has prefilled.

    Args:
        about: more for the manifest.

    Returns:
        Bytes written.

    Raises:
        HostPoolTooSmall: the pages are gone already. UsageError: the folder is taken.
    """
    prefixes, store = engine.prefixes, engine.memory.store
    if engine.retriever is not None:
        engine.retriever.drain()  # its last rows may still be on their way
    names = prefixes.names(list(token_ids), engine.model.config.block_length)
    nodes, exact = prefixes.cache.acquire_all(names.tokens, names.exact)
    if store is None or not nodes:
        raise HostPoolTooSmall("the document's pages had to give way", "save it while nothing else runs")
    pages = np.array([node.page for node in nodes], dtype=np.int32)
    try:
        plan, layout = prefixes.plan, engine.memory.layout
        facts = {
            **model_identity(engine.model),
            "block_length": engine.model.config.block_length,
            "page_size": layout.page_size,
            "index_bits": store.index.bits,
            "prefill": [plan.step, plan.tail],
            "num_tokens": len(pages) * layout.page_size,
            "kv_budget": min(node.made.kv_budget for node in nodes),
        }
        tokens = np.array(token_ids[: len(pages) * layout.page_size], dtype=np.int64)
        pieces = np.array([node.made.piece if exact else FREE_PIECE for node in nodes], dtype=np.int64)
        return write_prefix(folder, facts | about, tokens, pieces, store.index, pages)
    finally:
        store.pool.allocator.release(pages)


def load_prefix(engine: Engine, folder: Path) -> LoadedPrefix:
    """Read a saved document into the pool and keep it there.

    Raises:
        UsageError: there is none. PrefixMismatch: it belongs to another model, block length or page size.
        PrefixDamaged: a file is not what was written. HostPoolTooSmall: the pool has no room.
    """
    saved = read_manifest(folder)
    _check(engine, saved)
    prefixes = engine.prefixes
    block = engine.model.config.block_length
    root = root_key(block)
    names = token_keys(root, saved.token_ids.tolist(), prefixes.page_size)
    own = saved.about.get("prefill") == [prefixes.plan.step, prefixes.plan.tail]
    budget = saved.about.get("kv_budget", 1.0)
    made = [Made(piece if own else FREE_PIECE, budget) for piece in saved.pieces.tolist()]
    exact = exact_keys(root, names, made)
    last = prefixes.cache.find(exact[-1])
    if last is None:
        last = _read(engine, saved, names, exact, made)
    return LoadedPrefix(engine, last, saved)


def _read(
    engine: Engine, saved: SavedPrefix, names: list[bytes], exact: list[bytes], made: list[Made]
) -> CachedPage:
    """Read a prefix into free pages and share them; the last of them."""
    count, cache = len(made), engine.prefixes.cache
    engine.memory.require_pages(count, len(saved.token_ids))
    grow_pool(engine, count)
    store = engine.memory.store
    assert store is not None
    if not cache.make_room(count):
        size = engine.memory.layout.page_bytes
        raise HostPoolTooSmall(
            f"{saved.folder} needs {count} pages ({count * size:,} bytes), more than the pool can free now",
            "load it before requests run, release another, or use a larger host_memory_bytes",
        )
    pages = store.pool.allocator.allocate(count)
    try:
        read_pages(saved, store.index, pages)
        return cache.add(pages, names, exact, made)[-1]
    finally:
        store.pool.allocator.release(pages)


def _check(engine: Engine, saved: SavedPrefix) -> None:
    """Hold a saved prefix to this engine's model and pages."""
    own = model_identity(engine.model) | {
        "block_length": engine.model.config.block_length,
        "page_size": engine.memory.layout.page_size,
    }
    for field in ("family", "config", "dtype", "block_length", "page_size", "weights"):
        theirs = saved.about.get(field)
        if theirs != own[field]:
            differs = _difference(field, theirs, own[field])
            option = field in ("dtype", "block_length", "page_size")
            use = f"use {field}={theirs!r}" if option else "load the model that it was saved with"
            raise PrefixMismatch(f"{saved.folder} does not fit: {differs}", f"{use}, or save it again")
    budget = saved.about.get("kv_budget", 1.0)
    if not is_number(budget) or not 0 < budget <= 1:
        raise PrefixDamaged(f"{saved.folder} has kv_budget={budget!r}", "save it again")
    size = engine.memory.layout.page_size
    if not len(saved.pieces) or len(saved.token_ids) != len(saved.pieces) * size:
        counts = f"{len(saved.token_ids)} tokens in {len(saved.pieces)} pages"
        raise PrefixDamaged(f"{saved.folder} has {counts}", "save it again")


def _difference(field: str, saved: Any, own: Any) -> str:
    if field == "weights":
        return "the model's weights are others"
    if field == "config" and isinstance(saved, dict):
        changed = sorted(key for key in {*saved, *own} if saved.get(key) != own.get(key))
        field, saved, own = changed[0], saved.get(changed[0]), own.get(changed[0])
    return f"it was saved with {field}={saved!r}, and here it is {own!r}"
