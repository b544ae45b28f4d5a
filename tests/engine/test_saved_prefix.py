"""Documents on disk: the same bits after loading, and a refusal that says why for everything else."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from herald import LLM, EngineConfig, OffloadConfig, SamplingParams
from herald.errors import (
    HostPoolTooSmall,
    InvalidOption,
    PrefixDamaged,
    PrefixMismatch,
    PromptTooLong,
    UsageError,
)
from tests.engine.conftest import GOLDEN
from tests.engine.support import random_prompt

OFFLOAD = OffloadConfig(kv_budget=0.2, sink_rows=2, recent_rows=8, min_resident_rows=16)
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, confidence_threshold=None, denoising_steps=4)
DOCUMENT = random_prompt(700, 1)
QUESTION = random_prompt(30, 2)


def open_llm(
    offload: OffloadConfig = OFFLOAD,
    folder: str | Path = GOLDEN / "sdar_b8",
    chunk: int = 512,
    **options: Any,
) -> LLM:
    engine = EngineConfig(prefill_chunk=chunk)
    return LLM(folder, device="cpu", offload=offload, engine=engine, seed=0, **options)


def answer(llm: LLM, prompt: list[int]) -> tuple[tuple[int, ...], int]:
    """Tokens, and how many of the prompt's were cached."""
    (output,) = llm.generate(prompt_token_ids=[prompt], sampling_params=PARAMS)
    return output.token_ids, output.metrics.cached_tokens


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("saved") / "below" / "document"
    with open_llm() as llm:
        size = llm.save_prefix(DOCUMENT, folder)
        assert size == sum(file.stat().st_size for file in folder.iterdir())
        assert [file.name for file in folder.parent.iterdir()] == ["document"]
    yield folder


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    with open_llm(replace(OFFLOAD, prefix_sharing=False)) as llm:
        return answer(llm, DOCUMENT + QUESTION)[0]


def test_another_engine_goes_on_from_the_same_bits(saved: Path, expected: tuple[int, ...]) -> None:
    with open_llm() as llm:
        prefix = llm.load_prefix(saved)
        assert (
            prefix.num_tokens == 640 and prefix.token_ids.tolist() == DOCUMENT[:640] and prefix.text is None
        )
        assert answer(llm, DOCUMENT + QUESTION) == (expected, 640)
        stats = llm.prefix_stats
        assert (stats.lookups, stats.hits, stats.hit_tokens, stats.pinned_pages) == (1, 1, 640, 10)
        with open_llm() as other:
            other.generate(prompt_token_ids=[DOCUMENT], sampling_params=PARAMS)
            stores, found = [each.engine.memory.store for each in (llm, other)], []
            for each, store in zip((llm, other), stores, strict=True):
                assert store is not None
                names = each.engine.prefixes.names(DOCUMENT, 8)
                nodes, whole = each.engine.memory.prefixes.acquire_all(names.tokens, names.exact)
                assert whole and len(nodes) == 10
                pages = [node.page for node in nodes]
                rows = store.pool.rows[:, pages].view(torch.int32).numpy()
                found.append([rows, *(array[:, pages] for array in store.index.arrays)])
            assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("bits", [16, 4])
def test_other_index_bits_build_their_own_codes(saved: Path, bits: Any) -> None:
    offload = replace(OFFLOAD, index_bits=bits)
    with open_llm(replace(offload, prefix_sharing=False)) as bare, open_llm(offload) as llm:
        llm.load_prefix(saved)
        assert answer(llm, DOCUMENT + QUESTION) == (answer(bare, DOCUMENT + QUESTION)[0], 640)


def test_another_prefill_chunk_uses_it_too(saved: Path) -> None:
    with open_llm(chunk=256) as llm:
        llm.load_prefix(saved)
        assert answer(llm, DOCUMENT + QUESTION)[1] == 640


def test_a_loaded_prefix_stays_until_it_is_released(saved: Path) -> None:
    page = open_layout_bytes()
    with open_llm(replace(OFFLOAD, host_memory_bytes=16 * page)) as llm:
        prefix = llm.load_prefix(saved)
        other = random_prompt(300, 3)
        answer(llm, other)
        assert llm.prefix_stats.pinned_pages == 10
        with pytest.raises(HostPoolTooSmall, match="loaded prefixes keep 10 of the 16"):
            answer(llm, random_prompt(500, 4))
        with pytest.raises(HostPoolTooSmall, match="more than the pool can free"):
            llm.engine.memory.prefixes.clear()
            llm.engine.memory.store.pool.allocator.allocate(8)
            llm.load_prefix(saved)
    with open_llm(replace(OFFLOAD, host_memory_bytes=16 * page)) as llm:
        with llm.load_prefix(saved) as prefix:
            again = llm.load_prefix(saved)
            again.release()
            again.release()
            assert llm.prefix_stats.pinned_pages == 10
        prefix.release()
        assert llm.prefix_stats.pinned_pages == 0 and llm.prefix_stats.cached_pages == 10
        answer(llm, random_prompt(500, 4))
        assert llm.prefix_stats.evicted_pages > 0
        assert answer(llm, DOCUMENT + QUESTION)[1] in (0, 512)
    with open_llm(replace(OFFLOAD, host_memory_bytes=6 * page)) as llm, pytest.raises(HostPoolTooSmall):
        llm.load_prefix(saved)


def open_layout_bytes() -> int:
    with open_llm() as llm:
        return llm.engine.memory.layout.page_bytes


def test_a_conversation_is_saved_with_its_answer(tmp_path: Path) -> None:
    with open_llm() as llm:
        (first,) = llm.generate(prompt_token_ids=[DOCUMENT], sampling_params=replace(PARAMS, max_tokens=200))
        conversation = [*DOCUMENT, *first.token_ids]
        llm.save_prefix(conversation, tmp_path / "talk")
        expected = answer(llm, conversation + QUESTION)
    with open_llm() as llm:
        assert llm.load_prefix(tmp_path / "talk").num_tokens == 896
        assert answer(llm, conversation + QUESTION) == expected == (expected[0], 896)


def test_text_and_chat(tmp_path: Path) -> None:
    """The text of a prompt comes back with it."""
    text = "All the rest is in the appendix. " * 20
    with LLM("tiny", device="cpu", engine=EngineConfig(prefill_chunk=64)) as llm:
        llm.save_prefix(text, tmp_path / "plain")
        prefix = llm.load_prefix(tmp_path / "plain")
        assert (prefix.text, prefix.chat) == (text, False)
        assert prefix.token_ids.tolist() == llm.tokenizer.encode(text)[: prefix.num_tokens]


def damage(folder: Path, what: str) -> None:
    layer, manifest = folder / "layer-00001.safetensors", folder / "prefix.json"
    about = json.loads(manifest.read_text())
    if what == "bit":
        content = bytearray(layer.read_bytes())
        content[len(content) // 2] ^= 1
        layer.write_bytes(content)
    elif what == "missing":
        layer.unlink()
    elif what == "short":
        layer.write_bytes(layer.read_bytes()[:-100])
    elif what == "swapped":
        name = "layer-00000.safetensors"
        pages = (folder / "pages.safetensors").read_bytes()
        (folder / name).write_bytes(pages)
        about["files"][name] = about["files"]["pages.safetensors"]
        manifest.write_text(json.dumps(about))
    elif what == "no json":
        manifest.write_text("{")
    elif what == "format":
        manifest.write_text(json.dumps(about | {"format": "other"}))
    elif what == "version":
        manifest.write_text(json.dumps(about | {"version": 2}))
    elif what == "budget":
        about["about"]["kv_budget"] = 2
        manifest.write_text(json.dumps(about))
    elif what == "no files":
        manifest.write_text(json.dumps({key: about[key] for key in ("format", "version", "about")}))
    else:
        raise AssertionError(what)


@pytest.mark.parametrize(
    "what", ["bit", "missing", "short", "swapped", "no json", "format", "version", "no files", "budget"]
)
def test_damage_is_found_and_leaves_nothing(saved: Path, tmp_path: Path, what: str, expected: Any) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    damage(folder, what)
    with open_llm() as llm:
        with pytest.raises(PrefixDamaged):
            llm.load_prefix(folder)
        store = llm.engine.memory.store
        assert store is None or store.pool.allocator.num_free == store.pool.num_pages
        assert answer(llm, DOCUMENT + QUESTION) == (expected, 0)


def test_what_belongs_elsewhere_is_refused(saved: Path, tmp_path: Path) -> None:
    """The message names what differs and the value that would do."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"folder": GOLDEN / "sdar_b4", "block_length": 8}, "differ|it was saved with|others"),
        ({"dtype": "bfloat16"}, "dtype='float32', and here it is 'bfloat16'; use dtype='float32'"),
        ({"block_length": 16}, "block_length=8, and here it is 16; use block_length=8"),
        ({"mask_token_id": 3}, "mask_token_id="),
        ({"offload": replace(OFFLOAD, page_size=32)}, "page_size=64, and here it is 32; use page_size=64"),
    ]
    for options, message in cases:
        with open_llm(**options) as llm, pytest.raises(PrefixMismatch, match=message):
            llm.load_prefix(saved)
    with open_llm() as llm:
        layer = llm.model.layers[-1]  # type: ignore[attr-defined]
        layer.down.view(-1)[layer.down.numel() // 2 :] *= 1.01
        with pytest.raises(PrefixMismatch, match="weights are others"):
            llm.load_prefix(saved)
        with pytest.raises(UsageError, match="no saved prefix"):
            llm.load_prefix(tmp_path)


def test_what_cannot_be_saved(saved: Path, tmp_path: Path) -> None:
    for offload, message in (
        (OffloadConfig(enabled=False), "enabled=True"),
        (replace(OFFLOAD, prefix_sharing=False), "prefix_sharing=True"),
    ):
        with open_llm(offload) as llm:
            with pytest.raises(InvalidOption, match=message):
                llm.save_prefix(DOCUMENT, tmp_path / "new")
            with pytest.raises(InvalidOption, match=message):
                llm.load_prefix(saved)
    with open_llm() as llm:
        with pytest.raises(InvalidOption, match="use 64 tokens or more"):
            llm.save_prefix(DOCUMENT[:63], tmp_path / "new")
        with pytest.raises(UsageError, match="exists already"):
            llm.save_prefix(DOCUMENT, saved)
        with pytest.raises(PromptTooLong):
            llm.save_prefix([1] * llm.engine.max_model_len, tmp_path / "new")
        assert not llm.engine.has_work
    llm.close()
    with pytest.raises(UsageError, match="closed"):
        llm.load_prefix(saved)
    assert not list(tmp_path.iterdir())


def test_saving_waits_for_the_last_rows(tmp_path: Path) -> None:
    """However long the index takes, a document is whole when it is saved."""
    with open_llm() as llm:

        def slow_down(retriever: Any, store: Any) -> None:
            append = store.index.append_span

            def slowly(*arguments: Any, **options: Any) -> None:
                time.sleep(0.1)
                append(*arguments, **options)

            store.index.append_span = slowly

        llm.engine.on_retriever = slow_down
        llm.save_prefix(DOCUMENT, tmp_path / "new")
        assert llm.load_prefix(tmp_path / "new").num_tokens == 640
