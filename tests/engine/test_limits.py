"""A request that is too long is refused with the numbers and options that would allow it, and they do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from herald.config import EngineConfig
from herald.engine.factory import make_engine
from herald.engine.limits import check_page, check_prompt, output_room
from herald.errors import InvalidOption, PromptTooLong
from herald.models import ModelConfig, read_config
from herald.models.rope import RopeScaling
from herald.sampling_params import SamplingParams
from herald.tokenizer import Tokenizer
from tests.engine.conftest import DENSE, GOLDEN
from tests.support.golden import golden_model

PARAMS = SamplingParams(max_tokens=16)


@pytest.fixture
def config() -> ModelConfig:
    return replace(read_config(GOLDEN / "sdar_b8"), max_position_embeddings=4096)


def refusal(length: int, config: ModelConfig, limit: int) -> str:
    with pytest.raises(PromptTooLong) as caught:
        check_prompt([1] * length, PARAMS, 8, config, limit)
    return caught.value.remedy


def test_beyond_the_limit_of_the_engine(config: ModelConfig) -> None:
    remedy = refusal(2048, config, 1024)
    assert remedy == "use at most 1,008 prompt tokens, a smaller max_tokens, or max_model_len=2064"
    check_prompt([1] * 1008, PARAMS, 8, config, 1024)
    check_prompt([1] * 2048, PARAMS, 8, config, 2064)


def test_beyond_the_positions_of_the_model(config: ModelConfig) -> None:
    assert "rope_scaling='yarn:3' (the model was made for 4,096 positions)" in refusal(9000, config, 4096)
    extended = replace(config, rope_scaling=RopeScaling("yarn", 3.0, 4096))
    check_prompt([1] * 9000, PARAMS, 8, extended, extended.max_positions)
    # what extends a model counts from the length it was trained with
    assert "rope_scaling='yarn:5'" in refusal(17_000, extended, extended.max_positions)


def test_beyond_both(config: ModelConfig) -> None:
    assert "max_model_len=9016 and rope_scaling='yarn:3'" in refusal(9000, config, 1024)


def test_the_option_is_taken() -> None:
    config = read_config(GOLDEN / "sdar_b8", rope_scaling="yarn:3")
    assert config.max_positions == 3 * read_config(GOLDEN / "sdar_b8").max_positions
    assert config.rope_scaling is not None and config.rope_scaling.kind == "yarn"


def test_blocks_fit_into_pages() -> None:
    check_page(8, 64)
    with pytest.raises(InvalidOption, match="page_size=72"):
        check_page(24, 64)


@pytest.mark.parametrize("limit", [100, 256, 300])
@pytest.mark.parametrize("folder", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_the_room_for_an_output_is_all_there_is(folder: str, limit: int) -> None:
    """For every family: that many tokens are taken, and one more is refused."""
    model = golden_model(folder, "cpu", torch.float32)
    engine = make_engine(model, Tokenizer(GOLDEN / folder), DENSE, EngineConfig(max_model_len=limit))
    options = [SamplingParams()]
    if model.config.full_attention:
        options += [SamplingParams(cache="dual"), SamplingParams(block_length=24)]
    elif not model.config.noise:
        options += [SamplingParams(block_length=2 * model.config.block_length)]
    for params in options:
        for length in (1, 7, 33, 64, 90):
            room = output_room(model.config, limit, length, params)
            if room < 1:
                continue
            engine.new_request([1] * length, replace(params, max_tokens=room))
            with pytest.raises(PromptTooLong):
                engine.new_request([1] * length, replace(params, max_tokens=room + 1))
    engine.close()


def test_more_positions_than_the_model_has_are_refused() -> None:
    """Not cut to what it has: who asks for more means to use them."""
    model = golden_model("sdar_b8")
    limit = model.config.max_positions
    with pytest.raises(InvalidOption, match=f"max_model_len={limit + 1:,} ") as caught:
        make_engine(
            model, Tokenizer(GOLDEN / "sdar_b8"), DENSE, EngineConfig(max_model_len=limit + 1), seed=0
        )
    assert "yarn:2" in caught.value.remedy
    for wanted in (0, limit):
        engine = make_engine(
            model, Tokenizer(GOLDEN / "sdar_b8"), DENSE, EngineConfig(max_model_len=wanted), seed=0
        )
        assert engine.max_model_len == limit
        engine.close()
