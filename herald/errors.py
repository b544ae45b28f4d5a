"""Typed errors. Every message ends with a remedy: what to change, and the value that works."""

from __future__ import annotations


class HeraldError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        problem: what is wrong, with the offending value.
        remedy: what the user can change, with a value that works.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem}; {remedy}" if remedy else problem)


class UsageError(HeraldError, ValueError):
    """The caller passed something that can never work (exit code 2 on the command line).

    Args:
        field: the option or field at fault, where it is one.
    """

    def __init__(self, problem: str, remedy: str = "", field: str | None = None) -> None:
        super().__init__(problem, remedy)
        self.field = field


class InvalidOption(UsageError):
    """An option is out of range or unknown."""


class PromptTooLong(UsageError):
    """Prompt plus requested tokens exceed the model's positions or the configured limit."""


class UnknownArchitecture(UsageError):
    """``config.json`` names an architecture that no registered family reads."""


class ModelNotFound(UsageError):
    """The model is neither a folder, nor bundled, nor in the local hub cache."""


class WeightsError(HeraldError):
    """Weights are missing, truncated, unexpected or of the wrong shape."""


class CudaUnavailable(UsageError):
    """``device="cuda"`` was asked for where CUDA cannot be used."""


class HostPoolTooSmall(HeraldError):
    """The host pool cannot hold the request (or cannot be allocated at all)."""


class ResidentSetTooSmall(HeraldError):
    """Device memory has no room for a request's resident set, or for the key index that it was to hold."""


class NonFiniteLogits(HeraldError):
    """The model produced NaN or infinite logits for a position that was to be decoded."""


class TransferCorrupted(HeraldError):
    """A row arrived on the device with bytes other than those sent (checksum mode)."""


class RetrievalFailed(HeraldError):
    """Prefilling a request, or storing, selecting or moving its rows failed; the cause is chained."""


class StepFailed(HeraldError):
    """A denoising step could not be launched, for want of memory say; the cause is chained."""


class RequestAborted(HeraldError):
    """The request was aborted before it finished."""


class PrefixMismatch(UsageError):
    """A saved prefix belongs to another model, or to options that this engine does not have."""


class PrefixDamaged(HeraldError):
    """A saved prefix is incomplete, or its files are not those that were written."""


class QueueFull(HeraldError):
    """As many requests wait as may.

    Args:
        retry_after: seconds after which a place is likely to be free.
    """

    def __init__(self, problem: str, remedy: str = "", retry_after: int = 1) -> None:
        super().__init__(problem, remedy)
        self.retry_after = retry_after


class EngineStopped(HeraldError):
    """The engine takes no requests, or ended this one: it was closed, or a step failed."""
