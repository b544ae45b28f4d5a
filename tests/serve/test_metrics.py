"""Metrics: vLLM's names, counts that agree with what was answered, a dashboard of names that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.serve.support import Running, chat
from tests.serve.test_clients_that_leave import begin, hang_up, until

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"

NAMES = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "request_success"),
    *("time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("host_kv_bytes", "host_pool_bytes", "rows_selected", "rows_moved", "bytes_moved", "exposed_seconds"),
    *("selection_seconds", "transfer_seconds", "overlap_ratio", "steps_per_block", "tokens_per_forward"),
    *("late_selections", "http_responses"),
}


def samples(server: Running) -> dict[str, float]:
    """Samples by name, summed over labels; buckets by their bound."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics")[1]):
        for sample in family.samples:
            name = sample.name + (f"<={sample.labels['le']}" if "le" in sample.labels else "")
            found[name] = found.get(name, 0.0) + sample.value
    return found


def test_names(server: Running) -> None:
    families = {family.name for family in text_string_to_metric_families(server.get("/metrics")[1])}
    assert {f"herald:{name}" for name in NAMES} <= families


def test_counts_agree_with_answers(server: Running) -> None:
    before = samples(server)
    used = {"prompt_tokens": 0, "completion_tokens": 0}
    for number in range(3):
        status, answer = server.post(
            "/v1/completions", {"prompt": "a" * (500 + number), "max_tokens": 70, "ignore_eos": True}
        )
        assert status == 200
        used = {name: used[name] + answer["usage"][name] for name in used}
    server.post("/v1/completions", chat("wrong"))
    gained = {name: value - before.get(name, 0.0) for name, value in samples(server).items()}
    assert gained["herald:prompt_tokens_total"] == used["prompt_tokens"]
    assert gained["herald:generation_tokens_total"] == used["completion_tokens"] == 210
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert gained[f"herald:{name}_seconds_count"] == 3
    assert gained["herald:request_success_total"] == 3 and gained["herald:http_responses_total"] >= 4
    assert gained["herald:time_per_output_token_seconds_count"] >= 3, "every block after the first"
    assert gained["herald:rows_selected_total"] > 0 and gained["herald:steps_per_block_count"] == 3
    whole = gained["herald:e2e_request_latency_seconds_sum"]
    parts = [gained[f"herald:request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode")]
    assert 0 < sum(parts) <= whole * 1.01
    assert 0 <= samples(server)["herald:overlap_ratio"] <= 1


def test_gauges_follow_the_requests(server: Running) -> None:
    assert samples(server)["herald:num_requests_running"] == 0
    connections = [begin(server, "a" * 50) for _ in range(6)]
    scheduler = server.engine.scheduler
    until(lambda: len(scheduler.running) + len(scheduler.waiting) == 6 and scheduler.running)
    found = samples(server)
    assert found["herald:num_requests_running"] >= 1 and found["herald:num_requests_waiting"] >= 2
    assert found["herald:num_requests_running"] + found["herald:num_requests_waiting"] == 6
    assert 0 < found["herald:kv_cache_usage_perc"] <= 1
    assert 0 < found["herald:host_kv_bytes"] <= found["herald:host_pool_bytes"]
    for connection in connections:
        hang_up(connection)
    server.wait_idle()
    assert samples(server)["herald:kv_cache_usage_perc"] == 0
    aborted = [
        sample
        for family in text_string_to_metric_families(server.get("/metrics")[1])
        for sample in family.samples
        if sample.labels.get("finished_reason") == "abort" and sample.name.endswith("_total")
    ]
    assert sum(sample.value for sample in aborted) >= 6


def test_paths_of_strangers_are_one_label(server: Running) -> None:
    for number in range(5):
        server.get(f"/v1/no-such-path-{number}")
    text = server.get("/metrics")[1]
    assert "no-such-path" not in text and 'path="other"' in text


def test_the_dashboard_asks_for_what_there_is(server: Running) -> None:
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    known = set(re.findall(r"^(herald:\w+)", server.get("/metrics")[1], re.MULTILINE))
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
        for name in re.findall(r"herald:\w+", target["expr"])
    }
    assert asked and asked <= known, asked - known
    assert len(dashboard["panels"]) >= 12
