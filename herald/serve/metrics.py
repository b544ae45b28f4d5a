"""Metrics for Prometheus: vLLM's names and buckets under ``herald:``, and those of offloading."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from herald.async_llm import AsyncLLM
from herald.engine.request import Request
from herald.engine.results import metrics_of
from herald.outputs import RequestMetrics

FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
# vLLM's begin at 0.01; tokens of a block come together, so their mean times are shorter.
PER_TOKEN = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEPS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 20.0, 24.0, 32.0, 48.0, 64.0)
FORWARD_TOKENS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)

# Counters that grow while a request runs: field of `RequestMetrics`, name, description.
GROWING = (
    ("rows_selected", "rows_selected", "Rows chosen, over blocks, layers and KV heads."),
    ("rows_moved", "rows_moved", "Rows that crossed from host to device."),
    ("bytes_moved", "bytes_moved", "Bytes that crossed from host to device."),
    ("exposed_seconds", "exposed_seconds", "Time in which requests waited for rows."),
    ("selection_seconds", "selection_seconds", "Time of selections, hidden or not."),
    ("transfer_seconds", "transfer_seconds", "Time of rows on their way, hidden or not."),
    ("late_selections", "late_selections", "Selections that were not there when their block began."),
)


@dataclass
class _Seen:
    """What of a request was counted already, and when its last block came."""

    at: float
    metrics: RequestMetrics


class ServerMetrics(Collector):
    """Watches an engine (`herald.engine.async_engine.EngineObserver`) and its requests.

    Args:
        model: the label ``model_name``.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._llm: AsyncLLM | None = None
        self._seen: dict[str, _Seen] = {}
        self._exposed = self._busy = 0.0
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens prefilled.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens of finished blocks.")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up among pages.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens whose KV was there.")
        self.first_token = self._histogram("time_to_first_token", "To the first finished block.", FIRST_TOKEN)
        self.per_token = self._histogram(
            "time_per_output_token", "Between two finished blocks, by tokens of the second.", PER_TOKEN
        )
        self.latency = self._histogram("e2e_request_latency", "From arrival to the end.", LATENCY)
        self.queue = self._histogram("request_queue_time", "From arrival to prefill.", LATENCY)
        self.prefill = self._histogram("request_prefill_time", "Of prefill.", LATENCY)
        self.decode = self._histogram("request_decode_time", "From prefill to the end.", LATENCY)
        self.steps_per_block = self._histogram("steps_per_block", "Of a request.", STEPS, unit="")
        self.tokens_per_forward = self._histogram(
            "tokens_per_forward", "Output tokens of a request over its forwards.", FORWARD_TOKENS, unit=""
        )
        self._growing = {field: self._counter(name, about) for field, name, about in GROWING}
        self._ended = Counter(
            "herald:request_success",
            "Requests that ended.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._responses = Counter(
            "herald:http_responses", "Responses of the interface.", ["path", "status"], registry=self.registry
        )
        self.registry.register(self)

    def watch(self, llm: AsyncLLM) -> None:
        """Begin to watch a model."""
        self._llm = llm
        llm.async_engine.observers.append(self)

    def responded(self, path: str, status: int) -> None:
        """A response left; status 0 for a client that went away before it."""
        known = path if path in KNOWN_PATHS else "other"
        self._responses.labels(known, str(status or "gone")).inc()

    def progressed(self, request: Request, new_tokens: int) -> None:
        metrics = metrics_of(request)
        now = time.perf_counter()
        seen = self._seen.get(request.request_id)
        if seen is None and new_tokens:
            self.prompt_tokens.inc(metrics.prompt_tokens)
            self.first_token.observe(metrics.first_block_seconds)
            self.prefix_hits.inc(metrics.cached_tokens)
            self.prefix_queries.inc(metrics.prompt_tokens)
        elif seen is not None and new_tokens:
            self.per_token.observe(max(now - seen.at, 0.0) / new_tokens)
        self.generation_tokens.inc(new_tokens)
        self._grow(metrics, seen)
        self._seen[request.request_id] = _Seen(now, metrics)

    def ended(self, request: Request) -> None:
        metrics = metrics_of(request)
        self._grow(metrics, self._seen.pop(request.request_id, None))
        failed = request.error is not None and not request.abort_requested
        self._ended.labels(self._model, "error" if failed else str(request.finish_reason)).inc()
        self.latency.observe(request.finished_at - request.arrived)
        self.queue.observe(metrics.queue_seconds)
        if metrics.blocks:
            self.prefill.observe(metrics.prefill_seconds)
            self.decode.observe(metrics.decode_seconds)
            self.steps_per_block.observe(metrics.steps_per_block)
            self.tokens_per_forward.observe(metrics.output_tokens / max(metrics.forwards, 1))

    def collect(self) -> Iterator[Metric]:
        """Gauges, read when they are asked for."""
        gauges: dict[str, tuple[str, float]] = {
            "overlap_ratio": (
                "Share of selection and transfer time in which no request waited for its rows.",
                max(1.0 - self._exposed / self._busy, 0.0) if self._busy else 1.0,
            )
        }
        if self._llm is not None:
            stats = self._llm.stats()
            gauges |= {
                "num_requests_running": ("Requests that prefill or decode.", stats.num_running),
                "num_requests_waiting": ("Requests that queue.", stats.num_waiting),
                "kv_cache_usage_perc": ("KV pages in use; 1 is all.", stats.kv_usage),
                "host_kv_bytes": ("Bytes of KV pages in use.", stats.host_kv_bytes),
                "host_pool_bytes": ("Bytes of the host pool.", stats.host_pool_bytes),
            }
        for name, (about, value) in gauges.items():
            family = GaugeMetricFamily(f"herald:{name}", about, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family

    def _grow(self, metrics: RequestMetrics, seen: _Seen | None) -> None:
        """Add what a request's counters gained."""
        for field, counter in self._growing.items():
            before = 0 if seen is None else getattr(seen.metrics, field)
            gained = max(getattr(metrics, field) - before, 0)
            counter.inc(gained)
            if field == "exposed_seconds":
                self._exposed += gained
            elif field in ("selection_seconds", "transfer_seconds"):
                self._busy += gained

    def _counter(self, name: str, about: str) -> Counter:
        counter = Counter(f"herald:{name}", about, ["model_name"], registry=self.registry)
        return counter.labels(self._model)

    def _histogram(
        self, name: str, about: str, buckets: tuple[float, ...], unit: str = "_seconds"
    ) -> Histogram:
        about = f"Seconds: {about}" if unit else about
        histogram = Histogram(
            f"herald:{name}{unit}", about, ["model_name"], buckets=buckets, registry=self.registry
        )
        return histogram.labels(self._model)


KNOWN_PATHS = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize"))
