"""A small decoder with rotary positions, windows, padding, a cache and two forms of attention, and ways to break it.

Each bug is one condition below.  They are written after bugs that were found in public code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MistralConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

WIDTH, HEADS = 32, 4


@dataclass
class Memory:
    """The cache: keys and values of each layer."""

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def length(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0


class Block(nn.Module):
    def __init__(self, config: MistralConfig, index: int, bug: str | None) -> None:
        super().__init__()
        self.config, self.index, self.bug = config, index, bug
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attn = nn.ModuleDict(
            {name: nn.Linear(WIDTH, WIDTH) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        )
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor, visible: Tensor, rotate: Any, memory: Memory | None) -> Tensor:
        bug = self.bug
        h = self.norm_1(x)
        q, k, v = (
            self.self_attn[f"{name}_proj"](h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in ("q", "k", "v")
        )
        q, plain = rotate(q), k
        k = rotate(k)
        if memory is not None:
            past = memory.layers.get(self.index)
            stored = plain if bug == "cached keys are not rotated" else k
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
                stored = torch.cat([past[0], stored], 2)
            memory.layers[self.index] = stored, v
        x = x + self.self_attn["o_proj"](self.attend(q, k, v, visible).transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        if bug == "a norm over the sequence":
            h = (h - h.mean(1, keepdim=True)) / h.std(1, keepdim=True).clamp(min=0.1)
        if bug == "a convolution that looks ahead":
            h = self.conv(h.mT).mT
        if bug == "a mean over the batch":
            h = h - h.mean(0, keepdim=True)
        if bug == "dropout in eval":
            h = F.dropout(h, 0.1, training=True)
        return x + self.mlp(h)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        if self.config._attn_implementation == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        scale = q.shape[-1] ** (-1.0 if self.bug == "another scale in eager" else -0.5)
        scores = (q @ k.mT * scale).masked_fill(~visible, torch.finfo(q.dtype).min)
        axis = -2 if self.bug == "a softmax over the wrong axis in eager" else -1
        return scores.softmax(axis) @ v


class SmallDecoder(PreTrainedModel):
    config_class = MistralConfig
    _supports_sdpa = True

    def __init__(self, config: MistralConfig, bug: str | None = None) -> None:
        super().__init__(config)
        self.bug = bug
        self.embed_tokens = nn.Embedding(config.vocab_size, WIDTH)
        self.positions = nn.Embedding(128, WIDTH)
        self.layers = nn.ModuleList(Block(config, i, bug) for i in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.is_absolute = bug in ("position_ids are ignored", "absolute positions")
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Memory | None = None,
        use_cache: bool | None = None,
    ) -> BaseModelOutputWithPast:
        bug = self.bug
        memory = past_key_values if past_key_values is not None else Memory() if use_cache else None
        past = 0 if memory is None else memory.length()
        m, n = input_ids.shape[1], input_ids.shape[1] + past
        shift = -1 if bug == "positions after the cache are off by one" and past else 0
        places = torch.arange(past, n)
        if position_ids is None or bug == "position_ids are ignored":
            position_ids = (places + shift).expand_as(input_ids)
        x = self.embed_tokens(input_ids)
        if self.is_absolute:
            x = x + self.positions(position_ids)
        keys = torch.arange(n)
        queries = torch.arange(m) if bug == "a chunk sees the beginning of the cache only" and m > 1 else places
        visible = keys <= queries[:, None] + (1 if bug == "a mask that is off by one" else 0)
        visible = visible[None, None]
        if attention_mask is not None and bug != "padding is attended to":
            drops = bug == "the padding mask is dropped after the prompt" and past > 0
            visible = visible if drops else visible & attention_mask[:, None, None, :n].bool()
            visible = visible | torch.eye(n, dtype=torch.bool)[past:]  # padding sees itself
        window = self.config.sliding_window
        if window is not None and bug != "a window that is ignored":
            width = window + {"a window one too wide": 1, "a window one too narrow": -1}.get(bug or "", 0)
            visible = visible & (keys > places[:, None] - width)
        rotate = (lambda h: h) if self.is_absolute else (lambda h: rotated(h, position_ids))
        for layer in self.layers:
            x = layer(x, visible, rotate, memory)
        x = self.norm(x)
        if bug == "NaN":
            x = x.masked_fill(x > 2.5, torch.nan)
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=memory if use_cache else None)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of (b, h, n, d)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] / 100 ** (torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def small_decoder(bug: str | None = None, *, window: int | None = None) -> SmallDecoder:
    config = MistralConfig(
        vocab_size=99, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, sliding_window=window
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = SmallDecoder(config, bug).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.0 if "embed" in name or "positions" in name else 0.3)
    return model
