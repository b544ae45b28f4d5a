"""The trainer's layout, decoder, checkpoint and export, on a toy model."""

from __future__ import annotations

import json
import random
import shutil
import time
from multiprocessing import Value
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from bench_longctx.tasks import haystack, structured  # noqa: E402
from bench_longctx.tasks.haystack import Haystack  # noqa: E402
from bench_longctx.train_tiny import (  # noqa: E402
    checkpoint,
    data,
    decode,
    evaluate,
    export,
    packing,
    tokenizer,
    train,
)
from bench_longctx.train_tiny.model import TinyConfig, TinySDAR  # noqa: E402
from bench_longctx.train_tiny.optimizer import MuonAdam  # noqa: E402
from bench_longctx.train_tiny.schedule import Schedule  # noqa: E402

TOY = TinyConfig(
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=64,
)
CPU = torch.device("cpu")


@pytest.fixture
def model() -> TinySDAR:
    torch.manual_seed(0)
    model = TinySDAR(TOY)
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.fixture(scope="module")
def row() -> packing.Packed:
    return next(iter(data.Rows(Haystack.load(), 4096, Value("d", 0.2), 0, 1024)))


def plain_logits(model: TinySDAR, tokens: list[int]) -> torch.Tensor:
    block = torch.arange(len(tokens)) // packing.BLOCK
    mask = block[None] <= block[:, None]
    return model.logits(model.hidden(torch.tensor(tokens), torch.arange(len(tokens)), mask))


def test_noisy_blocks_see_what_decoding_sees(model, row):
    p = row.to(CPU)
    packed = model.logits(model.hidden(p.tokens, p.positions, packing.attention_mask(p)))
    noisy = [i for i in range(len(p.number)) if p.query_branch[i] >= 0 and p.key_branch[i] < 0]
    for i in random.Random(0).sample(noisy, 6):
        blocks = [
            j
            for j in range(len(p.number))
            if p.number[j] < p.number[i]
            and (p.key_document[j] == p.query_document[i] or p.key_branch[j] == p.query_branch[i])
        ] + [i]
        assert [int(p.number[j]) for j in blocks] == list(range(len(blocks)))
        tokens = torch.cat([p.tokens[j * 16 : j * 16 + 16] for j in blocks]).tolist()
        torch.testing.assert_close(
            packed[i * 16 : i * 16 + 16], plain_logits(model, tokens)[-16:], atol=1e-4, rtol=1e-4
        )


def test_targets_are_the_answers(row):
    for slot, weight in zip(row.slots, row.weights, strict=True):
        assert (weight > 0) <= (row.tokens[slot] == tokenizer.MASK)
    assert (row.weights > 0).sum() > 100


def test_every_kind_of_question_is_trained():
    lengths = data.STAGES[-1][1]
    rows = data.Rows(Haystack.load(), 16384, Value("d", 0.9), 0, 4096, structured_weight=2.0)
    made = rows._row(random.Random(1), {}, lengths)
    seen = set(made.kinds[made.weights > 0].tolist())
    assert {data.KINDS[i] for i in seen} >= {"json", "pairs", "queries", "end"}
    weights = data.ask_weights(2.0)
    assert weights["json"] == 2 * data.ASK_WEIGHTS["json"] and weights["chain"] == data.ASK_WEIGHTS["chain"]


def test_structured_questions_ask_for_what_the_document_says():
    rng = random.Random(3)
    document = data.training_document(6000, rng, Haystack.load())
    while len(structured.common_facts(document)) < 4:
        document = data.training_document(6000, rng, Haystack.load())
    asked = data.questions(document, 40, dict.fromkeys(data.ASK_WEIGHTS, 0.0) | {"json": 1.0, "pairs": 1.0})
    facts = {f.key: f.value for f in structured.common_facts(document)}
    assert {q.task for q in asked} == {"json", "pairs"}
    for question in asked:
        if question.task == "json":
            assert structured.values_right(question.answer, facts, question.items) == 1
        else:
            assert structured.pairs_right(question.answer, facts, len(question.items)) == 1


def test_tiles_cover_what_is_visible(row):
    p = row.to(CPU)
    seen = packing.visible(p).repeat_interleave(16, 0).repeat_interleave(16, 1)
    mask = packing.block_mask(p)
    at = torch.arange(seen.shape[0])
    assert torch.equal(mask.mask_mod(0, 0, at[:, None], at[None]), seen)
    tiles = seen.view(32, 128, 32, 128).any(3).any(1)
    listed = torch.zeros_like(tiles)
    for q in range(32):
        for count, index in (
            (mask.kv_num_blocks, mask.kv_indices),
            (mask.full_kv_num_blocks, mask.full_kv_indices),
        ):
            listed[q, index[0, 0, q, : count[0, 0, q]].long()] = True
        for k in mask.full_kv_indices[0, 0, q, : mask.full_kv_num_blocks[0, 0, q]].tolist():
            assert seen[q * 128 : q * 128 + 128, k * 128 : k * 128 + 128].all()
    assert torch.equal(tiles, listed)


def test_decoder_matches_full_forwards(model):
    prompts = [tokenizer.encode("The code of a lamp is 4711." * n + "\nAnswer:") for n in (3, 5, 2)]
    outputs, _ = decode.generate(model, prompts, max_new_tokens=40, threshold=0.2, row_tokens=512)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 40 and tokenizer.EOS not in tokens[len(prompt) :]:
            begin = len(tokens)
            tokens += [tokenizer.MASK] * (16 - begin % 16)
            open_positions = set(range(begin, len(tokens)))
            while open_positions:
                confidence, token = plain_logits(model, tokens).softmax(-1).max(-1)
                best = max(open_positions, key=lambda i: (confidence[i].item(), -i))
                chosen = {i for i in open_positions if confidence[i] > 0.2} | {best}
                for i in chosen:
                    tokens[i] = int(token[i])
                open_positions -= chosen
        expected = tokens[len(prompt) : len(prompt) + 40]
        expected = expected[: expected.index(tokenizer.EOS) + 1] if tokenizer.EOS in expected else expected
        assert output == expected


def test_checkpoint_and_export_round_trip(model, tmp_path):
    optimizer = MuonAdam(model, 0.01, 0.01)
    plain_logits(model, list(range(32))).logsumexp(-1).sum().backward()
    optimizer.step(1.0)
    checkpoint.save(tmp_path, model, optimizer, {"step": 1})
    again = checkpoint.load_model(tmp_path)
    other = MuonAdam(again, 0.01, 0.01)
    checkpoint.load_optimizer(tmp_path, other, checkpoint.progress(tmp_path)["step"])
    for m, o in ((model, optimizer), (again, other)):
        plain_logits(m, list(range(32))).logsumexp(-1).sum().backward()
        o.step(1.0)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-2)
    export.write(model, tmp_path / "tiny")
    read = export.read(tmp_path / "tiny")
    for a, b in zip(model.parameters(), read.parameters(), strict=True):
        assert torch.equal(a.bfloat16().float(), b)


def test_tokenizer_files(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer.write(tmp_path)
    loaded = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Caf\u00e9 \U0001f3f0\n\t 42\u3042 \x00 end  "
    assert loaded.encode(text).ids == tokenizer.encode(text)
    assert loaded.decode(tokenizer.encode(text)) == text
    assert loaded.token_to_id("<|mask|>") == tokenizer.MASK


def test_schedules():
    whole, last = Schedule.from_nothing(900), Schedule.continued(480)
    assert whole.curriculum(0.5) == 0.5 and whole.rate(0.3) == 1
    assert last.curriculum(0) == pytest.approx(0.7) and last.curriculum(1) == last.curriculum(2) == 1
    assert data.stage_at(last.curriculum(0)) == len(data.STAGES) - 2
    assert data.stage_at(last.curriculum(0.34)) == len(data.STAGES) - 1
    for schedule in (whole, last):
        rates = [schedule.rate(i / 100) for i in range(101)]
        assert rates[0] < 0.1 * schedule.peak == 0.1 * max(rates) and rates[-1] < 0.03 * schedule.peak


@pytest.fixture
def trained(model, tmp_path, monkeypatch):
    """Runs the trainer on the toy's exported weights; returns its log and its folder."""
    shutil.copy(haystack.HELDOUT, tmp_path / "train.txt.xz")
    export.write(model, tmp_path / "before")
    monkeypatch.setattr(train, "STARTED", time.perf_counter())

    def run(*options: object) -> tuple[list[dict], Path]:
        argv = ["--data", tmp_path, "--out", tmp_path / "out", "--tokens", 2048, "--longest", 512]
        argv += ["--workers", 0, "--log-every", 0, "--stage-lengths", 1024, "--stage-count", 1]
        argv += ["--final-lengths", 1024, "--final-count", 1, *options]
        train.main([str(option) for option in argv])
        log = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in log], tmp_path / "out"

    return run


def test_training_goes_on_from_exported_weights(trained, model, tmp_path):
    log, out = trained("--from", tmp_path / "before", "--seconds", 0.5, "--peak", 1e-6)
    assert log[0]["schedule"] == {"seconds": 0.5, "begin": 0.7, "peak": 1e-6, "structured": 2.0}
    steps = [entry for entry in log if "loss" in entry]
    assert (
        steps
        and steps[0]["stage"] == len(data.STAGES) - 2
        and {"json", "pairs"} < steps[0]["accuracy"].keys()
    )
    scores = json.loads((out / "eval.json").read_text())["final"]["1024"]
    assert scores.keys() >= set(evaluate.TASKS) and scores["json"]["count"] == 1
    after = export.read(out / "tiny")
    for a, b in zip(model.parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(a.bfloat16().float(), b, atol=1e-2, rtol=1e-2)
    assert sorted(f.name for f in (out / "tiny").iterdir()) == sorted(
        f.name for f in (tmp_path / "before").iterdir()
    )


def test_resume_keeps_the_schedule(trained, tmp_path, monkeypatch):
    log, out = trained("--from", tmp_path / "before", "--seconds", 1.5, "--max-seconds-this-run", 8.2)
    assert log[-1]["event"] == "end" and not (out / "tiny").exists()
    monkeypatch.setattr(train, "STARTED", time.perf_counter())
    again, _ = trained("--resume", out)
    first, second = (entry["schedule"] for entry in again if entry.get("event") == "ready")
    assert first == second and second["begin"] == 0.7
    assert (out / "tiny" / "model.safetensors").exists() and again[-1]["step"] > log[-1]["step"]


def test_resume_takes_no_schedule(capsys):
    for options in (["--from", "x"], ["--seconds", "5"], ["--begin", "0.5"]):
        with pytest.raises(SystemExit):
            train.arguments(["--out", "o", "--resume", "r", *options])
        assert "--resume keeps the checkpoint's schedule" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train.arguments(["--out", "o", "--begin", "1.5"])
