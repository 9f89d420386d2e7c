"""Tiny random models of every kind that `examine` promises to see, with a batch each."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    return BertModel(config), {"input_ids": torch.randint(99, (1, 40))}


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    return GPT2Model(config), {"input_ids": torch.randint(99, (1, 40))}


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaModel(config), {"input_ids": torch.randint(99, (1, 40))}


def albert() -> tuple[nn.Module, dict[str, Tensor]]:
    """One layer of weights, used four times."""
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(
        vocab_size=99,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=48,
        initializer_range=0.2,
    )
    return AlbertModel(config), {"input_ids": torch.randint(99, (1, 40))}


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=24,
        patch_size=4,
    )
    return ViTModel(config), {"pixel_values": torch.randn(1, 3, 24, 24)}


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import T5Config, T5Model

    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ids = torch.randint(99, (1, 40))
    return T5Model(config), {"input_ids": ids, "decoder_input_ids": ids[:, :24]}


def whisper() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(
        vocab_size=99,
        num_mel_bins=16,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=40,
        max_target_positions=24,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    features = torch.randn(1, 16, 80)
    return WhisperModel(config), {"input_features": features, "decoder_input_ids": torch.randint(3, 99, (1, 20))}


def torch_encoder() -> tuple[nn.Module, dict[str, Tensor]]:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fast path's own advice, which an examination switches off anyway
        model = nn.TransformerEncoder(layer, 2)
    return model, {"src": torch.randn(1, 40, 32)}


TRANSFORMERS: dict[str, Callable] = {f.__name__: f for f in (bert, gpt2, llama, albert, vit, t5, whisper)}
ALL: dict[str, Callable] = {**TRANSFORMERS, "torch_encoder": torch_encoder}


def sharpen(model: nn.Module, factor: float = 6.0) -> nn.Module:
    """Random weights give nearly uniform attention; larger query weights give it structure worth measuring."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("query", "q_proj", "c_attn", ".q.", "in_proj")) and weight.dim() == 2:
                weight.mul_(factor)
    return model.eval()
