"""Converting layers and models: equal outputs, receipts, reasons for what is left, saving, exporting, training."""

from __future__ import annotations

import copy
import json
import warnings
from typing import Any, cast

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from headwise.convolution import convert, exact, soft, soft_separable, to_convolution, with_content
from headwise.errors import HeadwiseError, InputError, ShapeError, UnsupportedError
from headwise.nn.kernel_attention import KernelAttention, QuadraticAttention, ShiftAttention
from headwise.testing.contract import normal
from headwise.testing.counting import count_multiply_adds


def small_cnn() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8), nn.Conv2d(8, 16, 1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def test_a_whole_network() -> None:
    model, x = small_cnn().double().eval(), normal(2, 3, 8, 9, seed=0)
    before = copy.deepcopy(model.state_dict())
    new, receipt = convert(model, probe=x)
    torch.testing.assert_close(new(x), model(x), rtol=0, atol=1e-13)
    assert [part.what for part in receipt.parts] == ["0", "3.0", "3.1"]
    assert receipt.left == ()
    assert receipt.largest_change == (new(x) - model(x)).abs().max().item()
    assert receipt.parameters_before == receipt.parameters_after == sum(p.numel() for p in model.parameters())
    assert receipt.cost_before.multiply_adds == count_multiply_adds(lambda: model(x)).products
    assert receipt.cost_before == receipt.cost_after
    assert not any(isinstance(part, nn.Conv2d) for part in new.modules())
    assert isinstance(model[0], nn.Conv2d)  # what was given is as it was
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    json.dumps(receipt.to_json())


def test_and_back_bit_by_bit() -> None:
    model = small_cnn()
    back = to_convolution(convert(model)[0])
    assert str(back) == str(model)
    for name, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name


@pytest.mark.parametrize("mode", [exact, soft(6.0), soft_separable(6.0)])
def test_the_new_model_saves_loads_exports_and_trains(mode: Any, tmp_path: Any) -> None:
    new, _ = convert(small_cnn(), mode)
    x = normal(4, 3, 8, 8, seed=0, dtype=torch.float32)
    torch.save(new.state_dict(), tmp_path / "m.pt")
    other, _ = convert(small_cnn(), mode)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.load_state_dict(torch.load(tmp_path / "m.pt"))
    assert torch.equal(other.eval()(x), new.eval()(x))
    program = torch.export.export(new, (x,))
    torch.testing.assert_close(program.module()(x), new(x))
    new.train()
    optimizer = torch.optim.Adam(new.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(new(x), torch.tensor([0, 1, 2, 3]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_soft_heads_learn_where_to_look_and_sharp_ones_do_not() -> None:
    def gradient(alpha: float) -> float:
        layer, _ = convert(nn.Conv2d(3, 4, 3, padding=1).double(), soft(alpha))
        assert isinstance(layer, QuadraticAttention)
        layer(normal(1, 3, 6, 6, seed=0)).square().sum().backward()
        assert layer.centres.grad is not None
        return layer.centres.grad.abs().max().item()

    torch.manual_seed(0)
    assert gradient(5.0) > 1e-3
    torch.manual_seed(0)
    assert gradient(30.0) < 1e-9


@pytest.mark.parametrize("mode", [soft, soft_separable])
def test_the_error_of_soft_heads_falls_by_e_for_each_alpha(mode: Any) -> None:
    conv = nn.Conv2d(8, 8, 3, padding=1).double()
    x = normal(1, 8, 12, 12, seed=0)
    errors = [convert(conv, mode(alpha), probe=x)[1] for alpha in (6.0, 10.0)]
    ratio = errors[0].largest_change / errors[1].largest_change
    assert ratio == pytest.approx(torch.tensor(4.0).exp().item(), rel=0.1)
    for alpha, receipt in zip((6.0, 10.0), errors, strict=True):
        assert 2 < receipt.largest_change / receipt.scale * torch.tensor(alpha).exp().item() < 40  # documented as 20


@pytest.mark.parametrize("border", ["zeros", "reflect"])
def test_exact_heads_run_as_the_convolution_itself(border: str) -> None:
    conv = nn.Conv2d(32, 32, 3, padding=1, padding_mode=border)
    layer, _ = convert(conv)
    x = normal(2, 32, 16, 16, seed=0, dtype=torch.float32).requires_grad_()
    expected, output = conv(x), layer(x)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    ours = torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])
    theirs = torch.autograd.grad(expected.square().sum(), [x, *conv.parameters()])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    assert "convolution" in type(output.grad_fn).__name__.lower()


@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d])
def test_a_transposed_convolution_is_refused_with_the_reason(kind: type[nn.Module]) -> None:
    with pytest.raises(UnsupportedError, match=r"heads are columns of P, not rows.*upsample and convolve instead"):
        convert(kind(2, 2, 3))


def test_what_is_left_is_listed_with_the_reason() -> None:
    class Doubled(nn.Conv2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    first, tied = nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)
    other = nn.Conv2d(2, 2, 3)
    other.weight = tied.weight
    hooked = nn.Conv2d(2, 2, 3)
    hooked.register_forward_hook(lambda *_: None)
    replaced = nn.Conv2d(2, 2, 3)
    replaced.forward = lambda input: 2 * input
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.nn.quantized.dynamic.Conv2d(2, 2, 3)
        scripted = torch.jit.script(nn.Conv2d(2, 2, 3))
    model = nn.ModuleDict(
        {
            "good": first,
            "again": first,
            "up": nn.ConvTranspose2d(2, 2, 3),
            "own": Doubled(2, 2, 3),
            "tied": tied,
            "other": other,
            "hooked": hooked,
            "lazy": nn.LazyConv2d(2, 3),
            "normed": torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 3)),
            "pruned": torch.nn.utils.prune.l1_unstructured(nn.Conv2d(2, 2, 3), "weight", 0.5),
            "replaced": replaced,
            "meta": nn.Conv2d(2, 2, 3, device="meta"),
            "quantised": quantised,
            "scripted": scripted,
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        new, receipt = convert(model)
    assert [part.what for part in receipt.parts] == ["good"]
    new = cast(Any, new)
    assert isinstance(new["good"], ShiftAttention)
    assert new["good"] is new["again"]  # one layer in two places stays one
    why = {entry.what: entry.why for entry in receipt.left}
    assert set(why) == {
        "up",
        "own",
        "tied",
        "other",
        "hooked",
        "lazy",
        "normed",
        "pruned",
        "replaced",
        "meta",
        "quantised",
        "scripted",
    }
    assert "torch.jit: convert before" in why["scripted"]
    assert "prune" in why["pruned"]
    assert "forward was replaced" in why["replaced"]
    assert "meta device" in why["meta"]
    assert "quantised weights" in why["quantised"]
    assert "Doubled may compute something else" in why["own"]
    assert "also that of other" in why["tied"]
    assert "hooks" in why["hooked"]
    assert "no weights yet" in why["lazy"]
    assert "parametrization" in why["normed"]


def test_a_copy_beside_weights_that_a_hook_computes_still_computes_them() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the older weight_norm is deprecated, and still in use
        normed = torch.nn.utils.weight_norm(nn.Conv2d(2, 2, 3))
    model = nn.Sequential(normed, torch.nn.utils.prune.l1_unstructured(nn.Conv2d(2, 2, 3), "weight", 0.5))
    model.append(nn.Conv2d(2, 2, 3))
    x = torch.randn(1, 2, 9, 9)
    model(x)  # weights with a graph, which copy.deepcopy refuses
    new, receipt = convert(model)
    assert len(receipt.left) == 2
    torch.testing.assert_close(new(x), model(x))
    with torch.no_grad():
        cast(Any, new)[0].weight_g.mul_(2)
    assert not torch.allclose(new(x), model(x))


MODES = {"exact": exact, "soft": soft(15.0), "separable": soft_separable(15.0), "content": with_content(15.0)}


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_layout_and_empty_batches_are_those_of_the_convolution(mode: Any, axes: int) -> None:
    layout = (torch.channels_last, torch.channels_last_3d)[axes - 2]
    conv = (nn.Conv2d, nn.Conv3d)[axes - 2](4, 6, 3, stride=2, padding=1).to(memory_format=layout)
    layer, receipt = convert(conv, mode)
    assert receipt.weights == "float32, channels last"
    x = torch.randn(2, 4, *(5, 6, 7)[:axes])
    given = x.contiguous(memory_format=layout)
    assert layer(given).is_contiguous(memory_format=layout)
    assert conv(given).is_contiguous(memory_format=layout)
    torch.testing.assert_close(layer(given), layer(x))
    none = x[:0].requires_grad_()
    empty = layer(none)
    assert empty.shape == conv(none).shape
    gradients = torch.autograd.grad(empty.sum(), [none, layer.weight, layer.bias])
    assert [g.abs().sum() for g in gradients] == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_half_precision_and_autocast_are_as_near_as_the_convolution(mode: Any, dtype: torch.dtype) -> None:
    """Twice the convolution's own rounding, plus that of a soft head's weights; values a thousandth below overflow."""
    conv, x = nn.Conv2d(4, 6, 3, padding=1), torch.randn(2, 4, 8, 8)
    truth, layer = conv(x), convert(conv, mode)[0]
    with torch.autocast("cpu", dtype=dtype):
        ours, theirs = layer(x), conv(x)
    assert ours.dtype == theirs.dtype == dtype
    rounding = torch.finfo(dtype).eps * truth.abs().max()
    assert (ours - truth).abs().max() <= 2 * (theirs - truth).abs().max() + rounding
    conv = conv.to(dtype)
    layer, receipt = convert(conv, mode)
    assert receipt.weights.startswith(str(dtype).removeprefix("torch."))
    with torch.no_grad():
        conv.weight.fill_(1.0)[:, ::2] = -1.0
        cast(Any, layer).weight.copy_(conv.weight.flatten(2).reshape(cast(Any, layer).weight.shape))
    large = torch.full((1, 4, 8, 8), 0.999 * torch.finfo(torch.float16).max, dtype=dtype)
    assert layer(large).isfinite().all() == conv(large).isfinite().all() == torch.tensor(True)


def test_nothing_is_half_converted() -> None:
    model = small_cnn()
    text = str(model)
    with pytest.raises(ShapeError, match=r"channels"):
        # a probe that does not fit: no model comes back, and none was touched
        convert(nn.Conv2d(3, 8, 3), probe=torch.zeros(1, 4, 8, 8))
    with pytest.raises(HeadwiseError, match=r"Sequential does not run on a probe of shape \(1, 4, 8, 8\)"):
        convert(model, probe=torch.zeros(1, 4, 8, 8))
    assert str(model) == text


def test_an_even_kernel_with_same_padding_is_converted_and_said() -> None:
    conv = nn.Conv1d(2, 2, 4, padding="same").double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer, receipt = convert(conv)
    assert receipt.largest_change < 1e-15
    assert receipt.notes == ("padding='same' with an odd reach: one cell more is padded after the map than before it",)
    assert cast(Any, to_convolution(layer)).padding == "same"


def test_models_and_modes_that_cannot_be_used() -> None:
    with pytest.raises(InputError, match=r"nothing to convert in Linear: it holds no nn.Conv1d"):
        convert(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"alpha must be a positive number, but is -1"):
        soft(-1.0)
    with pytest.raises(UnsupportedError, match=r"heads of QuadraticAttention spread over several cells"):
        to_convolution(convert(nn.Conv1d(1, 1, 3), soft(5.0))[0])
    with pytest.raises(InputError, match=r"Linear holds no ShiftAttention"):
        to_convolution(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match=r"not real floating point"):
        convert(nn.Conv1d(1, 1, 3, dtype=torch.complex64))


def test_frozen_weights_and_the_training_flag_are_kept() -> None:
    model = small_cnn()
    cast(Any, model[0]).weight.requires_grad_(False)
    model[3].eval()
    new = cast(Any, convert(model)[0])
    assert [new[0].weight.requires_grad, new[0].bias.requires_grad] == [False, True]
    assert new.training
    assert not new[3][0].training
    assert isinstance(new[3][1], KernelAttention)


class ReadsItsConvolution(nn.Module):
    """Pads as its convolution needs, and sizes its output by it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3, stride=2, dilation=2, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reach = self.conv.dilation[0] * (self.conv.kernel_size[0] - 1)
        return self.conv(nn.functional.pad(x, (reach, 0))) * self.conv.out_channels


@pytest.mark.parametrize("mode", [exact, soft(20.0), soft_separable(20.0), with_content(20.0)])
def test_models_may_read_the_attributes_of_a_convolution(mode: Any) -> None:
    for name in ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode", "output_padding"):
        for conv in (nn.Conv2d(2, 4, (3, 1), padding="same"), nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")):
            assert getattr(convert(conv, mode)[0], name) == getattr(conv, name)
    layer: Any = convert(nn.Conv3d(2, 4, 1), mode)[0]
    assert (layer.in_channels, layer.out_channels, layer.transposed) == (2, 4, False)
    if mode is exact:
        model, x = ReadsItsConvolution(), torch.randn(1, 2, 9)
        torch.testing.assert_close(convert(model, mode)[0](x), model(x))
