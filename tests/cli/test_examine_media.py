"""`headwise examine MODEL --images DIR` and `--audio FILE`, from a saved model with its processor to the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.cli.main import main
from headwise.models.load import load_model
from headwise.models.media.images import image_input
from tests.models.saved_models import save, save_images, save_sound

pytest.importorskip("transformers")
pytest.importorskip("PIL")
pytest.importorskip("soundfile")

CLS, PATCHES = "[CLS]", [f"{row},{column}" for row in range(4) for column in range(4)]
REGISTERS = [f"[REG{i}]" for i in range(4)]
SEEN: dict[str, tuple[int, list[str]]] = {  # heads, and the names of positions
    "vit": (8, [CLS, *PATCHES]),
    "deit": (8, [CLS, "[DIST]", *PATCHES]),
    "beit": (8, [CLS, *PATCHES]),
    "dinov2": (8, [CLS, *PATCHES]),
    "dinov2_with_registers": (8, [CLS, *REGISTERS, *PATCHES]),
    "clip": (8, [CLS, *PATCHES]),
    "siglip": (12, PATCHES),  # the last four pool the patches
    "trocr": (16, []),  # an encoder of images, and a decoder of text whose attention transformers writes out
    "swin": (8, [f"{row},{column}" for row in range(16) for column in range(16)]),
}
HEARD: dict[str, tuple[int, list[str]]] = {
    "whisper": (24, [f"{i / 50:.2f} s" for i in range(50)]),
    "wav2vec2": (8, [f"{i / 50:.2f} s" for i in range(49)]),
    "hubert": (8, [f"{i / 50:.2f} s" for i in range(49)]),
    "sew": (8, [f"{i / 25:.2f} s" for i in range(24)]),  # which reads two frames as one
    "ast": (8, []),
}


def examined(*arguments: str, out: Path, more: tuple[str, ...] = ("--no-ablations",)) -> dict[str, Any]:
    assert main(["examine", *arguments, "-o", str(out), "--quiet", *more]) == 0
    assert (out / "report.html").stat().st_size > 10_000
    return json.loads((out / "report.json").read_text())


@pytest.mark.parametrize("name", SEEN)
def test_images(name: str, tmp_path: Path) -> None:
    images = save_images(tmp_path / "images")
    facts = examined(str(save(name, tmp_path)), "--images", str(images), out=tmp_path / "out")
    heads, names = SEEN[name]
    assert len(facts["records"]) == heads
    assert facts["excerpt"]["tokens"] == names
    assert facts["inputs"]["words"] == {"item": "image", "items": "images", "unit": "patch", "units": "patches"}
    assert (facts["inputs"]["kind"], facts["inputs"]["texts"]) == ("images", 2)
    assert facts["unseen"] == []
    if name == "trocr":
        assert [site["kind"] for site in facts["sites"]] == ["self", "self", "self", "cross"]
    elif name != "swin":
        assert {site["longest"] for site in facts["sites"]} == {len(names)}


@pytest.mark.parametrize("name", HEARD)
def test_recordings(name: str, tmp_path: Path) -> None:
    sound = save_sound(tmp_path / "x.wav")
    facts = examined(str(save(name, tmp_path)), "--audio", str(sound), out=tmp_path / "out")
    heads, names = HEARD[name]
    assert len(facts["records"]) == heads
    assert facts["excerpt"]["tokens"] == names
    assert facts["inputs"]["words"]["item"] == "recording"
    assert facts["unseen"] == []
    if names:
        assert facts["sites"][0]["longest"] == len(names)
    if name == "whisper":
        assert [site["kind"] for site in facts["sites"]] == ["self"] * 2 + ["self", "cross"] * 2


def test_a_vision_model_has_collapse_curves(tmp_path: Path) -> None:
    images = save_images(tmp_path / "images", 1)
    facts = examined(str(save("vit", tmp_path)), "--images", str(images), out=tmp_path / "out", more=())
    assert facts["ablations"]["supported"]
    assert facts["paths"]["supported"]


def test_a_model_with_two_encoders_is_examined_by_what_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = str(save("clip", tmp_path))
    seen = examined(model, "--images", str(save_images(tmp_path / "images", 1)), out=tmp_path / "images-report")
    assert "its vision_model is examined, as it is given images only" in capsys.readouterr().err
    (tmp_path / "x.txt").write_text("a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7 8 9 " * 3)
    read = examined(model, "--text", str(tmp_path / "x.txt"), out=tmp_path / "text-report")
    assert "its text_model is examined, as it is given text only" in capsys.readouterr().err
    assert (seen["sites"][0]["longest"], read["sites"][0]["longest"]) == (17, 24)
    assert [site["causal"] for site in seen["sites"] + read["sites"]] == [False, False, True, True]
    assert read["inputs"]["words"]["unit"] == "token"


def test_a_model_that_needs_both_gets_both(tmp_path: Path) -> None:
    model, images = save("vilt", tmp_path), save_images(tmp_path / "images", 1)
    (batch,) = image_input(load_model(str(model)), images, limit=1).batches
    assert {"input_ids", "pixel_values", "pixel_mask"} <= batch.keys()
    facts = examined(str(model), "--images", str(images), out=tmp_path / "out")
    assert len(facts["records"]) == 8
    assert facts["inputs"]["text"] == "a photograph"
    assert facts["sites"][0]["longest"] == batch["input_ids"].shape[1] + 17


def test_windows_belong_to_their_image(tmp_path: Path) -> None:
    """Entropies of Swin from P of transformers: a mean over the windows of each image, in float64."""
    from headwise.examination.measure.observe import observe

    loaded = load_model(str(save("swin", tmp_path)))
    batches = image_input(loaded, save_images(tmp_path / "images", 2), limit=2).batches
    pixels = torch.cat([batch["pixel_values"] for batch in batches])
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(3)  # away from uniform attention
    found = observe(loaded.model, {"pixel_values": pixels}, with_spectra=True)
    alone = [observe(loaded.model, batch, with_spectra=True)[0] for batch in batches]
    assert len(found) == 2
    loaded.model.set_attn_implementation("eager")
    weights: list[torch.Tensor] = []
    for name, module in loaded.model.named_modules():
        if name.endswith(".attention"):
            module.register_forward_hook(lambda module, args, output: weights.append(output[1]))
    with torch.no_grad():
        loaded.model(pixels)
    for image in range(2):
        entropies, tops = [], []
        for p in weights:  # (images x windows, heads, 16, 16)
            blocks = p.double().unflatten(0, (2, -1))[image]
            entropies.append(torch.special.entr(blocks).sum(-1).mean((0, 2)))
            tops.append(torch.linalg.svdvals(blocks)[..., 0].mean(0))
        torch.testing.assert_close(found[image].numbers["entropy"], torch.cat(entropies), rtol=1e-4, atol=1e-5)
        leading = found[image].leading
        assert leading is not None
        torch.testing.assert_close(leading[:, 0].double(), torch.cat(tops), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            found[image].numbers["entropy"], alone[image].numbers["entropy"], rtol=1e-4, atol=1e-5
        )
        assert found[image].lengths == [(16, 16)] * 3
    assert not torch.allclose(found[0].numbers["entropy"], found[1].numbers["entropy"], rtol=1e-3)
