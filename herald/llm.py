"""`LLM`: the Python interface. Loads a model, takes prompts, gives back texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from herald.config import EngineConfig, OffloadConfig, check
from herald.engine.engine import Engine, ProgressCallback
from herald.engine.request import Phase, Request
from herald.errors import CudaUnavailable, InvalidOption, RequestAborted
from herald.models import load_model, resolve_model
from herald.outputs import CompletionOutput, RequestMetrics, RequestOutput
from herald.sampling_params import SamplingParams
from herald.tokenizer import Tokenizer

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class LLM:
    """A block-diffusion language model with its engine.

    Args:
        model: a local Hugging Face folder, a hub id, or ``"tiny"``, the bundled model.
        device: ``"auto"`` (CUDA where it works), ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        dtype: ``"auto"`` (bfloat16 on CUDA, float32 on a CPU), ``"float32"``, ``"bfloat16"``,
            ``"float16"``.
        offload: where the KV cache lives.
        engine: limits of the engine.
        block_length, mask_token_id: for checkpoints that do not say (0 and None: as the checkpoint says).
        seed: of requests that bring none; None for a random one.

    Raises:
        ModelNotFound, WeightsError, UnknownArchitecture, CudaUnavailable, InvalidOption.

    Use it as a context manager, or call `close`, to give the host pool back.
    """

    def __init__(
        self,
        model: str | Path = "tiny",
        device: str = "auto",
        dtype: str = "auto",
        offload: OffloadConfig | None = None,
        engine: EngineConfig | None = None,
        block_length: int = 0,
        mask_token_id: int | None = None,
        seed: int | None = None,
    ) -> None:
        target = pick_device(device)
        kind = pick_dtype(dtype, target)
        self.path = resolve_model(str(model))
        self.model = load_model(
            self.path, target, kind, block_length=block_length, mask_token_id=mask_token_id
        )
        self.tokenizer = Tokenizer(self.path)
        self.offload = offload or OffloadConfig()
        self.engine_config = engine or EngineConfig()
        self.engine = Engine(self.model, self.tokenizer, self.offload, self.engine_config, seed)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        progress: ProgressCallback | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all in one batch, and return the outputs in their order.

        Args:
            prompts: one text or several; or give ``prompt_token_ids``: one list of ids or several.
            sampling_params: for all prompts, or one for each.
            progress: called with `herald.outputs.Progress` as the work goes on.

        Raises:
            PromptTooLong, InvalidOption: before anything runs.
            HeraldError: the first error of a request; the others are ended.
        """
        requests = self._add(prompts, prompt_token_ids, sampling_params)
        try:
            while any(r.phase is not Phase.FINISHED for r in requests):
                self.engine.step(progress)
                for request in requests:
                    if request.error is not None and not isinstance(request.error, RequestAborted):
                        raise request.error
        finally:
            self._end(requests)
        return [output_of(request) for request in requests]

    def stream(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        progress: ProgressCallback | None = None,
    ) -> Iterator[RequestOutput]:
        """As `generate`, but yields a request's output so far after each of its finished blocks.

        A request's last output has ``finished=True``. Closing the iterator ends its requests.
        """
        requests = self._add(prompts, prompt_token_ids, sampling_params)
        return self._stream(requests, progress)

    def abort(self, request_id: str) -> bool:
        """End a request at the next step; its output so far has ``finish_reason="abort"``.

        May be called from another thread. Returns False for a request that is not (or no longer) known.
        """
        return self.engine.abort(request_id)

    def close(self) -> None:
        """End all requests and give device and host memory back. Idempotent."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, requests: list[Request], progress: ProgressCallback | None) -> Iterator[RequestOutput]:
        ours = set(map(id, requests))
        try:
            while any(r.phase is not Phase.FINISHED for r in requests):
                for request in self.engine.step(progress):
                    if id(request) not in ours:
                        continue
                    if request.error is not None and not isinstance(request.error, RequestAborted):
                        raise request.error
                    yield output_of(request)
        finally:
            self._end(requests)

    def _end(self, requests: list[Request]) -> None:
        """End what is unfinished (an error, an interrupt, a closed iterator)."""
        open_ = [r for r in requests if r.phase is not Phase.FINISHED]
        for request in open_:
            self.engine.abort(request.request_id)
        if open_:
            self.engine.end_aborted()

    def _add(
        self,
        prompts: str | Sequence[str] | None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        if (prompts is None) == (prompt_token_ids is None):
            raise InvalidOption("one of prompts and prompt_token_ids is needed", "pass exactly one of them")
        texts: list[str | None] = []
        if prompts is not None:
            texts = [prompts] if isinstance(prompts, str) else list(prompts)
            ids = [self.tokenizer.encode(text or "") for text in texts]
        else:
            ids = _token_lists(prompt_token_ids or [])
            texts = [None] * len(ids)
        params = _params_for(sampling_params, len(ids))
        added: list[Request] = []
        try:
            for text, tokens, each in zip(texts, ids, params, strict=True):
                added.append(self.engine.add_request(tokens, each, text, f"request-{next(self._ids)}"))
        except Exception:
            self._end(added)
            raise
        return added


def pick_device(device: str) -> torch.device:
    """The torch device for a ``device`` option.

    Raises:
        CudaUnavailable: CUDA was asked for and cannot be used. InvalidOption: an unknown name.
    """
    check(
        device in ("auto", "cpu", "cuda") or (device.startswith("cuda:") and device[5:].isdigit()),
        "device",
        device,
        "use 'auto', 'cpu', 'cuda' or 'cuda:N'",
    )
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise CudaUnavailable(f"device={device!r}, and torch sees no CUDA device", "use device='cpu'")
    index = int(device[5:]) if ":" in device else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise CudaUnavailable(
            f"device={device!r} of {torch.cuda.device_count()} CUDA devices", "use device='cuda:0'"
        )
    return torch.device("cuda", index)


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The torch dtype for a ``dtype`` option.

    Raises:
        InvalidOption: an unknown name, or one the device cannot compute in.
    """
    check(dtype == "auto" or dtype in DTYPES, "dtype", dtype, f"use 'auto', {', '.join(map(repr, DTYPES))}")
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    check(
        device.type != "cpu" or dtype != "float16",
        "dtype",
        dtype,
        "use 'float32' or 'bfloat16' on a CPU",
    )
    return DTYPES[dtype]


def output_of(request: Request) -> RequestOutput:
    """The state of a request as its caller sees it."""
    completion = CompletionOutput(request.text, tuple(request.output_ids), request.finish_reason)
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=tuple(request.prompt_ids),
        outputs=(completion,),
        finished=request.phase is Phase.FINISHED,
        prompt=request.prompt,
        metrics=metrics_of(request),
    )


def metrics_of(request: Request) -> RequestMetrics:
    """Counters and times of a request, as far as it has come."""

    def between(start: float, end: float) -> float:
        return max(end - start, 0.0) if start and end else 0.0

    return RequestMetrics(
        prompt_tokens=len(request.prompt_ids),
        output_tokens=len(request.output_ids),
        queue_seconds=between(request.arrived, request.prefill_started),
        prefill_seconds=between(request.prefill_started, request.prefilled),
        decode_seconds=between(request.prefilled, request.finished_at),
        first_block_seconds=between(request.arrived, request.first_block_done),
        **asdict(request.counters),
    )


def _params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidOption(f"{len(params)} sampling_params for {count} prompts", "pass one, or one for each")
    return list(params)


def _token_lists(ids: Any) -> list[list[int]]:
    """One list of ids, or several, as several."""
    items = list(ids)
    if not items or isinstance(items[0], Sequence):
        return [list(item) for item in items]
    return [[int(item) for item in items]]
