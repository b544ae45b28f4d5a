"""Dense block-diffusion decoding, batched, with a KV cache: SDAR's low_confidence_dynamic, greedy."""

from __future__ import annotations

import torch
from torch import Tensor

from .model import TinySDAR, rope_tables
from .packing import BLOCK, attention_mask, pack_prompts
from .tokenizer import EOS, MASK, PAD


def prefill(
    model: TinySDAR, prompts: list[list[int]], row_tokens: int, spare: int
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the prompts' whole blocks.

    One pair a layer, [prompts, kv_heads, longest + spare, head_dim], in the dtype of the autocast region.
    """
    c, device = model.config, model.model.norm.weight.device
    size = max(len(p) for p in prompts) // BLOCK * BLOCK + spare
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cache = [
        tuple(
            torch.zeros(len(prompts), c.num_key_value_heads, size, c.head_dim, dtype=dtype, device=device)
            for _ in range(2)
        )
        for _ in model.model.layers
    ]
    held_before = 0
    for row, held in pack_prompts(prompts, row_tokens, PAD):
        row = row.to(device)
        rows: list[tuple[Tensor, Tensor]] = []
        model.hidden(row.tokens, row.positions, attention_mask(row), rows)
        for number, (at, length) in enumerate(h[1:] for h in held):
            for kept, new in zip(cache, rows, strict=True):
                for store, part in zip(kept, new, strict=True):
                    store[held_before + number, :, :length] = part[at : at + length].transpose(0, 1)
        held_before += len(held)
    return cache


@torch.no_grad()
def generate(
    model: TinySDAR,
    prompts: list[list[int]],
    max_new_tokens: int = 192,
    threshold: float = 0.9,
    row_tokens: int = 65536,
) -> tuple[list[list[int]], int]:
    """Continue every prompt until a block with an end token is finished, or for `max_new_tokens`.

    Blocks are counted from position 0; the first one written holds the prompt's tail. Each step commits the
    masked positions whose confidence is above `threshold`, at least the best one. Returns the new tokens of
    each prompt and the number of forwards that were run.
    """
    device = model.model.norm.weight.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return _generate(model, prompts, max_new_tokens, threshold, row_tokens, device)


def _generate(
    model: TinySDAR,
    prompts: list[list[int]],
    max_new_tokens: int,
    threshold: float,
    row_tokens: int,
    device: torch.device,
) -> tuple[list[list[int]], int]:
    spare = (max_new_tokens // BLOCK + 2) * BLOCK
    cache = prefill(model, prompts, row_tokens, spare)
    count, rows = len(prompts), cache[0][0].shape[2]
    start = torch.tensor([len(p) // BLOCK * BLOCK for p in prompts], device=device)
    limit = torch.tensor([len(p) + max_new_tokens for p in prompts], device=device)
    buffer = torch.full((count, BLOCK), MASK, device=device)
    for i, p in enumerate(prompts):
        tail = p[len(p) // BLOCK * BLOCK :]
        buffer[i, : len(tail)] = torch.tensor(tail, dtype=torch.long, device=device)
    # The prompt may itself hold the mask's id, so what is still open is kept beside the tokens.
    within = torch.arange(BLOCK, device=device)
    masked = within[None] >= torch.tensor([len(p) % BLOCK for p in prompts], device=device)[:, None]
    begun = masked.clone()
    written = torch.full((count, spare + BLOCK), -1, device=device)
    base = start.clone()
    alive = torch.ones(count, dtype=torch.bool, device=device)
    lanes = torch.arange(count, device=device)
    forwards = 0
    while bool(alive.any()):
        forwards += 1
        position = start[:, None] + within
        x = model.model.embed_tokens(buffer)
        cos, sin = rope_tables(position, model.config)
        visible = torch.arange(rows, device=device)[None] < start[:, None]
        final = alive & ~masked.any(1)
        slot = torch.where(final[:, None], position, rows - BLOCK + within)
        for layer, (keys, values) in zip(model.model.layers, cache, strict=True):
            x, k, v = layer.decode(x, cos, sin, (keys, values), visible)
            # Unfinished lanes write behind the end of every sequence, where nothing is ever visible.
            keys[lanes[:, None], :, slot] = k.transpose(1, 2).to(keys.dtype)
            values[lanes[:, None], :, slot] = v.transpose(1, 2).to(values.dtype)
        confidence, token = model.logits(x).softmax(-1).max(-1)
        confidence = confidence.masked_fill(~masked, -1.0)
        best = torch.zeros_like(masked).scatter_(1, confidence.argmax(1, keepdim=True), True)
        chosen = masked & ((confidence > threshold) | best) & alive[:, None]
        buffer = torch.where(chosen, token, buffer)
        masked = masked & ~chosen
        where = torch.where(final[:, None] & begun, position - base[:, None], spare + within)
        written.scatter_(1, where, buffer)
        ended = ((buffer == EOS) & begun).any(1) | (start + BLOCK >= limit)
        alive = alive & ~(final & ended)
        start = torch.where(final, start + BLOCK, start)
        buffer = torch.where(final[:, None], MASK, buffer)
        masked = masked | (final & alive)[:, None]
        begun = torch.where(final[:, None], True, begun)
    texts = [[t for t in row if t >= 0][:max_new_tokens] for row in written[:, :spare].tolist()]
    return [t[: t.index(EOS) + 1] if EOS in t else t for t in texts], forwards
