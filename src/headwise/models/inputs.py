"""Make the batches a model takes from texts or random tokens; `media` makes them from images and recordings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.models import gate
from headwise.models.gate import transformers_library
from headwise.models.load import LoadedModel
from headwise.reading import anything, map_of, read_json

SAMPLE_TEXT = Path(__file__).parent / "data" / "moby-dick.txt"
LONGEST = 512
"""Tokens of a text unless the caller asks for more: what most encoders were trained on."""

UNKNOWN = 0.1
"""Share of unknown tokens from which on a text is said to be in words that the tokenizer does not have."""

SENTENCE_CONFIG = "sentence_bert_config.json"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

KINDS = {
    "text": ("input_ids", "--text or --random-tokens"),
    "images": ("pixel_values", "--images"),
    "recordings": ("input_features input_values", "--audio"),
}
"""kind of input -> (names that models give it, option that provides it)"""

TEXT_WORDS = {"item": "text", "items": "texts", "unit": "token", "units": "tokens"}
IMAGE_WORDS = {"item": "image", "items": "images", "unit": "patch", "units": "patches"}
FRAME_WORDS = {"item": "recording", "items": "recordings", "unit": "frame", "units": "frames"}
"""What a report calls an input and a position in it."""


def in_words(sentence: str, words: Mapping[str, str]) -> str:
    """A sentence about texts and tokens, in the words for other inputs.

    >>> in_words("the previous token on 2 of 3 texts", IMAGE_WORDS)
    'the previous patch on 2 of 3 images'
    """
    names = {TEXT_WORDS[key]: word for key, word in words.items() if key in TEXT_WORDS}
    return re.sub(r"\b(texts?|tokens?)\b", lambda found: names.get(found[0], found[0]), sentence)


def words_of(batch: Any) -> dict[str, str]:
    """What to call an input and a position in it, by the names of the tensors in a batch."""
    names = set(batch) if isinstance(batch, Mapping) else set()
    words = {"text": TEXT_WORDS, "images": IMAGE_WORDS, "recordings": FRAME_WORDS}
    return next((words[kind] for kind, (known, _) in KINDS.items() if names & set(known.split())), TEXT_WORDS)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Batches, a function that names each position of a batch, and where the batches came from.

    The description has `kind`, `words` (what to call an input and its positions) and, where they apply, `source`,
    `length`, `length_from` and `notes` (what a reader of the results must know).
    """

    batches: Sequence[Any]
    token_names: Callable[[Any], list[list[str]]] | None
    description: dict[str, Any]


def text_input(
    loaded: LoadedModel, files: Sequence[Path] | None, *, length: int | None, texts: int, batch: int = 1
) -> Inputs:
    """At most `texts` texts of `length` tokens, special tokens included, cut in order from the files.

    files   default: an excerpt of Moby-Dick that ships with headwise
    length  default: what the model declares (`declared_length`), at most 512
    batch   texts in one batch
    """
    check_takes(loaded, "text")
    paths = list(files) if files else [SAMPLE_TEXT]
    content = "\n\n".join(read_text(path) for path in paths)
    if not content.strip():
        raise InputError(f"{', '.join(map(str, paths))}: empty; give a text with at least a few sentences")
    tokenizer = tokenizer_of(loaded)
    with gate.failures(f"the tokenizer of {loaded.name} cannot read the text"):
        ids = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    positions = max_positions(loaded.model)
    length_from = "--length"
    if length is None:
        length, length_from = declared_length(loaded, tokenizer)
    if positions is not None and length > positions:
        raise InputError(f"{loaded.name} has {positions} positions, but --length is {length}; use at most {positions}")
    before, after = special_tokens(tokenizer)
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
        raise InputError(
            f"the text has {len(ids)} token{'s' * (len(ids) != 1)}; attention needs at least 4 to say anything"
        )
    rows = torch.tensor([[*before, *chunk, *after] for chunk in chunks])
    vocabulary = _vocabulary(loaded.model)
    if vocabulary is not None and rows.max() >= vocabulary:
        raise InputError(
            f"the tokenizer of {loaded.name} made token {rows.max()}, but the model has a vocabulary of {vocabulary}; "
            "use the tokenizer that belongs to the model"
        )
    return Inputs(
        [with_decoder(loaded.model, {"input_ids": part}) for part in rows.split(batch)],
        lambda x: [tokenizer.convert_ids_to_tokens(row.tolist()) for row in x["input_ids"]],
        {
            "kind": "text",
            "source": [path.name for path in paths],
            "length": rows.shape[1],
            "length_from": length_from if rows.shape[1] == length else "the text",
            "words": TEXT_WORDS,
            "notes": _unknown_tokens(loaded.name, tokenizer, rows),
        },
    )


def declared_length(loaded: LoadedModel, tokenizer: Any) -> tuple[int, str]:
    """(tokens, where it is said): the smallest length that the model's own files declare, at most `LONGEST`."""
    lengths = [(LONGEST, "the default of headwise"), (max_positions(loaded.model), "the positions of the model")]
    lengths.append((getattr(tokenizer, "model_max_length", None), "model_max_length of the tokenizer"))
    sentences = loaded.source / SENTENCE_CONFIG if isinstance(loaded.source, Path) else None
    if sentences is not None and sentences.is_file():
        found = read_json(sentences, map_of(anything), "a config of sentence-transformers", foreign=True)
        lengths.append((found.get("max_seq_length"), f"max_seq_length of {SENTENCE_CONFIG}"))
    # a tokenizer that knows no limit says 10^30; one that says less than 8 cannot mean texts
    return min(((n, where) for n, where in lengths if isinstance(n, int) and n >= 8), key=lambda pair: pair[0])


def _unknown_tokens(name: str, tokenizer: Any, rows: Tensor) -> list[str]:
    """A sentence if the tokenizer does not know the words of the text."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    count = 0 if unknown is None else int((rows == unknown).sum())
    if count < UNKNOWN * rows.numel():
        return []
    return [
        f"{count} of {rows.numel()} tokens are {tokenizer.unk_token}: the {type(tokenizer).__name__} of {name} does "
        "not know the words of this text; use the tokenizer that belongs to the model, or a text in its language"
    ]


def random_tokens(loaded: LoadedModel, length: int, *, texts: int, seed: int) -> Inputs:
    """Texts of uniformly random tokens: for models without a tokenizer, and to see which structure needs no text."""
    check_takes(loaded, "text")
    vocabulary = _vocabulary(loaded.model)
    if vocabulary is None:
        raise InputError(f"{loaded.name} has no vocabulary to draw random tokens from; {_takes(loaded)}")
    positions = max_positions(loaded.model)
    if positions is not None and length > positions:
        raise InputError(
            f"{loaded.name} has {positions} positions, but --random-tokens is {length}; use at most {positions}"
        )
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(vocabulary, (1, length), generator=generator) for _ in range(texts)]
    return Inputs(
        [with_decoder(loaded.model, {"input_ids": row}) for row in rows],
        lambda x: [[str(i) for i in row.tolist()] for row in x["input_ids"]],
        {"kind": "random tokens", "length": length, "words": TEXT_WORDS},
    )


def max_positions(model: nn.Module) -> int | None:
    """The longest sequence the model has positions for, or None if its config does not say."""
    config = getattr(model, "config", None)
    sizes = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    size = next((size for size in sizes if isinstance(size, int) and size > 0), None)
    for name, module in model.named_modules():
        # RoBERTa counts positions from the one after padding, so that the first ones are never used
        is_table = isinstance(module, nn.Embedding) and module.num_embeddings == size and "position" in name
        if size is not None and is_table and isinstance(module.padding_idx, int):
            return size - module.padding_idx - 1
    return size


def part_that_takes(loaded: LoadedModel, kind: str) -> LoadedModel:
    """The encoder for one kind of input of a model that has one for each, such as CLIP; otherwise `loaded`."""
    if getattr(getattr(loaded.model, "config", None), "is_encoder_decoder", False):
        return loaded
    encoders = {name: part for name, part in loaded.model.named_children() if hasattr(part, "main_input_name")}
    kinds = {_kind(part) for part in encoders.values()}
    main = _kind(loaded.model)
    if main is None or None in kinds or len(kinds) < 2:
        return loaded
    fitting = [(name, part) for name, part in encoders.items() if _kind(part) == kind]
    if len(fitting) != 1:
        return loaded
    name, part = fitting[0]
    note = f"{loaded.name}: its {name} is examined, as it is given {kind} only"
    return replace(loaded, model=part, name=f"{loaded.name} {name}", notes=(*loaded.notes, note))


def _kind(model: nn.Module) -> str | None:
    main = getattr(model, "main_input_name", None)
    return next((kind for kind, (names, _) in KINDS.items() if main in names.split()), None)


def needs_text(model: nn.Module) -> bool:
    """Whether the model takes text beside images or recordings: its main input is text, and it has one encoder."""
    return _kind(model) == "text"


def known_arguments(model: nn.Module, features: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those tensors of a processor that the model's forward names."""
    names = inspect.signature(model.forward).parameters
    return {name: x for name, x in features.items() if name in names and isinstance(x, Tensor)}


def check_takes(loaded: LoadedModel, kind: str) -> None:
    """Raise InputError if `loaded` is known to take other inputs than `kind`."""
    if loaded.is_factory and not hasattr(loaded.model, "config"):
        raise InputError(f"{loaded.source} returned no batches; return (model, [batch, …]), as it has no tokenizer")
    arguments = inspect.signature(loaded.model.forward).parameters
    if _kind(loaded.model) is not None and not any(name in arguments for name in KINDS[kind][0].split()):
        raise InputError(f"{loaded.name} does not take {kind}; {_takes(loaded)}")


def _takes(loaded: LoadedModel) -> str:
    kind = _kind(loaded.model)
    if kind is None:
        return "use python:module:factory, with a factory that returns (model, batches)"
    return f"it takes {kind}: use {KINDS[kind][1]}"


def _vocabulary(model: nn.Module) -> int | None:
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if isinstance(size, int) else None


def tokenizer_of(loaded: LoadedModel) -> Any:
    if loaded.lacks_tokenizer:
        raise InputError(
            f"{loaded.source} has no tokenizer (such as tokenizer.json); use --random-tokens N instead of a text"
        )
    return preprocessor(loaded, "AutoTokenizer", "tokenizer", "; use --random-tokens N instead of a text")


def preprocessor(loaded: LoadedModel, auto_class: str, what: str, advice: str = "") -> Any:
    """The tokenizer, image processor or feature extractor of a model, by the name of its class in transformers."""
    if loaded.is_factory:
        raise InputError(f"{loaded.source} has no {what}, and returned no batches; return (model, [batch, …])")
    directory = Path(loaded.source)
    own = auto_class in loaded.preprocessors or what == "tokenizer"
    if not own and directory.is_dir() and not any((directory / name).exists() for name in PROCESSOR_FILES):
        raise InputError(
            f"{loaded.name} has no {what} (no {' or '.join(PROCESSOR_FILES)} in {directory}); save that of the model "
            "it was trained from there, with its save_pretrained"
        )
    try:
        return loaded.preprocessor(getattr(transformers_library(), auto_class))
    except InputError as error:
        raise InputError(f"the {what} of {loaded.name}: {error}{advice}") from error


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and after a text."""
    whole, plain = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
    return ([], []) if start is None else (whole[:start], whole[start + len(plain) :])


def with_decoder(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add decoder tokens for an encoder–decoder: the same text, or 16 start tokens for speech."""
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return batch
    if "input_ids" in batch:
        return {**batch, "decoder_input_ids": batch["input_ids"]}
    rows = next(iter(batch.values())).shape[0]
    start = getattr(config, "decoder_start_token_id", None) or 0
    return {**batch, "decoder_input_ids": torch.full((rows, 16), start)}


def read_text(path: Path) -> str:
    """The text in a file; InputError unless it is one in UTF-8."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    text = content.decode("utf-8", errors="replace")
    if b"\0" in content or text.count("\ufffd") > len(text) // 10:
        raise InputError(f"{path} is not a text in UTF-8; --text takes plain text, --images and --audio other files")
    return text
