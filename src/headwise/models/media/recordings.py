"""Batches of recordings: prepared by the model's own feature extractor, with the time of each frame as its name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError, needs_extra
from headwise.models import gate
from headwise.models.gate import one_line
from headwise.models.inputs import FRAME_WORDS, Inputs, check_takes, known_arguments, preprocessor, with_decoder
from headwise.models.load import LoadedModel


def audio_input(loaded: LoadedModel, files: Sequence[Path], *, limit: int) -> Inputs:
    """The first `limit` recordings, prepared by the model's own feature extractor.

    Recordings in one batch are of one length, so a padding mask is left out: there is one recording in each.
    """
    check_takes(loaded, "recordings")
    extractor = preprocessor(loaded, "AutoFeatureExtractor", "feature extractor")
    rate = getattr(extractor, "sampling_rate", 16000)
    batches = []
    for path in files[:limit]:
        samples = read_audio(path, rate).numpy()
        with gate.failures(f"{path} cannot be prepared for {loaded.name}"):
            features = known_arguments(loaded.model, extractor(samples, sampling_rate=rate, return_tensors="pt"))
        features.pop("attention_mask", None)
        batches.append(with_decoder(loaded.model, features))
    return Inputs(
        batches,
        lambda batch: [frame_names(loaded.model, extractor, x) for x in _main(batch)],
        {"kind": "audio", "source": [Path(p).name for p in files[:limit]], "words": FRAME_WORDS},
    )


def _main(batch: dict[str, Tensor]) -> Tensor:
    return batch["input_values"] if "input_values" in batch else batch["input_features"]


def frame_names(model: nn.Module, extractor: Any, features: Tensor) -> list[str]:
    """The second at which each position of the encoder's sequence begins, such as "0.02 s"; empty if not known.

    features  samples (length,), or a spectrogram (bands, columns) of the extractor's hop length
    """
    config = getattr(model, "config", None)
    rate, strides = getattr(extractor, "sampling_rate", 16000), getattr(config, "conv_stride", None)
    if isinstance(strides, (list, tuple)) and features.dim() == 1:  # wav2vec 2.0 and its family
        kernels, frames = getattr(config, "conv_kernel", strides), features.shape[-1]
        for kernel, stride in zip(kernels, strides, strict=True):
            frames = (frames - kernel) // stride + 1
        squeezed = getattr(config, "squeeze_factor", 1)
        frames, step = frames // squeezed, math.prod(strides) * squeezed / rate
    elif isinstance(getattr(config, "max_source_positions", None), int) and hasattr(extractor, "hop_length"):  # Whisper
        frames = config.max_source_positions  # pyright: ignore[reportOptionalMemberAccess]
        step = features.shape[-1] / frames * extractor.hop_length / rate
    else:
        return []
    return [f"{i * step:.2f} s" for i in range(frames)]


def read_audio(path: Path, rate: int) -> Tensor:
    """A recording as one channel at `rate` samples per second, linearly interpolated if recorded at another rate."""
    with needs_extra("models", "reading recordings"):
        import soundfile
    try:
        samples, recorded_rate = soundfile.read(str(path), dtype="float32", always_2d=True)
    except (OSError, RuntimeError) as error:
        raise InputError(f"{path} cannot be read as a recording ({one_line(error)})") from error
    mono = torch.from_numpy(samples).mean(-1)
    if len(mono) < recorded_rate // 10:
        raise InputError(f"{path} lasts {len(mono) / recorded_rate:.2f} s; attention needs at least 0.1 s of sound")
    if recorded_rate == rate:
        return mono
    size = round(len(mono) * rate / recorded_rate)
    return torch.nn.functional.interpolate(mono[None, None], size=size, mode="linear")[0, 0]
