"""HERALD: block-diffusion language models on long prompts, with the KV cache in host memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from herald.config import EngineConfig, OffloadConfig
from herald.sampling_params import SamplingParams

if TYPE_CHECKING:
    from herald.async_llm import AsyncLLM
    from herald.engine.saved_prefix import LoadedPrefix
    from herald.llm import LLM
    from herald.outputs import CompletionOutput, PrefixStats, Progress, RequestMetrics, RequestOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "LoadedPrefix",
    "OffloadConfig",
    "PrefixStats",
    "Progress",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_LAZY = {
    "AsyncLLM": "herald.async_llm",
    "LLM": "herald.llm",
    "CompletionOutput": "herald.outputs",
    "LoadedPrefix": "herald.engine.saved_prefix",
    "PrefixStats": "herald.outputs",
    "Progress": "herald.outputs",
    "RequestMetrics": "herald.outputs",
    "RequestOutput": "herald.outputs",
}


def __getattr__(name: str) -> Any:
    """Load `LLM` or `AsyncLLM` (and torch with it) only when it is asked for."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'herald' has no attribute {name!r}")
