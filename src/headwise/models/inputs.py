"""Make the batches a model takes from texts, images, recordings or random tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError, needs_extra
from headwise.models import gate
from headwise.models.gate import one_line, transformers_library
from headwise.models.load import LoadedModel

SAMPLE_TEXT = Path(__file__).parent / "data" / "moby-dick.txt"
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
TOKENIZER_FILES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)


KINDS = {
    "text": ("input_ids", "--text or --random-tokens"),
    "images": ("pixel_values", "--images"),
    "recordings": ("input_features input_values", "--audio"),
}
"""kind of input -> (names that models give it, option that provides it)"""


@dataclass(frozen=True, eq=False)
class Inputs:
    """Batches, a function that names each position of a batch, and where the batches came from."""

    batches: Sequence[Any]
    token_names: Callable[[Any], list[list[str]]] | None
    description: dict[str, Any]


def text_input(
    loaded: LoadedModel, files: Sequence[Path] | None, *, length: int | None, texts: int, batch: int = 1
) -> Inputs:
    """At most `texts` texts of `length` tokens, special tokens included, cut in order from the files.

    files   default: an excerpt of Moby-Dick that ships with headwise
    length  default: 512, or the number of positions of the model if that is less
    batch   texts in one batch
    """
    _check_takes(loaded, "text")
    paths = list(files) if files else [SAMPLE_TEXT]
    content = "\n\n".join(_read(path) for path in paths)
    if not content.strip():
        raise InputError(f"{', '.join(map(str, paths))}: empty; give a text with at least a few sentences")
    tokenizer = _tokenizer(loaded)
    with gate.failures(f"the tokenizer of {loaded.name} cannot read the text"):
        ids = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    positions = max_positions(loaded.model)
    if length is None:
        length = min(512, positions or 512)
    if positions is not None and length > positions:
        raise InputError(f"{loaded.name} has {positions} positions, but --length is {length}; use at most {positions}")
    before, after = _special_tokens(tokenizer)
    special = len(before) + len(after)
    body = length - special
    if body < 4:
        raise InputError(
            f"--length {length} leaves {body} tokens beside {special} special ones; use at least {special + 4}"
        )
    chunks = [ids[start : start + body] for start in range(0, len(ids), body)][:texts]
    if len(chunks) > 1 and len(chunks[-1]) < body:
        chunks.pop()  # all texts have one length, so that a mean over texts does not mix lengths
    if not chunks or len(chunks[0]) < 4:
        raise InputError(f"the text has {len(ids)} tokens; attention needs at least 4 to say anything")
    rows = torch.tensor([[*before, *chunk, *after] for chunk in chunks])
    vocabulary = _vocabulary(loaded.model)
    if vocabulary is not None and rows.max() >= vocabulary:
        raise InputError(
            f"the tokenizer of {loaded.name} made token {rows.max()}, but the model has a vocabulary of {vocabulary}; "
            "use the tokenizer that belongs to the model"
        )
    return Inputs(
        [_with_decoder(loaded.model, {"input_ids": part}) for part in rows.split(batch)],
        lambda x: [tokenizer.convert_ids_to_tokens(row.tolist()) for row in x["input_ids"]],
        {"kind": "text", "source": [path.name for path in paths], "length": rows.shape[1]},
    )


def random_tokens(loaded: LoadedModel, length: int, *, texts: int, seed: int) -> Inputs:
    """Texts of uniformly random tokens: for models without a tokenizer, and to see which structure needs no text."""
    _check_takes(loaded, "text")
    vocabulary = _vocabulary(loaded.model)
    if vocabulary is None:
        raise InputError(f"{loaded.name} has no vocabulary to draw random tokens from; {_takes(loaded)}")
    positions = max_positions(loaded.model)
    if positions is not None and length > positions:
        raise InputError(f"{loaded.name} has {positions} positions, but --random-tokens is {length}")
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(vocabulary, (1, length), generator=generator) for _ in range(texts)]
    return Inputs(
        [_with_decoder(loaded.model, {"input_ids": row}) for row in rows],
        lambda x: [[str(i) for i in row.tolist()] for row in x["input_ids"]],
        {"kind": "random tokens", "length": length},
    )


def image_input(loaded: LoadedModel, directory: Path, *, limit: int) -> Inputs:
    """The first `limit` images of a directory, prepared by the model's own processor."""
    _check_takes(loaded, "images")
    if not directory.is_dir():
        raise InputError(f"--images {directory}: no such directory")
    paths = sorted(p for p in directory.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)[:limit]
    if not paths:
        raise InputError(f"--images {directory}: no .png, .jpg, .bmp or .webp file in it")
    with needs_extra("models", "reading images"):
        from PIL import Image
    processor = _preprocessor(loaded, "AutoImageProcessor", "image processor")
    batches = []
    for path in paths:
        try:
            image = Image.open(path).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InputError(f"{path} cannot be read as an image ({one_line(error)})") from error
        with gate.failures(f"{path} cannot be prepared for {loaded.name}"):
            batches.append({"pixel_values": processor(images=image, return_tensors="pt")["pixel_values"]})
    return Inputs(batches, None, {"kind": "images", "source": [p.name for p in paths]})


def audio_input(loaded: LoadedModel, files: Sequence[Path], *, limit: int) -> Inputs:
    """The first `limit` recordings, prepared by the model's own feature extractor."""
    _check_takes(loaded, "recordings")
    extractor = _preprocessor(loaded, "AutoFeatureExtractor", "feature extractor")
    rate = getattr(extractor, "sampling_rate", 16000)
    batches = []
    for path in files[:limit]:
        samples = read_audio(path, rate).numpy()
        with gate.failures(f"{path} cannot be prepared for {loaded.name}"):
            features = extractor(samples, sampling_rate=rate, return_tensors="pt")
        batches.append(_with_decoder(loaded.model, {k: x for k, x in features.items() if k != "attention_mask"}))
    return Inputs(batches, None, {"kind": "audio", "source": [Path(p).name for p in files[:limit]]})


def read_audio(path: Path, rate: int) -> Tensor:
    """A recording as one channel at `rate` samples per second, linearly interpolated if recorded at another rate."""
    with needs_extra("models", "reading recordings"):
        import soundfile
    try:
        samples, recorded_rate = soundfile.read(str(path), dtype="float32", always_2d=True)
    except (OSError, RuntimeError) as error:
        raise InputError(f"{path} cannot be read as a recording ({one_line(error)})") from error
    mono = torch.from_numpy(samples).mean(-1)
    if len(mono) < rate // 10:
        raise InputError(f"{path} lasts {len(mono) / recorded_rate:.2f} s; attention needs at least 0.1 s of sound")
    if recorded_rate == rate:
        return mono
    size = round(len(mono) * rate / recorded_rate)
    return torch.nn.functional.interpolate(mono[None, None], size=size, mode="linear")[0, 0]


def max_positions(model: nn.Module) -> int | None:
    """The longest sequence the model has positions for, or None if its config does not say."""
    config = getattr(model, "config", None)
    sizes = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def _check_takes(loaded: LoadedModel, kind: str) -> None:
    """Raise InputError if `loaded` is known to take other inputs than `kind`."""
    if loaded.is_factory and not hasattr(loaded.model, "config"):
        raise InputError(f"{loaded.source} returned no batches; return (model, [batch, …]), as it has no tokenizer")
    main = getattr(loaded.model, "main_input_name", None)
    known = {name for names, _ in KINDS.values() for name in names.split()}
    arguments = inspect.signature(loaded.model.forward).parameters
    if main in known and not any(name in arguments for name in KINDS[kind][0].split()):
        raise InputError(f"{loaded.name} does not take {kind}; {_takes(loaded)}")


def _takes(loaded: LoadedModel) -> str:
    main = getattr(loaded.model, "main_input_name", None)
    for kind, (names, option) in KINDS.items():
        if main in names.split():
            return f"it takes {kind}: use {option}"
    return "use python:module:factory, with a factory that returns (model, batches)"


def _vocabulary(model: nn.Module) -> int | None:
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else None


def _tokenizer(loaded: LoadedModel) -> Any:
    # without these files transformers would build an empty tokenizer, which maps every word to "unknown"
    has_files = isinstance(loaded.source, Path) and any((loaded.source / name).exists() for name in TOKENIZER_FILES)
    if isinstance(loaded.source, Path) and loaded.gguf is None and not has_files:
        raise InputError(
            f"{loaded.source} has no tokenizer (such as tokenizer.json); use --random-tokens N instead of a text"
        )
    return _preprocessor(loaded, "AutoTokenizer", "tokenizer", "; use --random-tokens N instead of a text")


def _preprocessor(loaded: LoadedModel, auto_class: str, what: str, advice: str = "") -> Any:
    if loaded.is_factory:
        raise InputError(f"{loaded.source} has no {what}, and returned no batches; return (model, [batch, …])")
    try:
        return loaded.preprocessor(getattr(transformers_library(), auto_class))
    except InputError as error:
        raise InputError(f"the {what} of {loaded.name}: {error}{advice}") from error


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and after a text."""
    whole, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
    return ([], []) if start is None else (whole[:start], whole[start + len(plain) :])


def _with_decoder(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add decoder tokens for an encoder–decoder: the same text, or 16 start tokens for speech."""
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return batch
    if "input_ids" in batch:
        return {**batch, "decoder_input_ids": batch["input_ids"]}
    rows = next(iter(batch.values())).shape[0]
    start = getattr(config, "decoder_start_token_id", None) or 0
    return {**batch, "decoder_input_ids": torch.full((rows, 16), start)}


def _read(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    text = content.decode("utf-8", errors="replace")
    if b"\0" in content or text.count("\ufffd") > len(text) // 10:
        raise InputError(f"{path} is not a text in UTF-8; --text takes plain text, --images and --audio other files")
    return text
