"""Reads safetensors checkpoints, whole or in shards, tensor by tensor straight to the device."""

from __future__ import annotations

import json
import math
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from herald.errors import WeightsError
from herald.models import fp8
from herald.models.config import read_json
from herald.models.fp8 import Fp8Layout

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = ("F32", "F16", "BF16")
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, fp8.STORED: 1}
# some exporters store the rotary buffer, which is computed here
TOLERATED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
SHOWN_NAMES = 8


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint.

    Attributes:
        name: in the checkpoint.
        shape: that it must have.
        dtype: that it keeps in any model; None for the model's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Parameter:
    """A tensor of the model: its sources, joined along the first dimension."""

    name: str
    sources: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.sources[0].shape
        return (sum(source.shape[0] for source in self.sources), *first[1:])

    @property
    def dtype(self) -> torch.dtype | None:
        """That it keeps in any model; None for the model's."""
        return self.sources[0].dtype


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what its header says."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of a type that can be loaded."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Checkpoint:
    """The safetensors files of a folder: headers are read and sizes checked, data is not touched.

    Args:
        folder: holds ``model.safetensors``, or shards and ``model.safetensors.index.json``.
        layout: how e4m3 weights are stored; None where there are to be none.

    Raises:
        WeightsError: no weights, a shard is missing, a file is truncated or not safetensors.
    """

    def __init__(self, folder: Path, layout: Fp8Layout | None = None) -> None:
        self.folder = folder
        self.layout = layout
        self.tensors: dict[str, StoredTensor] = {}
        for file in weight_files(folder):
            self.tensors.update(read_header(file))

    def verify(self, sources: Iterable[Source], tolerated: frozenset[str] = frozenset()) -> None:
        """Hold the files to ``sources``; names in ``tolerated`` may be there and are left unread.

        One that ends in ``*`` stands for all names that begin so.

        Raises:
            WeightsError: names what is missing, unexpected, mis-shaped or not of a float type.
        """
        wanted = {source.name: source.shape for source in sources}
        known = wanted.keys() & self.tensors.keys()
        quantised = {name: self.scale_of(name) for name in known if self.is_quantised(name)}
        others = tolerated | {name for name in quantised.values() if name is not None}
        others |= {fp8.input_scale_name(name) for name in quantised}
        beginnings = tuple(name[:-1] for name in tolerated if name.endswith("*"))
        unexpected = {
            name
            for name in self.tensors.keys() - wanted.keys() - others
            if not (TOLERATED.search(name) or name.startswith(beginnings))
        }
        problems = [
            _listed("missing", wanted.keys() - self.tensors.keys()),
            _listed("unexpected", unexpected),
            _listed(
                "mis-shaped",
                {
                    f"{name} {list(self.tensors[name].shape)} instead of {list(wanted[name])}"
                    for name in known
                    if self.tensors[name].shape != wanted[name]
                },
            ),
            _listed(
                f"not of a type in {', '.join(FLOAT_DTYPES)}",
                {
                    f"{name} {self.tensors[name].dtype}"
                    for name in known - quantised.keys()
                    if self.tensors[name].dtype not in FLOAT_DTYPES
                },
            ),
            _listed(
                "e4m3 without scales that fit", {self._misfit(*pair) for pair in quantised.items()} - {""}
            ),
        ]
        if any(problems):
            raise WeightsError(
                f"weights in {self.folder} do not fit config.json: {'; '.join(filter(None, problems))}",
                "use the config.json and the weights of one checkpoint",
            )

    def is_quantised(self, name: str) -> bool:
        """Whether a tensor is stored in e4m3 and config.json says so."""
        return self.layout is not None and self.tensors[name].dtype == fp8.STORED

    def scale_of(self, name: str) -> str | None:
        """The name of a quantised tensor's scales."""
        return fp8.scale_name(name, self.tensors)

    def _misfit(self, name: str, scale: str | None) -> str:
        """What keeps a quantised tensor from being read, empty if nothing does."""
        assert self.layout is not None
        weight = f"{name} {list(self.tensors[name].shape)}"
        if scale is None:
            return f"{weight} (no {' or '.join(name + suffix for suffix in fp8.SCALE_SUFFIXES)})"
        found = self.tensors[scale]
        fits = self.layout.granularity(self.tensors[name].shape, found.shape) is not None
        if fits and found.dtype in FLOAT_DTYPES:
            return ""
        rows, columns = self.layout.block
        return f"{weight} ({scale} {found.dtype} {list(found.shape)}, blocks of {rows} x {columns})"


def _listed(what: str, names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - SHOWN_NAMES} more" if len(ordered) > SHOWN_NAMES else ""
    return f"{what}: {', '.join(ordered[:SHOWN_NAMES])}{more}" if ordered else ""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, by its index where it has one.

    Raises:
        WeightsError: there are none, or the index names a file that is not there.
    """
    index_path = folder / INDEX_FILE
    if not index_path.exists():
        if (folder / SINGLE_FILE).is_file():
            return [folder / SINGLE_FILE]
        raise WeightsError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}",
            "download the weights too, or convert them to safetensors",
        )
    weight_map = read_json(index_path).get("weight_map")
    files = weight_map.values() if isinstance(weight_map, dict) else ()
    if not files or not all(isinstance(name, str) for name in files):
        raise WeightsError(f"{index_path} has no weight_map of file names", "download the file again")
    names = sorted(set(files))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise WeightsError(
            f"{_listed('shards named by the index are missing', absent)} (of {len(names)} in {folder})",
            "download the missing files",
        )
    return [folder / name for name in names]


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Names, types and shapes in a safetensors file, whose size must be what its header promises.

    Raises:
        WeightsError: the file is truncated or its header cannot be read.
    """
    try:
        return _read_header(file)
    except OSError as error:
        raise WeightsError(f"{file} cannot be read ({error.strerror})", "check its permissions") from error


def _read_header(file: Path) -> dict[str, StoredTensor]:
    actual = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= actual - 8:
            raise WeightsError(
                f"{file} is truncated or no safetensors file ({actual} bytes, header of {length} bytes)",
                "download it again",
            )
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors = {
                name: StoredTensor(file, entry["dtype"], tuple(entry["shape"]))
                for name, entry in header.items()
            }
            expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsError(f"{file} has an unreadable header ({error!r})", "download it again") from error
    if actual != expected:
        raise WeightsError(
            f"{file} has {actual} bytes where its header promises {expected}", "download it again"
        )
    return tensors


def load_parameters(
    checkpoint: Checkpoint,
    parameters: Sequence[Parameter],
    device: torch.device,
    dtype: torch.dtype,
    tolerated: frozenset[str] = frozenset(),
) -> dict[str, torch.Tensor]:
    """All ``parameters`` on ``device`` in ``dtype`` (or their own), by their name in the model.

    Files are memory-mapped and each tensor is converted on its own into its place, so host memory
    beyond the page cache holds one tensor at a time. Weights stored in e4m3 are multiplied by their scales
    on the way.

    Raises:
        WeightsError: see `Checkpoint.verify`; or a file's offsets do not fit its tensors.
    """
    checkpoint.verify((source for parameter in parameters for source in parameter.sources), tolerated)
    loaded: dict[str, torch.Tensor] = {}
    by_file: dict[Path, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for parameter in parameters:
        target = torch.empty(parameter.shape, dtype=parameter.dtype or dtype, device=device)
        loaded[parameter.name] = target
        places = target.split([source.shape[0] for source in parameter.sources])
        for source, place in zip(parameter.sources, places, strict=True):
            by_file[checkpoint.tensors[source.name].file].append((source.name, place))

    names = [name for copies in by_file.values() for name, _ in copies]
    scales = _load_scales(checkpoint, [name for name in names if checkpoint.is_quantised(name)])
    total = sum(checkpoint.tensors[name].num_bytes for name in names)
    # disable=None: a bar on a terminal only
    with tqdm(total=total, desc="loading weights", unit="B", unit_scale=True, disable=None) as progress:
        for file, copies in by_file.items():
            with _opened(file) as tensors:
                for name, place in copies:
                    stored = tensors.get_tensor(name)
                    if name in scales:
                        assert checkpoint.layout is not None
                        fp8.dequantise(stored, scales[name], checkpoint.layout, place)
                    else:
                        place.copy_(stored)
                    progress.update(stored.nbytes)
    return loaded


def _load_scales(checkpoint: Checkpoint, quantised: list[str]) -> dict[str, torch.Tensor]:
    """Scales of quantised tensors, by the tensor's name: they are small, and may lie in another file."""
    by_file: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    for name in quantised:
        scale = checkpoint.scale_of(name)
        assert scale is not None
        by_file[checkpoint.tensors[scale].file].append((name, scale))
    scales: dict[str, torch.Tensor] = {}
    for file, pairs in by_file.items():
        with _opened(file) as tensors:
            scales |= {name: tensors.get_tensor(scale).float().clone() for name, scale in pairs}
    return scales


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A file of tensors, memory-mapped.

    Raises:
        WeightsError: its offsets do not fit its tensors.
    """
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
    except SafetensorError as error:
        raise WeightsError(f"{file} is damaged ({error})", "download it again") from error
