"""The Python interface on the bundled model: questions about a long document, with the KV cache offloaded."""

from pathlib import Path

from herald import LLM, OffloadConfig, SamplingParams

document = (Path(__file__).parent / "harbour.txt").read_text(encoding="utf-8")
questions = ["What is the secret code of harbour?", "What is the key number of ice house?"]
prompts = [f"{document}\nQuestion: {question}\nAnswer:" for question in questions]

with LLM("tiny", offload=OffloadConfig(kv_budget=0.08)) as llm:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=32))
    for question, output in zip(questions, outputs):
        print(question, "->", output.outputs[0].text.strip())

    # The same, block by block.
    for state in llm.stream(prompts[0], SamplingParams(max_tokens=32)):
        print(repr(state.outputs[0].text), "finished" if state.finished else "")
