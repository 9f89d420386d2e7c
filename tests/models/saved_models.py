"""Tiny random models that see and hear, saved as their users find them: a directory with weights and a processor."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SIZE = {"height": 32, "width": 32}
LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
PATCHES = {**LAYERS, "image_size": 32, "patch_size": 8}
TEXT = {**LAYERS, "vocab_size": 50, "max_position_embeddings": 24, "bos_token_id": 1, "eos_token_id": 3}
CONVOLUTIONS = {
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 8, 8),
    "conv_kernel": (10, 8, 8),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


def tokenizer() -> Any:
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase, *string.digits]
    return BertTokenizer(vocab={word: i for i, word in enumerate(words)})


def whole_images() -> Any:
    from transformers import ViTImageProcessorPil

    return ViTImageProcessorPil(size=SIZE)


def cropped_images() -> Any:
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=SIZE)


def vit() -> list[Any]:
    from transformers import ViTConfig, ViTModel

    return [ViTModel(ViTConfig(**PATCHES)), whole_images()]


def deit() -> list[Any]:
    from transformers import DeiTConfig, DeiTModel

    return [DeiTModel(DeiTConfig(**PATCHES)), whole_images()]


def beit() -> list[Any]:
    from transformers import BeitConfig, BeitModel

    return [BeitModel(BeitConfig(**PATCHES)), whole_images()]


def dinov2_with_registers() -> list[Any]:
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    return [Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**PATCHES)), whole_images()]


def dinov2() -> list[Any]:
    from transformers import Dinov2Config, Dinov2Model

    return [Dinov2Model(Dinov2Config(**PATCHES)), whole_images()]


def swin() -> list[Any]:
    from transformers import SwinConfig, SwinModel

    config = SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4)
    return [SwinModel(config), whole_images()]


def clip() -> list[Any]:
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(text_config=TEXT, vision_config=PATCHES, projection_dim=16)
    return [CLIPModel(config), cropped_images(), tokenizer()]


def siglip() -> list[Any]:
    from transformers import SiglipConfig, SiglipModel

    return [SiglipModel(SiglipConfig(text_config=TEXT, vision_config=PATCHES)), whole_images(), tokenizer()]


def vilt() -> list[Any]:
    from transformers import ViltConfig, ViltImageProcessorPil, ViltModel, ViltProcessor

    processor = ViltProcessor(ViltImageProcessorPil(size={"shortest_edge": 32}), tokenizer())
    return [ViltModel(ViltConfig(**PATCHES, vocab_size=50, max_position_embeddings=24)), processor]


def trocr() -> list[Any]:
    from transformers import TrOCRConfig, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    decoder = TrOCRConfig(
        vocab_size=50,
        d_model=32,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=32,
        max_position_embeddings=40,
        cross_attention_hidden_size=32,
    )
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**PATCHES), decoder)
    config.decoder_start_token_id = 2
    return [VisionEncoderDecoderModel(config), whole_images()]


def sew() -> list[Any]:
    from transformers import SEWConfig, SEWModel, Wav2Vec2FeatureExtractor

    return [SEWModel(SEWConfig(**LAYERS, **CONVOLUTIONS, squeeze_factor=2)), Wav2Vec2FeatureExtractor()]


def whisper() -> list[Any]:
    from transformers import WhisperFeatureExtractor, WhisperModel

    from tests.models.tiny_models import whisper

    config = whisper()[0].config
    config.num_mel_bins, config.max_source_positions = 80, 50  # one second
    return [WhisperModel(config), WhisperFeatureExtractor(feature_size=80, chunk_length=1)]


def wav2vec2() -> list[Any]:
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2Model

    return [Wav2Vec2Model(Wav2Vec2Config(**LAYERS, **CONVOLUTIONS)), Wav2Vec2FeatureExtractor()]


def hubert() -> list[Any]:
    from transformers import HubertConfig, HubertModel, Wav2Vec2FeatureExtractor

    return [HubertModel(HubertConfig(**LAYERS, **CONVOLUTIONS)), Wav2Vec2FeatureExtractor()]


def ast() -> list[Any]:
    from transformers import ASTConfig, ASTFeatureExtractor, ASTModel

    config = ASTConfig(**LAYERS, max_length=64, num_mel_bins=32)
    return [ASTModel(config), ASTFeatureExtractor(max_length=64, num_mel_bins=32)]


SAVED: dict[str, Callable[[], list[Any]]] = {
    f.__name__: f
    for f in (
        *(vit, deit, beit, dinov2, dinov2_with_registers, swin, clip, siglip, vilt, trocr),
        *(whisper, wav2vec2, hubert, sew, ast),
    )
}


def save(name: str, directory: Path) -> Path:
    """The path of the saved model."""
    torch.manual_seed(0)
    for part in SAVED[name]():
        part.save_pretrained(directory / name)
    return directory / name


def save_images(directory: Path, count: int = 2) -> Path:
    """Photographs if scikit-image is installed, otherwise colour gradients."""
    import numpy
    from PIL import Image

    directory.mkdir()
    grid = numpy.mgrid[0:48, 0:64]
    for index in range(count):
        try:
            from skimage import data

            pixels = (data.astronaut, data.chelsea)[index % 2]()[:160, :160]
        except ImportError:
            pixels = numpy.stack([grid[0] * 5, grid[1] * 4, grid.sum(0) * (index + 1)], -1).astype("uint8")
        Image.fromarray(pixels).save(directory / f"{index}.png")
    return directory


def save_sound(path: Path, seconds: float = 1.0, rate: int = 16000) -> Path:
    import soundfile

    t = torch.arange(int(seconds * rate)) / rate
    soundfile.write(path, (0.1 * torch.sin(2 * torch.pi * (200 + 100 * t) * t)).numpy(), rate)
    return path
