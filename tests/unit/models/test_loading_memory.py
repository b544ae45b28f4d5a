"""Host memory while a checkpoint in shards is loaded: one shard at a time, beside the weights themselves."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from herald.models import load_model, read_config
from herald.models.sdar import SdarModel
from tests.support.golden import GOLDEN

LAYERS, SHARDS = 12, 6
STATUS = Path("/proc/self/status")

pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="needs /proc")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 layers of float32 in 6 shards of about 24 MB."""
    folder = tmp_path_factory.mktemp("sharded")
    raw = json.loads((GOLDEN / "sdar_b4" / "config.json").read_text())
    raw |= {"num_hidden_layers": LAYERS, "hidden_size": 512, "intermediate_size": 1536}
    raw |= {"vocab_size": 4096, "mask_token_id": 0}
    (folder / "config.json").write_text(json.dumps(raw))
    sources = [s for p in SdarModel.parameters(read_config(folder)) for s in p.sources]
    sources.sort(key=lambda source: source.name)
    each = -(-len(sources) // SHARDS)
    files = {source.name: f"model-{i // each}.safetensors" for i, source in enumerate(sources)}
    for file in sorted(set(files.values())):
        own = {s.name: torch.randn(s.shape) for s in sources if files[s.name] == file}
        save_file(own, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def kilobytes(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1])


def extra_bytes(work: Callable[[], object]) -> int:
    """How far the resident memory of this process rose during ``work``."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free but not given back would be used again unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except (OSError, AttributeError):
        pytest.skip("the peak of this process's memory cannot be set back here")
    before = kilobytes("VmRSS")
    kept = work()
    peak = kilobytes("VmHWM")
    del kept
    return (peak - before) * 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as_stored", "converted"])
def test_peak_is_the_weights_and_less_than_1_2_shards(checkpoint: Path, dtype: torch.dtype) -> None:
    files = sorted(checkpoint.glob("*.safetensors"))
    largest = max(file.stat().st_size for file in files)
    load_model(checkpoint, dtype=dtype)  # what the first call sets up for good does not count
    weights = load_model(checkpoint, dtype=dtype).weight_bytes
    assert extra_bytes(lambda: load_model(checkpoint, dtype=dtype)) - weights < 1.2 * largest


def test_the_measurement_sees_shards_that_are_kept(checkpoint: Path) -> None:
    files = sorted(checkpoint.glob("*.safetensors"))
    total, largest = (pick(file.stat().st_size for file in files) for pick in (sum, max))
    kept = extra_bytes(lambda: [tensor.clone() for file in files for tensor in load_file(file).values()])
    assert kept > 0.95 * total > 2.5 * largest
