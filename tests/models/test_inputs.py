"""Inputs that do not fit the model, or cannot be read, raise a sentence."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from headwise.cli.main import main
from headwise.errors import InputError
from headwise.models.inputs import random_tokens, text_input
from headwise.models.load import LoadedModel, load_model
from headwise.models.media.images import image_input
from headwise.models.media.recordings import audio_input
from tests.models.tiny_models import ALL

transformers = pytest.importorskip("transformers")


def loaded(name: str) -> LoadedModel:
    return LoadedModel(ALL[name]()[0].eval(), name, Path("nowhere"))


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A BERT with a tokenizer of 40 words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", *"0123456789"]
    tokenizer = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    tokenizer.save_pretrained(tmp_path / "bert")
    ALL["bert"]()[0].save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize(
    "content",
    [
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)),
        "text".encode("utf-16"),
        bytes(range(128, 256)) * 9,
        b"",
        b" \n",
    ],
)
def test_files_that_are_no_text(content: bytes, bert: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(InputError, match=r"x is not a text in UTF-8|x: empty"):
        text_input(load_model(str(bert)), [tmp_path / "x"], length=None, texts=1)


def test_a_text_with_a_few_bytes_of_another_encoding_is_read(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"a b c d e f g h i j k l m n o p " + "é".encode("latin-1") + b" q r s t")
    assert (
        text_input(load_model(str(bert)), [tmp_path / "x"], length=None, texts=1).batches[0]["input_ids"].shape[1] > 8
    )


@pytest.mark.parametrize("length", [-1, 0, 1, 5, 513, 10**20])
def test_lengths_that_the_model_does_not_have(length: int, bert: Path) -> None:
    with pytest.raises(InputError, match=f"--length (is )?{length}"):
        text_input(load_model(str(bert)), None, length=length, texts=1)


def test_a_tokenizer_of_another_model(bert: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((bert / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["a"] = 99999
    (bert / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "x").write_text("a b c d e f")
    with pytest.raises(InputError, match="made token 99999, but the model has a vocabulary of 99"):
        text_input(load_model(str(bert)), [tmp_path / "x"], length=None, texts=1)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"model": {"type": "WordPiece", "vocab": 3}}', b"\xff\0", b"[" * 10**5]
)
def test_a_damaged_tokenizer(content: bytes, bert: Path) -> None:
    (bert / "tokenizer.json").write_bytes(content)
    with pytest.raises(InputError, match="the tokenizer of bert"):
        text_input(load_model(str(bert)), None, length=None, texts=1)


WRONG = {
    ("bert", "images"): "bert does not take images; it takes text: use --text or --random-tokens",
    ("bert", "audio"): "bert does not take recordings; it takes text: use --text or --random-tokens",
    ("gpt2", "images"): "gpt2 does not take images; it takes text",
    ("vit", "text"): "vit does not take text; it takes images: use --images",
    ("vit", "random"): "vit does not take text; it takes images: use --images",
    ("vit", "audio"): "vit does not take recordings; it takes images: use --images",
    ("whisper", "text"): "whisper does not take text; it takes recordings: use --audio",
    ("whisper", "images"): "whisper does not take images; it takes recordings: use --audio",
}


@pytest.mark.parametrize("name, kind, message", [(*key, message) for key, message in WRONG.items()])
def test_inputs_that_the_model_does_not_take(name: str, kind: str, message: str, tmp_path: Path) -> None:
    make: dict[str, Any] = {
        "text": lambda model: text_input(model, None, length=None, texts=1),
        "random": lambda model: random_tokens(model, 9, texts=1, seed=0),
        "images": lambda model: image_input(model, tmp_path, limit=1),
        "audio": lambda model: audio_input(model, [tmp_path / "x.wav"], limit=1),
    }
    with pytest.raises(InputError, match=message):
        make[kind](loaded(name))


def test_more_random_tokens_than_positions() -> None:
    with pytest.raises(InputError, match="gpt2 has 64 positions, but --random-tokens is 65"):
        random_tokens(loaded("gpt2"), 65, texts=1, seed=0)
    assert random_tokens(loaded("gpt2"), 64, texts=1, seed=0).batches[0]["input_ids"].shape == (1, 64)


@pytest.mark.parametrize("option, module", [("--images", "PIL"), ("--audio", "soundfile")])
def test_missing_packages_are_named_before_the_model_is_loaded(
    option: str,
    module: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    tmp_path: Path,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == module else find(name, *more))
    monkeypatch.setattr("headwise.models.load.load_model", lambda *args, **options: pytest.fail("loaded the model"))
    assert main(["examine", "minilm", option, str(tmp_path), "-o", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert (
        f"{option} needs {module}, which is not installed; pip install 'headwise[models]', or in a checkout" in message
    )


def test_images_that_cannot_be_read(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    model = ALL["vit"]()[0]
    model.save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text('{"image_processor_type": "ViTImageProcessor"}')
    found = LoadedModel(model, "vit", tmp_path / "vit")
    (tmp_path / "images").mkdir()
    for content in (b"", b"text", b"\x89PNG\r\n\x1a\n" + bytes(50)):
        (tmp_path / "images" / "a.png").write_bytes(content)
        with pytest.raises(InputError, match=r"a\.png cannot be read as an image"):
            image_input(found, tmp_path / "images", limit=1)
