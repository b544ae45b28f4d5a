"""The trainer's layout, decoder, checkpoint and export, on a toy model."""

from __future__ import annotations

import random
from multiprocessing import Value

import pytest

torch = pytest.importorskip("torch")

from bench_longctx.tasks.haystack import Haystack  # noqa: E402
from bench_longctx.train_tiny import checkpoint, data, decode, export, packing, tokenizer  # noqa: E402
from bench_longctx.train_tiny.model import TinyConfig, TinySDAR  # noqa: E402
from bench_longctx.train_tiny.optimizer import MuonAdam  # noqa: E402

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
