"""OpenAI's own files of Whisper as transformers' WhisperModel: the same tensors under other names.

Only tensors and plain values are unpickled (`gate.load_tensors`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from headwise.errors import InputError
from headwise.models import gate

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
"""(a part of OpenAI's names, what transformers calls it), in order"""

ENGLISH = 51864
"""Size of the vocabulary of the English models; the others have one more text token before the special ones."""


def load_whisper(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """(WhisperModel, its feature extractor) from a file such as tiny.en.pt."""
    transformers = gate.transformers_library()
    stored = gate.load_tensors(path)
    if not isinstance(stored, dict) or not {"dims", "model_state_dict"} <= stored.keys():
        raise InputError(f"{path} is not a model that OpenAI's whisper saved; it has no dims and model_state_dict")
    sizes = stored["dims"]
    end = 50256 if sizes["n_vocab"] <= ENGLISH else 50257
    config = transformers.WhisperConfig(
        vocab_size=sizes["n_vocab"],
        num_mel_bins=sizes["n_mels"],
        d_model=sizes["n_audio_state"],
        encoder_layers=sizes["n_audio_layer"],
        decoder_layers=sizes["n_text_layer"],
        encoder_attention_heads=sizes["n_audio_head"],
        decoder_attention_heads=sizes["n_text_head"],
        encoder_ffn_dim=4 * sizes["n_audio_state"],
        decoder_ffn_dim=4 * sizes["n_text_state"],
        max_source_positions=sizes["n_audio_ctx"],
        max_target_positions=sizes["n_text_ctx"],
        pad_token_id=end,
        bos_token_id=end + 1,
        eos_token_id=end,
        decoder_start_token_id=end + 1,
    )
    model = transformers.WhisperModel(config)
    with gate.failures(f"{path} does not fit WhisperModel"):
        model.load_state_dict({_renamed(name): x for name, x in stored["model_state_dict"].items()}, strict=True)
    return model.to(dtype), transformers.WhisperFeatureExtractor(feature_size=sizes["n_mels"])


def _renamed(name: str) -> str:
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name
