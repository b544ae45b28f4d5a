"""The cache of shared pages: what is found, what leaves first, what never leaves."""

from __future__ import annotations

import random

import numpy as np
import pytest

from herald.errors import HostPoolTooSmall, UsageError
from herald.kvstore import CachedPage, PageAllocator, PrefixCache
from herald.kvstore.prefix_keys import FREE_PIECE, Made, exact_keys, root_key, token_keys

SIZE = 4
ROOT = root_key(4)


class Owner:
    """Whoever fills pages and shares them."""

    def __init__(self, num_pages: int) -> None:
        self.pool = PageAllocator(num_pages)
        self.cache = PrefixCache()
        self.cache.attach(self.pool)

    def names(self, tokens: str, piece: int = SIZE) -> tuple[list[bytes], list[bytes]]:
        names = token_keys(ROOT, [ord(each) for each in tokens for _ in range(SIZE)], SIZE)
        return names, exact_keys(ROOT, names, [Made(piece)] * len(names))

    def share(self, tokens: str, piece: int = SIZE) -> list[CachedPage]:
        """Fill a page for each letter and keep none."""
        assert self.cache.make_room(len(tokens))
        pages = self.pool.allocate(len(tokens))
        names, exact = self.names(tokens, piece)
        nodes = self.cache.add(pages, names, exact, [Made(piece)] * len(names))
        self.pool.release(pages)
        return nodes

    def share_answer(self, tokens: str, made: Made) -> None:
        """Fill a page for each letter, the last of them by decoding, behind pieces of 12."""
        names, _ = self.names(tokens)
        how = [Made(12)] * (len(tokens) - 1) + [made]
        pages = self.pool.allocate(len(tokens))
        self.cache.add(pages, names, exact_keys(ROOT, names, how), how)
        self.pool.release(pages)

    def found(
        self, tokens: str, piece: int = SIZE, ends: list[bool] | None = None, kv_budget: float = 0.0
    ) -> int:
        names, exact = self.names(tokens, piece)
        return len(self.cache.match(names, exact, ends or [True] * len(names), kv_budget))


def test_names_depend_on_everything_before() -> None:
    tokens = list(range(40))
    whole = token_keys(ROOT, tokens, SIZE)
    assert len(whole) == 10 and len(set(whole)) == 10
    assert token_keys(ROOT, tokens[:39], SIZE) == whole[:9]
    assert token_keys(ROOT, tokens, SIZE, whole[:7]) == whole
    for position in (0, 17, 39):
        other = [*tokens[:position], 99, *tokens[position + 1 :]]
        changed = token_keys(ROOT, other, SIZE)
        assert [a == b for a, b in zip(whole, changed)] == [i < position // SIZE for i in range(10)]
    assert not set(whole) & set(token_keys(root_key(8), tokens, SIZE))
    made = [Made(8)] * 5 + [Made(4)] * 5
    exact = exact_keys(ROOT, whole, made)
    assert exact_keys(ROOT, whole, made, exact[:6]) == exact
    for other in (Made(8), Made(4, 0.5)):
        others = exact_keys(ROOT, whole, made[:5] + [other] * 5)
        assert [a == b for a, b in zip(exact, others)] == [True] * 5 + [False] * 5


def test_the_longest_prefix_is_found() -> None:
    owner = Owner(20)
    owner.share("abcd")
    owner.share("abxy")
    assert len(owner.cache) == 6 and owner.pool.num_free == 14
    assert [owner.found(t) for t in ("abcdz", "abxz", "az", "b", "")] == [4, 3, 1, 0, 0]
    # Only whole pieces are found, and only what was computed in such.
    assert owner.found("abcd", ends=[False, True, False, False]) == 2
    assert owner.found("abcd", piece=8) == 0


def test_an_answer_is_found_however_its_prompt_was_computed() -> None:
    owner = Owner(20)
    owner.share("abcd", piece=12)
    assert owner.found("abcd") == 0
    owner.share_answer("abcde", Made(FREE_PIECE))
    assert len(owner.cache) == 5
    assert owner.found("abcdef", ends=[False] * 6) == 5
    assert owner.found("abcdx") == 0  # not the answer: what its own prefill would make, or nothing


def test_an_answer_is_for_those_who_ask_for_no_more_rows() -> None:
    owner = Owner(20)
    owner.share("abcd", piece=12)
    owner.share_answer("abcde", Made(FREE_PIECE, 0.1))
    assert [owner.found("abcdef", kv_budget=budget) for budget in (0.05, 0.1, 0.2)] == [5, 5, 0]
    owner.share_answer("abcde", Made(FREE_PIECE, 0.5))
    owner.share_answer("abcde", Made(FREE_PIECE, 0.5))
    assert len(owner.cache) == 6, "one page for each budget"
    assert [owner.found("abcdef", kv_budget=budget) for budget in (0.1, 0.2, 0.5, 0.6)] == [5, 5, 5, 0]
    names, exact = owner.names("abcde", 7)
    nodes, whole = owner.cache.acquire_all(names, exact)
    assert not whole and [node.made.kv_budget for node in nodes] == [1.0] * 4 + [0.5]
    owner.pool.release([node.page for node in nodes])


def test_the_oldest_leaves_first_and_children_before_parents() -> None:
    owner = Owner(6)
    owner.share("abc")
    owner.share("xyz")
    assert owner.pool.num_free == 0
    owner.found("abc")  # looking is not using
    names, exact = owner.names("a")
    owner.pool.release([node.page for node in owner.cache.acquire(names, exact, [True])])
    assert owner.cache.make_room(2)
    assert (owner.found("abc"), owner.found("xyz")) == (1, 3)
    assert owner.cache.make_room(5)
    assert (owner.found("abc"), owner.found("xyz")) == (1, 0)
    assert owner.cache.evicted_pages == 5


def test_what_is_held_or_pinned_stays() -> None:
    owner = Owner(6)
    nodes = owner.share("abc")
    owner.share("xyz")
    names, exact = owner.names("xy")
    held = owner.cache.acquire(names, exact, [True, True])
    owner.cache.pin(nodes[-1])
    assert owner.cache.num_pinned == 3
    assert owner.cache.kept_with([held]) == 5
    assert not owner.cache.make_room(2) and len(owner.cache) == 6  # nothing is evicted in vain
    assert owner.cache.make_room(1)
    owner.cache.unpin(nodes[-1])
    assert owner.cache.make_room(4) and not owner.cache.make_room(5)
    owner.pool.release([node.page for node in held])
    assert owner.cache.make_room(6) and len(owner.cache) == 0


def test_what_leads_to_a_page_in_use_stays() -> None:
    """Somebody computed the whole prefix again and holds what follows: nothing before that can leave."""
    owner = Owner(10)
    owner.share("abc")
    names, exact = owner.names("abcd")
    held = owner.pool.allocate(4)
    owner.cache.add(held, names, exact, [Made(SIZE)] * 4)
    owner.share("xy")
    assert owner.pool.num_free == 1 and len(owner.cache) == 6
    assert not owner.cache.make_room(4) and len(owner.cache) == 6 and owner.cache.evicted_pages == 0
    assert owner.cache.make_room(3) and owner.found("abcd") == 4 and owner.found("xy") == 0
    owner.pool.release(held)
    assert owner.cache.make_room(10) and not len(owner.cache)


def test_moving_to_another_pool() -> None:
    owner = Owner(8)
    owner.share("abc")
    owner.share("abxy")
    before = {node.exact_key: node.page for node in owner.cache._by_exact.values()}
    with pytest.raises(HostPoolTooSmall):
        owner.cache.move(PageAllocator(4))
    new = PageAllocator(5)
    old_ids, new_ids = owner.cache.move(new)
    moved = dict(zip(old_ids.tolist(), new_ids.tolist(), strict=True))
    assert all(node.page == moved[before[key]] for key, node in owner.cache._by_exact.items())
    assert new.num_free == 0 and np.all(np.diff(new_ids) == 1)
    owner.pool = new
    assert owner.found("abxy") == 4 and owner.cache.make_room(5)
    owner.share("abc")
    with pytest.raises(UsageError, match="another pool"):
        owner.cache.attach(PageAllocator(3))
    owner.cache.clear()
    owner.cache.attach(PageAllocator(3))


@pytest.mark.parametrize("seed", range(4))
def test_against_a_plain_model(seed: int) -> None:
    """Random prompts over two letters, held for a while: no page is lost, doubled or taken from a holder."""
    rng = random.Random(seed)
    owner = Owner(24)
    contents: dict[int, str] = {}  # page -> the prefix it was filled with
    holders: list[list[int]] = []
    for _ in range(400):
        if holders and rng.random() < 0.45:
            owner.pool.release(holders.pop(rng.randrange(len(holders))))
            continue
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 7)))
        names, exact = owner.names(text)
        shared = owner.cache.acquire(names, exact, [True] * len(names))
        assert all(contents[node.page] == text[: at + 1] for at, node in enumerate(shared))
        if not owner.cache.make_room(len(text) - len(shared)):
            owner.pool.release([node.page for node in shared])
            continue
        fresh = owner.pool.allocate(len(text) - len(shared))
        held = {page for pages in holders for page in pages}
        assert not held & set(fresh.tolist())
        pages = [node.page for node in shared] + fresh.tolist()
        contents.update({page: text[: at + 1] for at, page in enumerate(pages)})
        if rng.random() < 0.8:
            owner.cache.add(pages, names, exact, [Made(SIZE)] * len(names))
        holders.append(pages)
        cached = {node.page for node in owner.cache._by_exact.values()}
        counts = [owner.pool.references(page) for page in range(24)]
        wanted = [sum(page in pages for pages in holders) + (page in cached) for page in range(24)]
        assert counts == wanted
        assert all(
            node.parent is None or node.parent.exact_key in owner.cache._by_exact
            for node in owner.cache._by_exact.values()
        )
    for pages in holders:
        owner.pool.release(pages)
    assert owner.cache.make_room(24) and len(owner.cache) == 0 and owner.cache.evicted_pages > 0
