"""A saved model loads bit for bit or refuses: files that lack tensors, or do not belong together, raise InputError."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise
from headwise.errors import InputError
from headwise.models.fingerprint import weights_hash
from headwise.output_directory import OutputDirectory
from headwise.replacement import Choice, Plan, load
from headwise.replacement.install.saved import WEIGHTS, save
from headwise.replacement.model_comparison import open_model
from tests.models.tiny_models import ALL, TRANSFORMERS
from tests.replacement.plans import plan_for

pytest.importorskip("transformers")
TOEPLITZ = Choice("toeplitz", {"reach": 2})


def rewritten(name: str, directory: Path) -> Any:
    model, batch = ALL[name]()
    new, _ = headwise.rewrite(model.eval(), plan_for(model, batch, [TOEPLITZ]))
    new.save_pretrained(directory)
    return new


def change_weights(file: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    from safetensors.torch import load_file, save_file

    save_file(change(load_file(file)), file, {"format": "pt"})


UNFIT = {("rewrite", "t5"), ("rewrite", "whisper"), ("shrink", "albert")}  # bias, cross-attention; layers that are one
PAIRS = [(verb, name) for verb in ("rewrite", "shrink") for name in TRANSFORMERS if (verb, name) not in UNFIT]


@pytest.mark.parametrize("verb, name", PAIRS)
def test_a_model_that_was_loaded_is_saved_and_loaded_again(verb: str, name: str, tmp_path: Path) -> None:
    """Files may name tensors otherwise than modules do; transformers renames them when it loads and saves."""
    made, batch = TRANSFORMERS[name]()
    made.eval().save_pretrained(tmp_path / "original")
    model = type(made).from_pretrained(tmp_path / "original").eval()
    if verb == "rewrite":
        new, _ = headwise.rewrite(model, plan_for(model, batch, [Choice("window", {"width": 3})]), probe=batch)
    else:
        new, _ = headwise.shrink(model, [batch, batch])
    new.save_pretrained(tmp_path / "new")
    again = type(new).from_pretrained(tmp_path / "new").eval()
    assert weights_hash(again) == weights_hash(new)
    with torch.no_grad():
        assert torch.equal(again(**batch)[0], new(**batch)[0])


@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
@pytest.mark.parametrize("opener", ["load", "open_model", "from_pretrained"])
def test_a_directory_without_its_learned_tensors_is_refused(name: str, opener: str, tmp_path: Path) -> None:
    new = rewritten(name, tmp_path)
    change_weights(
        tmp_path / "model.safetensors", lambda x: {key: t for key, t in x.items() if ".headwise." not in key}
    )
    openers = {"load": load, "open_model": open_model, "from_pretrained": type(new).from_pretrained}
    with pytest.raises(InputError, match=r"lacks tensors, 2 in all: .*headwise\.groups\.0\.profile"):
        openers[opener](tmp_path)


CHANGES: dict[str, tuple[Callable[[dict], dict], str]] = {
    "missing": (lambda x: {k: t for k, t in x.items() if "layer.1.output" not in k}, "lacks tensors, 4 in all"),
    "renamed": (lambda x: {k.replace("query", "q"): t for k, t in x.items()}, "lacks tensors, 4 in all"),
    "unexpected": (lambda x: {**x, "more.weight": torch.zeros(2)}, "holds unknown tensors, 1 in all: more.weight"),
    "other shape": (lambda x: {k: t[:1] if "profile" in k else t for k, t in x.items()}, "cannot load"),
    "empty": (lambda x: {}, "lacks tensors"),
}


@pytest.mark.parametrize("change, message", CHANGES.values(), ids=CHANGES)
def test_weights_that_do_not_belong_to_the_config(change: Callable, message: str, tmp_path: Path) -> None:
    rewritten("bert", tmp_path)
    change_weights(tmp_path / "model.safetensors", change)
    with pytest.raises(InputError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"version": 1},
        {"version": 2},
        {"version": 2, "length": 9, "sites": 3},
        {"version": 2, "length": 9, "sites": {"nowhere": {"width": 8, "heads": []}}},
        {"version": 2, "length": 9, "sites": {"encoder": {"width": 8, "heads": [{"kind": "no such kind"}]}}},
        {"version": 2, "length": "x", "sites": {"encoder": {"width": -8, "heads": [{"kind": "softmax"}]}}},
    ],
    ids=str,
)
def test_a_damaged_plan_in_the_config(plan: dict, tmp_path: Path) -> None:
    rewritten("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "headwise": plan}))
    with pytest.raises(InputError, match=str(tmp_path)):
        load(tmp_path)


def test_a_sharded_directory_loads_bit_for_bit(tmp_path: Path) -> None:
    new = rewritten("bert", tmp_path / "whole")
    new.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    again = load(tmp_path / "parts")
    assert all(torch.equal(x, new.state_dict()[key]) for key, x in again.state_dict().items())
    next((tmp_path / "parts").glob("*.safetensors")).unlink()
    with pytest.raises(InputError, match=r"names model-.*safetensors, which does not exist"):
        load(tmp_path / "parts")


def other_model(directory: Path) -> torch.nn.Module:
    """A saved torch encoder whose toeplitz heads were fitted."""
    model, batch = ALL["torch_encoder"]()
    plan = plan_for(model.eval(), batch, [TOEPLITZ])
    fitted = {
        (site, head, choice): {"profile": torch.randn(5)}
        for site, choices in plan.sites.items()
        for head, choice in enumerate(choices)
    }
    plan = Plan({**plan.model, "name": "encoder", "fingerprint": weights_hash(model)}, plan.length, plan.sites, fitted)
    new, _ = headwise.rewrite(model, plan)
    with OutputDirectory(directory, command="rewrite") as out:
        save(new, plan, out)
    return model


def test_a_plan_without_its_learned_tensors_is_refused(tmp_path: Path) -> None:
    model = other_model(tmp_path)
    load(tmp_path, model=model)
    (tmp_path / "plan.safetensors").unlink()
    with pytest.raises(InputError, match=r"its learned tensors, .*plan.safetensors, are missing"):
        load(tmp_path, model=model)


@pytest.mark.parametrize("keep", [0, 7, 300, 5000])
def test_truncated_weights_of_other_models(keep: int, tmp_path: Path) -> None:
    model = other_model(tmp_path)
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:keep])
    with pytest.raises(InputError, match=r"rewritten.safetensors does not hold the weights of this TransformerEncoder"):
        load(tmp_path, model=model)


def test_incomplete_weights_of_other_models(tmp_path: Path) -> None:
    model = other_model(tmp_path)
    change_weights(tmp_path / WEIGHTS, lambda x: {k: t for k, t in x.items() if "profile" not in k})
    with pytest.raises(InputError, match=r"rewritten.safetensors lacks tensors, 2 in all: heads.0.groups.0.profile"):
        load(tmp_path, model=model)
