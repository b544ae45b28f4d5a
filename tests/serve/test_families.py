"""Every family is served: by its own defaults, with options of diffusion, at the edge of the context."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from herald import AsyncLLM, EngineConfig, OffloadConfig
from tests.engine.conftest import DENSE, GOLDEN
from tests.serve.support import CONFIG, Running, request, serving
from tests.support.golden import description

SPARSE = OffloadConfig(kv_budget=0.3, min_resident_rows=16)
LIMIT = 256
FOLDERS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def load(folder: Path) -> AsyncLLM:
    mask = description(folder.name).get("mask_id")
    offload = DENSE if folder.name == "diffusion_gemma" else SPARSE
    engine = EngineConfig(max_num_seqs=3, max_model_len=LIMIT)
    return AsyncLLM(
        folder, "cpu", "float32", offload, engine, mask_token_id=mask, seed=0, reserve_tokens=3 * LIMIT
    )


@pytest.fixture(params=FOLDERS)
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    with serving(CONFIG, lambda: load(GOLDEN / request.param)) as running:
        yield running
        running.wait_idle()


def test_a_family(server: Running) -> None:
    config = server.engine.model.config
    prompt = [5 + i % 90 for i in range(40)]
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "seed": 1}
    status, whole = server.post("/v1/completions", body)
    assert status == 200 and whole["usage"]["completion_tokens"] == 24, whole
    status, text = request("POST", f"{server.url}/v1/completions", {**body, "stream": True})
    assert status == 200 and text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    options: dict[str, Any] = {"denoising_steps": 2, "temperature": 0.5, "top_k": 20, "n": 2}
    if config.full_attention:
        options |= {"cache": "dual", "block_length": 16}
    elif not config.noise:
        options |= {"block_length": config.block_length, "confidence_threshold": 0.5}
    status, several = server.post("/v1/completions", {**body, **options})
    assert status == 200 and len(several["choices"]) == 2, several
    status, refused = server.post("/v1/completions", {**body, "max_tokens": LIMIT})
    assert status == 400 and refused["error"]["code"] == "context_length_exceeded"
