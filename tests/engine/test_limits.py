"""A request that is too long is refused with the numbers and options that would allow it, and they do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from herald.engine.limits import check_page, check_prompt
from herald.errors import InvalidOption, PromptTooLong
from herald.models import ModelConfig, read_config
from herald.models.rope import RopeScaling
from herald.sampling_params import SamplingParams
from tests.engine.conftest import GOLDEN

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
