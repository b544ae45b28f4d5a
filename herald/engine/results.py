"""A request as its caller sees it."""

from __future__ import annotations

from dataclasses import asdict

from herald.engine.request import Phase, Request
from herald.outputs import CompletionOutput, RequestMetrics, RequestOutput


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
