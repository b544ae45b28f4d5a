"""A prefix on disk: its pages, layer by layer, and a manifest that says what they are.

A folder holds ``prefix.json``, ``pages.safetensors`` (``token_ids`` int64 [n], ``pieces`` int64 [pages])
and a file a layer: ``rows`` [pages, kv_heads, page_size, 2 * head_dim] and the arrays of the key index,
``codes``, ``row_scales``, ``mean_codes``, ``page_scales``. The manifest has the SHA-256 of each file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as dump_tensors

from herald.errors import PrefixDamaged, UsageError
from herald.kvstore.key_index import KeyIndex

FORMAT, VERSION = "herald-prefix", 1
MANIFEST = "prefix.json"
PAGES = "pages.safetensors"
INDEX_NAMES = ("codes", "row_scales", "mean_codes", "page_scales")
# Layers read or written at a time: each is in memory as a whole.
WORKERS = 4


@dataclass(frozen=True)
class SavedPrefix:
    """What a folder says about its prefix.

    Attributes:
        folder: it.
        about: what was written with it, see `write_prefix`.
        token_ids: of its pages, int64 [pages * page_size].
        pieces: int64 [pages], see `herald.kvstore.prefix_keys`.
        digests: file name -> SHA-256.
    """

    folder: Path
    about: dict[str, Any]
    token_ids: np.ndarray
    pieces: np.ndarray
    digests: dict[str, str]


def write_prefix(
    folder: Path,
    about: Mapping[str, Any],
    token_ids: np.ndarray,
    pieces: np.ndarray,
    index: KeyIndex,
    pages: np.ndarray,
) -> int:
    """Write pages of a pool. Either the whole folder is there afterwards, or nothing.

    Args:
        folder: that does not exist yet, or is empty.
        about: JSON values that `read_manifest` gives back.
        token_ids, pieces: see `SavedPrefix`.
        index: of the pool.
        pages: int32 [n] in the pool, finished.

    Returns:
        Bytes written.

    Raises:
        UsageError: there is something in the folder's place.
    """
    check_folder(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    draft.mkdir()
    try:
        first = {"token_ids": torch.from_numpy(token_ids), "pieces": torch.from_numpy(pieces)}
        digests = {PAGES: _write(draft / PAGES, first)}
        names = [_layer_file(layer) for layer in range(index.pool.layout.num_layers)]

        def write(layer: int) -> str:
            return _write(draft / names[layer], _layer(index, layer, pages))

        with ThreadPoolExecutor(WORKERS) as executor:
            digests |= zip(names, executor.map(write, range(len(names))), strict=True)
        manifest = {"format": FORMAT, "version": VERSION, "about": dict(about), "files": digests}
        (draft / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        draft.replace(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return sum(file.stat().st_size for file in folder.iterdir())


def check_folder(folder: Path) -> None:
    """Refuse a folder that `write_prefix` would refuse.

    Raises:
        UsageError: there is something in its place.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists already", "choose another folder, or delete this one")


def read_manifest(folder: Path) -> SavedPrefix:
    """What a folder says about its prefix; its pages are not touched.

    Raises:
        UsageError: there is no prefix. PrefixDamaged: it cannot be read.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            f"{folder} holds no saved prefix", "pass a folder of `herald prefix save`"
        ) from error
    except (OSError, ValueError) as error:
        raise PrefixDamaged(f"{path} cannot be read ({error})", "save the prefix again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise PrefixDamaged(f"{path} is no manifest of a prefix", "pass a folder of `herald prefix save`")
    if manifest.get("version") != VERSION:
        raise PrefixDamaged(
            f"{path} has version {manifest.get('version')!r}", f"save the prefix again: this is {VERSION}"
        )
    about, digests = manifest.get("about"), manifest.get("files")
    if not isinstance(about, dict) or not isinstance(digests, dict):
        raise PrefixDamaged(f"{path} is incomplete", "save the prefix again")
    tensors = _read(folder, PAGES, digests)
    token_ids, pieces = tensors.get("token_ids"), tensors.get("pieces")
    if token_ids is None or pieces is None:
        raise PrefixDamaged(f"{folder / PAGES} has no token ids", "save the prefix again")
    return SavedPrefix(folder, about, token_ids.numpy(), pieces.numpy(), digests)


def read_pages(saved: SavedPrefix, index: KeyIndex, pages: np.ndarray) -> None:
    """Read all layers into pages of a pool, codes too where they have the index's bits; else codes are built.

    Args:
        pages: int32 [n], as many as were saved.

    Raises:
        PrefixDamaged: a file is not what was written, or has another shape. The pages then hold anything.
    """
    same_codes = saved.about.get("index_bits") == index.bits

    def read(layer: int) -> None:
        name = _layer_file(layer)
        tensors = _read(saved.folder, name, saved.digests)
        if not _put(tensors, index, layer, pages, same_codes):
            raise PrefixDamaged(
                f"{saved.folder / name} has other shapes than its manifest", "save the prefix again"
            )

    with ThreadPoolExecutor(WORKERS) as executor:
        for done in [executor.submit(read, layer) for layer in range(index.pool.layout.num_layers)]:
            done.result()
    if not same_codes:
        index.append_span(pages, 0, len(pages) * index.pool.layout.page_size)


def _layer_file(layer: int) -> str:
    return f"layer-{layer:05}.safetensors"


def _layer(index: KeyIndex, layer: int, pages: np.ndarray) -> dict[str, torch.Tensor]:
    tensors = {"rows": index.pool.rows[layer][torch.from_numpy(pages).long()]}
    if index.bits != 16:
        arrays = zip(INDEX_NAMES, index.arrays, strict=True)
        tensors |= {name: torch.from_numpy(array[layer][pages]) for name, array in arrays}
    return tensors


def _put(
    tensors: dict[str, torch.Tensor], index: KeyIndex, layer: int, pages: np.ndarray, with_codes: bool
) -> bool:
    """Put a layer's tensors into pages; False where one is missing or does not fit."""
    rows, pool = tensors.get("rows"), index.pool.rows[layer]
    if rows is None or rows.dtype != pool.dtype or rows.shape != (len(pages), *pool.shape[1:]):
        return False
    pool[torch.from_numpy(pages).long()] = rows
    if index.bits == 16 or not with_codes:
        return True
    saved = [tensors[name].numpy() for name in INDEX_NAMES if name in tensors]
    wanted = [(array.dtype, (len(pages), *array.shape[2:])) for array in index.arrays]
    if [(codes.dtype, codes.shape) for codes in saved] != wanted:
        return False
    index.put_pages(layer, pages, saved)
    return True


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    content = dump_tensors(tensors)
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def _read(folder: Path, name: str, digests: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    path = folder / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PrefixDamaged(f"{path} cannot be read ({error.strerror})", "save the prefix again") from error
    if hashlib.sha256(content).hexdigest() != digests.get(name):
        raise PrefixDamaged(f"{path} is not what was written (its SHA-256 differs)", "save the prefix again")
    try:
        return load_tensors(content)
    except SafetensorError as error:
        raise PrefixDamaged(f"{path} cannot be read ({error})", "save the prefix again") from error
