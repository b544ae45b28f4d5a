"""What a request is told when its work fails: an error of its own, while the engine goes on."""

from __future__ import annotations

import traceback

import torch

from herald.engine.request import Phase, Request
from herald.errors import HeraldError, RetrievalFailed, StepFailed


def retrieval_error(request: Request, error: Exception) -> HeraldError:
    """The error of a request whose rows could not be made, kept or brought: ``error``, or a typed one.

    Raises:
        Exception: ``error`` itself, where the device is lost: then no request can go on.
    """
    _clear(error)
    if isinstance(error, HeraldError):
        return error
    what = f"no rows could be brought for block {request.block + 1}"
    if request.phase is Phase.WAITING:
        what = "it got no memory"
    elif request.phase is Phase.PREFILL:
        what = "its prompt could not be prefilled"
    remedy = "see the chained error; run with verify_transfers=True to find a damaged row"
    failed = RetrievalFailed(f"request {request.request_id}: {what} ({error})", remedy)
    failed.__cause__ = error
    return failed


def step_error(request: Request, error: Exception) -> HeraldError:
    """The error of a request that took part in a step which could not be launched.

    Raises:
        Exception: as `retrieval_error`.
    """
    _clear(error)
    failed = StepFailed(
        f"request {request.request_id}: a step of block {request.block} could not be launched ({error})",
        "see the chained error; where memory is short, lower max_num_seqs, kv_budget or max_model_len",
    )
    failed.__cause__ = error
    return failed


def _clear(error: Exception) -> None:
    if torch.cuda.is_initialized():
        try:
            torch.cuda.current_stream().query()  # of a device that is lost this raises
        except Exception:
            raise error from None
    # Who keeps the error must not keep the tensors of the functions it came through: one layer's KV, say.
    traceback.clear_frames(error.__traceback__)
