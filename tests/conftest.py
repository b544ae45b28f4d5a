"""What every test shares: tests that need a CUDA device are skipped, with the reason, where there is none."""

from __future__ import annotations

import os

import pytest

# Tests never ask the network: the hub client must answer from the local cache or fail at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Matrices of the tests are small: a second OpenMP thread gains nothing, and where other processes want the
# cores its spinning makes a test ten times as long. The engine's own threads are not OpenMP's.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def cuda_problem() -> str:
    """Why tests marked ``gpu`` cannot run here, or an empty string."""
    import torch

    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and (problem := cuda_problem()):
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {problem}"))
