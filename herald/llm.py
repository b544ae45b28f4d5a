"""`LLM`: the Python interface. Loads a model, takes prompts, gives back texts."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch

from herald.config import EngineConfig, OffloadConfig, check, is_whole
from herald.engine.engine import ProgressCallback
from herald.engine.factory import make_engine
from herald.engine.request import Phase, Request
from herald.engine.results import output_of
from herald.engine.saved_prefix import (
    LoadedPrefix,
    check_document,
    load_prefix,
    require_sharing,
    save_prefix,
)
from herald.errors import CudaUnavailable, InvalidOption, RequestAborted, UsageError
from herald.kvstore.prefix_file import check_folder
from herald.models import load_model, resolve_model
from herald.outputs import PrefixStats, Progress, RequestOutput
from herald.sampling_params import SamplingParams
from herald.tokenizer import Tokenizer
from herald.transfer.streams import current_device
from herald_kernels import backend

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
        rope_scaling: ``"yarn:4"`` or ``"linear:2"``, to use more positions than the model was made for; empty
            for the checkpoint's.
        seed: of requests that bring none; None for a random one.

    Raises:
        ModelNotFound, WeightsError, UnknownArchitecture, CudaUnavailable, InvalidOption.

    Use it as a context manager, or call `close`, to give the host pool back. Several threads may use it:
    one works at a time, on the requests of all of them.
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
        rope_scaling: str = "",
    ) -> None:
        target = pick_device(device)
        kind = pick_dtype(dtype, target)
        self.offload = _options(OffloadConfig, "offload", offload)
        self.engine_config = _options(EngineConfig, "engine", engine)
        check(
            seed is None or (is_whole(seed) and seed >= 0), "seed", seed, "use 0 or more, or None to draw one"
        )
        _check_environment(self.offload, target)
        self.path = resolve_model(str(model))
        with current_device(target):
            self.model = load_model(self.path, target, kind, block_length, mask_token_id, rope_scaling)
            self.tokenizer = Tokenizer(self.path)
            self.engine = make_engine(self.model, self.tokenizer, self.offload, self.engine_config, seed)
        self._ids = itertools.count()
        self._lock = threading.Lock()  # of the engine, all but `abort`
        self._holder: int | None = None  # thread that has it
        self._closed = False

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
            UsageError: the model is closed, or this is a progress callback.
        """
        requests = self._add(prompts, prompt_token_ids, sampling_params, progress)
        ours = _only(requests, progress)
        try:
            while any(r.phase is not Phase.FINISHED for r in requests):
                with self._exclusive():
                    self.engine.step(ours)
                for request in requests:
                    _raise_error(request)
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

        A request's last output has ``finished=True``. Closing or dropping the iterator ends its requests.
        Other calls may run between two outputs; blocks finished meanwhile come as one.
        """
        requests = self._add(prompts, prompt_token_ids, sampling_params, progress)
        outputs = self._stream(requests, _only(requests, progress))
        next(outputs)  # into its try block, so that an iterator nobody ever asks ends its requests too
        return outputs

    def abort(self, request_id: str) -> bool:
        """End a request at the next step; its output so far has ``finish_reason="abort"``.

        May be called from another thread. Returns False for a request that is not (or no longer) known.
        """
        return self.engine.abort(request_id)

    def save_prefix(self, prompt: str | Sequence[int], folder: str | Path, *, chat: bool = False) -> int:
        """Write a document's KV and key index to a folder, for `load_prefix` in any process with this model.

        Args:
            prompt: the document, as text or token ids; it is prefilled unless its pages are in the pool.
            folder: that does not exist yet, or is empty.
            chat: put the text into the model's chat template first.

        Returns:
            Bytes written.

        Raises:
            InvalidOption: nothing is shared here, or the document is shorter than a page.
            PromptTooLong, HostPoolTooSmall: it does not fit. UsageError: the folder is taken.
        """
        require_sharing(self.engine)
        text = prompt if isinstance(prompt, str) else None
        if text is not None and chat:
            tokens = list(self.tokenizer.chat([{"role": "user", "content": text}]))
        else:
            tokens = self.tokenizer.encode(text) if text is not None else _ids(_items("prompt", prompt))
        check_document(self.engine, tokens)
        target = Path(folder)
        check_folder(target)
        self.generate(prompt_token_ids=[tokens], sampling_params=SamplingParams(max_tokens=1, seed=0))
        with self._exclusive():
            return save_prefix(self.engine, tokens, target, {"text": text, "chat": chat})

    def load_prefix(self, folder: str | Path) -> LoadedPrefix:
        """Read a saved document into the host pool. Prompts that begin with it skip its prefill.

        Its pages stay until the handle's `LoadedPrefix.release`.

        Raises:
            UsageError: there is none in the folder. PrefixMismatch: it was saved with another model, block
                length or page size. PrefixDamaged: a file is not what was written.
            HostPoolTooSmall: the pool has no room. InvalidOption: nothing is shared here.
        """
        require_sharing(self.engine)
        with self._exclusive():
            self._check_open()
            return load_prefix(self.engine, Path(folder))

    @property
    def prefix_stats(self) -> PrefixStats:
        """What prefix sharing did so far, and what the pool holds of it."""
        return self.engine.prefixes.stats

    def close(self) -> None:
        """End all requests and give device and host memory back. Idempotent; the model is of no use after.

        Raises:
            UsageError: this is a progress callback.
        """
        with self._exclusive():
            self._closed = True
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the model is closed", "make a new LLM")

    def _stream(self, requests: list[Request], progress: ProgressCallback | None) -> Iterator[RequestOutput]:
        shown = {id(request): 0 for request in requests}  # blocks in the last output
        open_ = requests
        try:
            yield cast(RequestOutput, None)  # for `stream`
            while open_:
                with self._exclusive():
                    # Someone else's step may have brought them on.
                    if not any(_has_news(r, shown[id(r)]) for r in open_):
                        self.engine.step(progress)
                    news = [r for r in open_ if _has_news(r, shown[id(r)])]
                    outputs = [output_of(r) for r in news]
                shown |= {id(r): o.metrics.blocks for r, o in zip(news, outputs, strict=True)}
                done = {o.request_id for o in outputs if o.finished}
                open_ = [r for r in open_ if r.request_id not in done]
                for request, output in zip(news, outputs, strict=True):
                    _raise_error(request)
                    yield output
        finally:
            self._end(requests)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Keep other threads out of the engine, and refuse a thread that is in it already."""
        if self._holder == threading.get_ident():
            raise UsageError(
                "a progress callback cannot use its model", "only abort may be called there: call it later"
            )
        with self._lock:
            self._holder = threading.get_ident()
            try:
                yield
            finally:
                self._holder = None

    def _end(self, requests: list[Request]) -> None:
        """End what is unfinished (an error, an interrupt, a closed iterator)."""
        open_ = [r for r in requests if r.phase is not Phase.FINISHED]
        for request in open_:
            self.engine.abort(request.request_id)
        # An iterator may be dropped in a progress callback; the next step ends its requests.
        if open_ and self._holder != threading.get_ident():
            with self._exclusive():
                self.engine.end_aborted()

    def _add(
        self,
        prompts: str | Sequence[str] | None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: ProgressCallback | None,
    ) -> list[Request]:
        if (prompts is None) == (prompt_token_ids is None):
            raise InvalidOption("one of prompts and prompt_token_ids is needed", "pass exactly one of them")
        check(progress is None or callable(progress), "progress", progress, "pass a function, or None")
        texts: list[str | None] = []
        if prompts is not None:
            texts = [prompts] if isinstance(prompts, str) else _items("prompts", prompts)
            ids = [self.tokenizer.encode(cast(str, text)) for text in texts]
        else:
            ids = _token_lists(prompt_token_ids)
            texts = [None] * len(ids)
        params = _params_for(sampling_params, len(ids))
        added: list[Request] = []
        try:
            with self._exclusive():
                self._check_open()
                for text, tokens, each in zip(texts, ids, params, strict=True):
                    added.append(self.engine.add_request(tokens, each, text, f"request-{next(self._ids)}"))
        except BaseException:
            self._end(added)
            raise
        return added


def _options(kind: type[Any], name: str, value: Any) -> Any:
    """``value``, or the defaults for None."""
    check(value is None or isinstance(value, kind), name, value, f"pass a herald.{kind.__name__}, or None")
    return kind() if value is None else value


def _check_environment(offload: OffloadConfig, device: torch.device) -> None:
    """Refuse at once what would fail once a request is long enough to need it."""
    check(
        device.type == "cuda" or offload.transfer == "auto" or not offload.enabled,
        "transfer",
        offload.transfer,
        f"use 'auto' on device={device.type!r}",
    )
    try:
        backend("commit", device.type)
    except (ValueError, RuntimeError) as error:
        raise InvalidOption(str(error), "unset HERALD_KERNELS") from error


def _only(requests: list[Request], progress: ProgressCallback | None) -> ProgressCallback | None:
    """``progress`` for these requests, whatever else runs beside them."""
    if progress is None:
        return None
    ours = {request.request_id for request in requests}

    def report(event: Progress) -> None:
        if event.request_id in ours:
            progress(event)

    return report


def _raise_error(request: Request) -> None:
    if request.error is not None and not isinstance(request.error, RequestAborted):
        raise request.error


def _has_news(request: Request, blocks_shown: int) -> bool:
    return request.phase is Phase.FINISHED or request.counters.blocks > blocks_shown


def pick_device(device: str | torch.device) -> torch.device:
    """The torch device for a ``device`` option.

    Raises:
        CudaUnavailable: CUDA was asked for and cannot be used. InvalidOption: an unknown name.
    """
    device = str(device)
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
    known = isinstance(dtype, str) and (dtype == "auto" or dtype in DTYPES)
    check(known, "dtype", dtype, f"use 'auto', {', '.join(map(repr, DTYPES))}")
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    check(
        device.type != "cpu" or dtype != "float16",
        "dtype",
        dtype,
        "use 'float32' or 'bfloat16' on a CPU",
    )
    return DTYPES[dtype]


def _params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    many = _items("sampling_params", params)
    for each in many:
        check(isinstance(each, SamplingParams), "sampling_params", each, "pass herald.SamplingParams")
    if len(many) != count:
        raise InvalidOption(f"{len(many)} sampling_params for {count} prompts", "pass one, or one for each")
    return many


def _token_lists(ids: Any) -> list[list[int]]:
    """One sequence of ids, or several, as several lists. Arrays and tensors are sequences too."""
    items = _items("prompt_token_ids", ids)
    if items and all(map(is_whole, items)):
        return [[int(item) for item in items]]
    return [_ids(_items("prompt_token_ids", item)) for item in items]


def _ids(items: list[Any]) -> list[int]:
    for item in items:
        check(is_whole(item), "prompt_token_ids", item, "pass whole numbers: one list of them, or several")
    return [int(item) for item in items]


def _items(name: str, values: Any) -> list[Any]:
    """The elements of an iterable that is neither text nor a mapping; arrays and tensors as Python's own."""
    values = _plain(values)
    listed = isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping))
    check(listed, name, values, "pass a list, see herald.LLM.generate")
    return [_plain(value) for value in values]


def _plain(value: Any) -> Any:
    """An array or a tensor as lists and numbers, anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
