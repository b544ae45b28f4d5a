"""What a selection method is, and how it gets into an engine.

A method answers two questions: with which options the engine runs (`Method.offload`), and, where the engine
itself does not select that way, which rows it takes: `Method.selector` for every block but the first, whose
set is chosen while the prompt is prefilled (`Method.first_scores`). Everything else stays the engine's.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from herald.config import OffloadConfig
from herald.engine.engine import Engine
from herald.engine.memory import HostStore
from herald.engine.prefill import FirstScores
from herald.kvstore.pool import HostPool

State = TypeVar("State")


@dataclass(frozen=True)
class Switches:
    """Options that stand beside the choice of a method.

    Args:
        index_bits: 16, 8, 4 or 1.
        operator: "max", "sum" or "mean-max" (`operators`).
        lookahead_step: of the method `lookahead_k`.
        min_resident_rows: floor of the resident set; 1 holds every method to its budget.
        num_threads: CPU threads of a selection, 0 for all cores.
    """

    index_bits: int = 8
    operator: str = "max"
    lookahead_step: int = 3
    min_resident_rows: int = 1
    num_threads: int = 0


class RowSelector(Protocol):
    """The part of `herald.select.Selector` that the retriever uses."""

    def select(
        self,
        page_ids: np.ndarray,
        first: int,
        last: int,
        k: int,
        queries: np.ndarray,
        lse: np.ndarray,
        scale: float,
    ) -> np.ndarray: ...


class Method:
    """A way to choose the rows of a block.

    Attributes:
        name: by which it is asked for.
        about: one line for tables and help.
        exact_keys: it reads the keys themselves, whatever ``index_bits`` says.
        uses_index: ``index_bits`` makes a difference to it.
        uses_operator: the score operator does.
    """

    name = ""
    about = ""
    exact_keys = False
    uses_index = True
    uses_operator = True

    def offload(self, budget: float, switches: Switches) -> OffloadConfig:
        """Options of the engine at ``budget``, resident rows / prefix rows."""
        return self.options(budget, switches)

    def options(self, budget: float, switches: Switches, **changes: Any) -> OffloadConfig:
        """The options that all methods share, with ``changes``."""
        bits = 16 if self.exact_keys else switches.index_bits
        given = {
            "kv_budget": budget,
            "index_bits": bits,
            "score_operator": "max" if switches.operator == "mean-max" else switches.operator,
            "min_resident_rows": switches.min_resident_rows,
            "num_threads": switches.num_threads,
            "lookahead_step": 1,
            "refresh_commits": 0.0,
        }
        return OffloadConfig(**{**given, **changes})

    def selector(self, inner: RowSelector, store: HostStore) -> RowSelector:
        """What selects in the place of ``inner``; ``inner`` itself where the engine's own way is meant."""
        return inner

    def first_scores(self, inner: FirstScores) -> FirstScores:
        """What scores rows for the first block in the place of ``inner``."""
        return inner

    def install(self, engine: Engine) -> None:
        """Make an engine that has no request yet select this way."""
        attach(engine, self)


class WrappedSelector:
    """Base of selectors that stand before another one: what they do not define is the other's.

    Args:
        inner: the selector that is wrapped.
        store: pool, index and selector of the engine.
    """

    def __init__(self, inner: RowSelector, store: HostStore) -> None:
        self.inner: Any = inner
        self.pool: HostPool = store.pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class PerRequest(Generic[State]):
    """State of each request, known by the array of its page ids, gone when that array is."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[weakref.ref[np.ndarray], State]] = {}

    def get(self, page_ids: np.ndarray) -> State | None:
        found = self._states.get(id(page_ids))
        return found[1] if found is not None and found[0]() is page_ids else None

    def set(self, page_ids: np.ndarray, state: State) -> None:
        key = id(page_ids)

        def forget(gone: weakref.ref[np.ndarray]) -> None:
            if key in self._states and self._states[key][0] is gone:
                del self._states[key]

        self._states[key] = weakref.ref(page_ids, forget), state

    def __len__(self) -> int:
        return len(self._states)


def attach(engine: Engine, *methods: Method) -> None:
    """Put the selectors and first scores of ``methods`` before the engine's own, the last one outermost."""
    before = engine.on_retriever

    def made(retriever: Any, store: HostStore) -> None:
        if before is not None:
            before(retriever, store)
        selector: Any = store.selector
        for method in methods:
            selector = method.selector(selector, store)
        store.selector = selector

    engine.on_retriever = made
    for method in methods:
        engine.first_scores = method.first_scores(engine.first_scores)


def as_float(queries: np.ndarray) -> np.ndarray:
    """Queries as float32; bfloat16 comes as uint16."""
    if queries.dtype != np.uint16:
        return np.asarray(queries, dtype=np.float32)
    return (queries.astype(np.uint32) << 16).view(np.float32)


def keys_of(pool: HostPool, page_ids: np.ndarray, begin: int, end: int) -> np.ndarray:
    """float32 [L, H, end - begin, D]: the keys of positions ``begin .. end`` of a request."""
    size, dim = pool.layout.page_size, pool.layout.head_dim
    low, high = begin // size, -(-end // size)
    pages = torch.from_numpy(np.asarray(page_ids[low:high], dtype=np.int64))
    keys = pool.rows[:, pages, :, :, :dim].float()  # [L, pages, H, page_size, D]
    rows = keys.transpose(1, 2).flatten(2, 3)
    return rows[:, :, begin - low * size : end - low * size].numpy()


def best_rows(scores: np.ndarray, k: int, first: int) -> np.ndarray:
    """int32 [L, H, k], ascending: positions of the k highest of ``scores`` [L, H, n]; ties to the lower
    one."""
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    return np.sort(order, axis=-1).astype(np.int32) + np.int32(first)
