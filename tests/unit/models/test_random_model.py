"""The random models of the throughput benchmark: any preset, and tokens that meet their experts evenly."""

from __future__ import annotations

import pytest
import torch

from bench_longctx.throughput import synthetic
from bench_longctx.throughput.decode import Run, measure
from herald.config import OffloadConfig
from herald.models import PRESETS, moe
from herald_kernels import route_experts

CPU = torch.device("cpu")
WITH_MASKS = sorted(name for name, config in PRESETS.items() if config.noise is None)
WITH_EXPERTS = sorted(
    name for name in WITH_MASKS if PRESETS[name].moe is not None and not PRESETS[name].full_attention
)


@pytest.mark.parametrize("name", WITH_MASKS)
def test_every_preset_has_a_tiny_model(name: str) -> None:
    model = synthetic.random_model(name, 16, 4096, CPU, tiny=True)
    assert (model.config.family, model.config.block_length) == (PRESETS[name].family, 16)
    assert (model.config.moe is None) == (PRESETS[name].moe is None)
    assert model.dense_logits(torch.arange(40)).isfinite().all()


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_blocks_of_masks_meet_most_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All masked positions embed alike, yet what they attend to sends them to different experts."""
    met: list[torch.Tensor] = []

    def watched(*args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = route_experts(*args, **options)  # type: ignore[arg-type]
        met.append(chosen[0])
        return chosen

    model = synthetic.random_model(name, 16, 4096, CPU, tiny=True)
    monkeypatch.setattr(synthetic.engine_module, "PrefillTask", synthetic.SyntheticPrefill)
    engine = synthetic.make_engine(model, OffloadConfig(kv_budget=0.2), 3, 0.6)
    monkeypatch.setattr(moe, "route_experts", watched)
    measure(engine, Run(512, 3, 4, blocks=1))
    engine.close()
    loads = torch.stack([ids.flatten().bincount(minlength=16).float() / ids.shape[0] for ids in met])
    # 4 of 16 experts a token: a quarter of the tokens each if it were even
    assert (loads > 0).float().mean() > 0.95
    assert loads.amax(1).mean() < 0.75
