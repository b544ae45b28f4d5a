"""The largest context that fits, for released shapes and for a model of the user's."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from herald import hardware
from herald.config import OffloadConfig, check
from herald.doctor.device import free_device_memory
from herald.doctor.finding import Finding
from herald.doctor.fit import ContextFit, ModelShape, fit_context
from herald.doctor.plan import describe_plan, plan_batch
from herald.doctor.units import format_bytes
from herald.errors import ModelNotFound

if TYPE_CHECKING:
    from herald.models import ModelConfig

# Left to the rest of the process and of the machine.
HOST_SPARE_BYTES = 1 << 30


def shape_of(name: str, config: ModelConfig, dtype_bytes: int) -> ModelShape:
    """What of a model's configuration decides about memory, in a run with numbers of ``dtype_bytes``."""
    from herald.models import num_parameters

    windowed, window_bytes = config.windowed, 0
    if windowed is not None:
        row = 2 * windowed.head_dim * dtype_bytes
        window_bytes = len(windowed.layers) * windowed.num_kv_heads * windowed.window * row
    return ModelShape(
        name=name,
        num_layers=config.num_full_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        block_length=config.block_length or 1,  # a whole canvas: its rows are sent by pages
        max_positions=config.max_positions,
        weight_bytes=num_parameters(config) * dtype_bytes,
        dtype_bytes=dtype_bytes,
        full_attention=config.full_attention,
        window_bytes=window_bytes,
    )


def config_folder(model: str) -> Path:
    """Folder with the configuration of a model; of a hub model only the configuration is fetched.

    Raises:
        ModelNotFound: there is no such model, or it cannot be reached.
    """
    from herald.models import resolve_model
    from herald.models.resolve import local_path

    if model == "tiny" or local_path(model).exists() or model.count("/") != 1:
        return resolve_model(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["config.json", "generation_config.json"]))
    except Exception as error:  # whatever the network stack raises, the user needs one answer
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelNotFound(
            f"there is no folder {model!r}, and the hub does not give its config.json ({reason[0]})",
            "check the spelling and the connection, or pass a folder",
        ) from error


def config_of(model: str, **overrides: Any) -> ModelConfig:
    """The configuration of a preset, a folder, a hub model or ``"tiny"``.

    Args:
        overrides: ``block_length``, ``mask_token_id`` and ``rope_scaling`` of `herald.models.read_config`.

    Raises:
        ModelNotFound, UsageError, WeightsError: there is none, or it cannot be read.
    """
    from herald.models import PRESETS, read_config
    from herald.models.presets import preset

    return preset(model, **overrides) if model in PRESETS else read_config(config_folder(model), **overrides)


def probe_plan(
    model: str,
    context: int = 0,
    device_memory: int | None = None,
    host_memory: int | None = None,
    offload: OffloadConfig | None = None,
    **overrides: Any,
) -> Finding:
    """What of a model fits at one context length, from its configuration alone.

    Args:
        model: folder, hub id, ``"tiny"`` or a preset's name.
        context: positions of a request, 0 for as many as fit.
        device_memory: bytes of a GPU to plan for; None for the free memory of this one, or of none.
        host_memory: bytes of host memory to plan for; None for this machine's.
        overrides: ``block_length``, ``mask_token_id`` and ``rope_scaling`` of `herald.models.read_config`.

    Raises:
        ModelNotFound, UsageError, WeightsError: the configuration cannot be read.
        PromptTooLong: the model has not as many positions.
    """
    from herald.engine.limits import check_positions

    for name, size in (("gpu_memory", device_memory), ("host_memory", host_memory)):
        remedy = "use a size of 1 MiB or more, such as 24GiB"
        check(size is None or size >= 1 << 20, name, size, remedy)
    check(context >= 0, "context", context, "use the positions of a request, such as 131072")
    config = config_of(model, **overrides)
    check_positions(context, config.max_positions, config)
    if device_memory is None:
        device_memory = free_device_memory()
    if host_memory is None:
        host_memory = max(hardware.memory().free - HOST_SPARE_BYTES, 0)
    shape = shape_of(model, config, 4 if device_memory is None else 2)
    offload = offload or OffloadConfig()
    context = context or fit_context(shape, host_memory, device_memory, offload).tokens or config.block_length
    return describe_plan(plan_batch(shape, context, host_memory, device_memory, offload))


def probe_context(
    model: str | None = None, offload: OffloadConfig | None = None, **overrides: Any
) -> Finding:
    """Largest context of one request for every preset, and first for ``model`` if one is named.

    Args:
        overrides: of ``model``, as for `config_of`.

    Raises:
        ModelNotFound, UsageError, WeightsError: the named model's configuration cannot be read.
    """
    from herald.models import PRESETS, read_config

    offload = offload or OffloadConfig()
    device_memory = free_device_memory()
    # The dtypes that `--dtype auto` takes: bfloat16 on a GPU, float32 on a CPU.
    dtype_bytes = 4 if device_memory is None else 2
    configs = dict(PRESETS)
    with contextlib.suppress(ModelNotFound):  # a checkout without the trained weights
        configs = {"tiny": read_config(config_folder("tiny")), **configs}
    if model is not None:
        configs = {model: config_of(model, **overrides), **{n: c for n, c in configs.items() if n != model}}
    host_memory = max(hardware.memory().free - HOST_SPARE_BYTES, 0)
    fits = [
        fit_context(shape_of(name, config, dtype_bytes), host_memory, device_memory, offload)
        for name, config in configs.items()
    ]
    return Finding(
        "context",
        {
            "kv_budget": offload.kv_budget,
            "index_bits": offload.index_bits,
            "host_memory_bytes": host_memory,
            "device_memory_bytes": device_memory,
            "models": [asdict(fit) for fit in fits],
        },
        tuple(describe(fit) for fit in fits),
        advice_for(fits, offload.index_bits),
    )


def describe(fit: ContextFit) -> str:
    """One line about a model's largest context."""
    if not fit.memory_tokens:
        return f"{fit.model}: does not fit (weights {format_bytes(fit.weight_bytes)})"
    limit = f"limited by {fit.limited_by}"
    if fit.limited_by == "model":
        limit = f"all the model allows; memory holds {fit.memory_tokens:,}"
    return (
        f"{fit.model}: {fit.tokens:,} tokens, {limit} "
        f"({format_bytes(fit.kv_bytes_per_token)} of KV a token; without offload {fit.dense_tokens:,})"
    )


def advice_for(fits: list[ContextFit], index_bits: int = OffloadConfig.index_bits) -> str:
    """What would lengthen the context where memory is what limits it, with an index of so many bits."""
    limits = {fit.limited_by for fit in fits}
    advice = []
    if "host memory" in limits:
        smaller = ", or --index-bits 4," if index_bits == 8 else ""  # exact keys (16 bits) have no index
        advice.append(f"more free host memory{smaller} makes room for longer contexts")
    if "device memory" in limits:
        advice.append("a lower --kv-budget or more free GPU memory makes room for longer contexts")
    return "; ".join(advice)
