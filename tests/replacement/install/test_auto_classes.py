"""Saved rewritten models: transformers alone refuses them, after `import headwise` its auto classes load them."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headwise
from headwise.errors import InputError
from headwise.replacement import Choice, load
from tests.replacement.install.test_transformers_models import SOME, causal_lm, ids, made, shaken, states
from tests.replacement.plans import plan_for

transformers = pytest.importorskip("transformers")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[torch.nn.Module, Path]:
    model = causal_lm()
    new = shaken(headwise.rewrite(model, plan_for(model, {"input_ids": ids(1, 8)}, SOME, length=64))[0])
    new.save_pretrained(tmp_path)
    return new, tmp_path


def test_auto_classes_load_what_was_saved(saved) -> None:
    new, path = saved
    batch = {"input_ids": ids(2, 20)}
    for again in (transformers.AutoModelForCausalLM.from_pretrained(path), load(path)):
        assert type(again) is type(new)
        assert torch.equal(states(again, batch), states(new, batch))
    body = transformers.AutoModel.from_pretrained(path)
    assert type(body).__name__ == "HeadwiseLlamaModel"
    assert torch.equal(body(**batch)[0], new.model(**batch)[0])
    facts = json.loads((path / "config.json").read_text())
    assert (facts["model_type"], facts["original_model_type"]) == ("headwise", "llama")
    assert again.config.model_type == "llama"  # families ask for it while they run


def test_a_stock_class_never_runs_the_original_weights_in_its_place(saved) -> None:
    """Also here, where the attention function of rewritten models is registered."""
    with pytest.raises(ValueError, match="load this with AutoModel after import headwise"):
        transformers.LlamaForCausalLM.from_pretrained(saved[1])


def test_other_families(tmp_path: Path) -> None:
    model, batch = made("vit")
    new = headwise.rewrite(model, plan_for(model, batch, [Choice("window", {"width": 5, "leading": 1})]))[0]
    new.save_pretrained(tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(states(again, batch), states(new, batch))


def run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)


LOADING = "print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)"


@pytest.mark.slow
def test_in_other_processes(saved) -> None:
    """Without headwise a sentence that names it; with it, imported before or after transformers, the model."""
    _, path = saved
    alone = run(f"import sys; from transformers import AutoModelForCausalLM; {LOADING}", path)
    assert alone.returncode == 1
    assert "has model type `headwise` but Transformers does not recognize" in alone.stderr
    imports = ["import headwise", "from transformers import AutoModelForCausalLM"]
    for order in (imports, imports[::-1]):
        assert run(f"import sys; {'; '.join(order)}; {LOADING}", path).stdout == "HeadwiseLlamaForCausalLM\n"


def test_importing_headwise_does_not_import_transformers() -> None:
    found = run("import sys, headwise; print({'torch', 'transformers'} & set(sys.modules))", Path())
    assert found.stdout == "set()\n"


def test_configs_are_copied_and_pickled(saved) -> None:
    new, _ = saved
    for again in (copy.deepcopy(new.config), pickle.loads(pickle.dumps(new.config))):
        assert type(again) is type(new.config)
        assert again.to_dict() == new.config.to_dict()


@pytest.mark.parametrize("change", [{"original_model_type": "unknown"}, {"original_model_type": None}, {"headwise": 3}])
def test_a_damaged_config(saved, change: dict) -> None:
    _, path = saved
    facts = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**facts, **change}))
    with pytest.raises(InputError, match="has model_type headwise, but its original_model_type is"):
        load(path)
    with pytest.raises(InputError, match="rewrite the original model again"):
        transformers.AutoModel.from_pretrained(path)
