"""Model families: configuration, weights and the pieces of a forward."""

from herald.models.base import BlockModel
from herald.models.config import ModelConfig, read_config
from herald.models.loader import load_model, num_parameters
from herald.models.presets import PRESETS
from herald.models.registry import known_architectures
from herald.models.resolve import resolve_model

__all__ = [
    "PRESETS",
    "BlockModel",
    "ModelConfig",
    "known_architectures",
    "load_model",
    "num_parameters",
    "read_config",
    "resolve_model",
]
