"""End to end on the bundled model: the demo's document, its questions, default options."""

from __future__ import annotations

from pathlib import Path

import pytest

from herald import LLM, EngineConfig, OffloadConfig, RequestOutput, SamplingParams

DOCUMENT = Path(__file__).parents[2] / "examples" / "harbour.txt"
ANSWERS = {
    "What are the phone number of Elsa Brandt and the order number of new crane?": "552091, 946031",
    'Quote the sentence that begins with "Six steps had worn".': (
        "Six steps had worn so hollow that the keeper carried his lamp oil up "
        "in two journeys rather than one."
    ),
}


def ask(offload: OffloadConfig) -> list[RequestOutput]:
    text = DOCUMENT.read_text(encoding="utf-8")
    prompts = [f"{text}\nQuestion: {question}\nAnswer:" for question in ANSWERS]
    with LLM("tiny", device="cpu", offload=offload, engine=EngineConfig(max_num_seqs=2)) as llm:
        return llm.generate(prompts, SamplingParams(max_tokens=160, stop="\n"))


@pytest.mark.timeout(600)
def test_default_budget_answers_as_full_kv_does() -> None:
    """More than 8K tokens, answers of several blocks, each block's rows brought from the host pool."""
    full = ask(OffloadConfig(enabled=False))
    sparse = ask(OffloadConfig())
    assert [o.outputs[0].text.strip() for o in full] == list(ANSWERS.values())
    assert [o.outputs[0].text for o in sparse] == [o.outputs[0].text for o in full]
    for output in sparse:
        assert output.finish_reason == "stop"
        assert output.metrics.prompt_tokens > 8192
        assert output.metrics.rows_moved > 0
        resident = output.metrics.resident_bytes / output.metrics.host_kv_bytes
        assert resident < 0.2, "slots and staging of an 8% budget"
