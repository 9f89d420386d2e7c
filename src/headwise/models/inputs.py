"""Texts, pictures and recordings as the batches a model takes, with a name for every position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.models.load import Loaded, one_line, quietly, transformers_library

TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)


@dataclass(frozen=True, eq=False)
class Input:
    """Batches, what to show for each position, and where they came from."""

    batches: Sequence[dict[str, Tensor]]
    tokens: Callable[[Any], list[list[str]]] | None
    described: dict[str, Any]


def text_input(
    loaded: Loaded, files: Sequence[Path] | None, *, length: int | None, texts: int, batch: int = 1
) -> Input:
    """Texts of `length` tokens each, special ones included, cut in order from the files (default: the shipped one)."""
    transformers = transformers_library()
    paths = list(files) if files else [Path(__file__).parent / "data" / "moby-dick.txt"]
    content = "\n\n".join(_read(path) for path in paths)
    if not content.strip():
        raise InputError(f"{', '.join(map(str, paths))}: empty; give a text with at least a few sentences")
    options = {} if loaded.gguf is None else {"gguf_file": loaded.gguf}
    # without its files the library would build an empty tokenizer and call every word unknown
    local = isinstance(loaded.source, Path) and loaded.gguf is None
    if local and not any((Path(loaded.source) / name).exists() for name in TOKENIZER_FILES):
        raise InputError(f"{loaded.source} has no tokenizer (such as tokenizer.json); use --tokens N for random tokens")
    try:
        tokenizer = quietly(
            lambda: transformers.AutoTokenizer.from_pretrained(
                str(loaded.source), trust_remote_code=loaded.trust, **options
            )
        )
    except Exception as error:
        raise InputError(
            f"cannot load the tokenizer of {loaded.name} ({one_line(error)}); use --tokens N for random tokens"
        ) from error
    ids = quietly(lambda: tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"])
    longest = _longest(loaded.model)
    if length is None:
        length = min(512, longest or 512)
    if longest is not None and length > longest:
        raise InputError(f"{loaded.name} has {longest} positions, but --length is {length}; ask for at most {longest}")
    before, after = _special_tokens(tokenizer)
    extra = len(before) + len(after)
    body = length - extra
    if body < 4:
        raise InputError(
            f"--length {length} leaves {body} tokens beside {extra} special ones; ask for at least {extra + 4}"
        )
    chunks = [ids[start : start + body] for start in range(0, len(ids), body)][:texts]
    if len(chunks) > 1 and len(chunks[-1]) < body:
        chunks.pop()  # a short last one would make every mean a mixture of lengths
    if len(chunks[0]) < 4:
        raise InputError(f"the text has {len(ids)} tokens; attention needs at least 4 to say anything")
    rows = torch.tensor([[*before, *chunk, *after] for chunk in chunks])
    groups = [rows[start : start + batch] for start in range(0, len(rows), batch)]
    batches = [_with_decoder(loaded.model, {"input_ids": part}) for part in groups]
    described = {"kind": "text", "source": [path.name for path in paths], "length": rows.shape[1]}
    return Input(
        batches, lambda x: [tokenizer.convert_ids_to_tokens(row.tolist()) for row in x["input_ids"]], described
    )


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    whole, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
    return ([], []) if start is None else (whole[:start], whole[start + len(plain) :])


def random_tokens(loaded: Loaded, length: int, *, texts: int, seed: int) -> Input:
    """Uniformly random tokens: for models without a tokenizer, and to see what structure P has without any text."""
    vocabulary = getattr(getattr(loaded.model, "config", None), "vocab_size", None)
    if vocabulary is None:
        raise InputError(f"{loaded.name} has no vocabulary, so --tokens has no meaning; use --images or --audio")
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(vocabulary, (1, length), generator=generator) for _ in range(texts)]
    batches = [_with_decoder(loaded.model, {"input_ids": row}) for row in rows]
    return Input(
        batches,
        lambda x: [[str(i) for i in row.tolist()] for row in x["input_ids"]],
        {"kind": "random tokens", "length": length},
    )


def image_input(loaded: Loaded, directory: Path, *, limit: int) -> Input:
    """Every picture of a directory, prepared by the model's own processor."""
    if not directory.is_dir():
        raise InputError(f"--images {directory}: no such directory")
    paths = sorted(p for p in directory.iterdir() if p.suffix.lower() in {".png", ".jpg", ".jpeg", ".bmp", ".webp"})
    if not paths:
        raise InputError(f"--images {directory}: no .png, .jpg, .bmp or .webp file in it")
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("pictures need Pillow; pip install 'headwise[models]'") from error
    prepare = _image_processor(loaded)
    batches = []
    for path in paths[:limit]:
        try:
            batches.append(prepare(Image.open(path).convert("RGB")))
        except OSError as error:
            raise InputError(f"{path} is not a picture that can be read ({one_line(error)})") from error
    return Input(batches, _patch_names, {"kind": "images", "source": [p.name for p in paths[:limit]]})


def audio_input(loaded: Loaded, files: Sequence[Path], *, limit: int) -> Input:
    """Recordings at 16 kHz, prepared by the model's own feature extractor."""
    transformers = transformers_library()
    try:
        extractor = quietly(lambda: transformers.AutoFeatureExtractor.from_pretrained(str(loaded.source)))
    except Exception as error:
        raise InputError(f"cannot load the feature extractor of {loaded.name} ({one_line(error)})") from error
    rate = getattr(extractor, "sampling_rate", 16000)
    batches = []
    for path in files[:limit]:
        made = extractor(read_audio(path, rate).numpy(), sampling_rate=rate, return_tensors="pt")
        batches.append(_with_decoder(loaded.model, {key: made[key] for key in made if key != "attention_mask"}))
    return Input(batches, None, {"kind": "audio", "source": [Path(p).name for p in files[:limit]]})


def read_audio(path: Path, rate: int) -> Tensor:
    """A mono recording at `rate`, by linear interpolation where its own rate differs."""
    try:
        import soundfile
    except ImportError as error:
        raise InputError("recordings need soundfile; pip install 'headwise[models]'") from error
    try:
        samples, found = soundfile.read(str(path), dtype="float32", always_2d=True)
    except (OSError, RuntimeError) as error:
        raise InputError(f"{path} is not a recording that can be read ({one_line(error)})") from error
    mono = torch.from_numpy(samples).mean(-1)
    if len(mono) < rate // 10:
        raise InputError(f"{path} lasts {len(mono) / found:.2f} s; attention needs at least 0.1 s of sound")
    if found == rate:
        return mono
    size = round(len(mono) * rate / found)
    return torch.nn.functional.interpolate(mono[None, None], size=size, mode="linear")[0, 0]


def _image_processor(loaded: Loaded) -> Callable[[Any], dict[str, Tensor]]:
    transformers = transformers_library()
    try:
        processor = quietly(lambda: transformers.AutoImageProcessor.from_pretrained(str(loaded.source)))
    except Exception as error:
        raise InputError(f"cannot load the image processor of {loaded.name} ({one_line(error)})") from error
    return lambda image: {"pixel_values": processor(images=image, return_tensors="pt")["pixel_values"]}


def _patch_names(batch: Any) -> list[list[str]]:
    return []


def _with_decoder(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Encoder–decoders also want decoder tokens: the same text, or, for speech, the start token and its successors."""
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return batch
    if "input_ids" in batch:
        return {**batch, "decoder_input_ids": batch["input_ids"]}
    rows = next(iter(batch.values())).shape[0]
    start = getattr(config, "decoder_start_token_id", None) or 0
    return {**batch, "decoder_input_ids": torch.full((rows, 16), start)}


def _longest(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    found = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    return next((int(x) for x in found if isinstance(x, int) and x > 0), None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
