"""The symmetries of attention and convolution, measured on modules; and symmetry breaking that must be detected."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import InputError, NonFiniteError, ShapeError
from headwise.nn import GridAttention, LearnedQuery, MultiHead
from headwise.outputs import json_text
from headwise.theory import (
    Symmetry,
    check_equivariance,
    check_invariance,
    flips,
    permutations,
    quarter_turns,
    translations,
)
from headwise.theory.groups import SymmetryGroup, edge_distance

EXACT, ROUNDING, BORDER_ONLY = Symmetry.EXACT, Symmetry.ROUNDING, Symmetry.BORDER_ONLY
APPROXIMATE, BROKEN = Symmetry.APPROXIMATE, Symmetry.BROKEN
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
SIDES = {1: (24,), 2: (12, 14), 3: (8, 9, 10)}
GROUPS = [permutations(4), translations(2), flips(), quarter_turns()]


def conv(dims: int, kernel: int, mode: str = "zeros", **options: Any) -> nn.Module:
    options = {"padding": kernel // 2, "padding_mode": mode, **options}
    return CONV[dims](2, 3, kernel, **options).eval()


def grid(dims: int, **kind: Any) -> Tensor:
    return torch.randn(2, 2, *SIDES[dims], **kind)


class Moved(nn.Module):
    """A layer after something was added to its input: a positional encoding when the addition depends on the place."""

    added: Tensor

    def __init__(self, layer: nn.Module, added: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("added", added)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.added)


@pytest.mark.parametrize("group", [permutations(4), translations(3), flips()], ids=lambda g: g.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_self_attention_is_equivariant_without_positions(group: SymmetryGroup, dtype: torch.dtype) -> None:
    layer, x = MultiHead(12, 3, key_width=(2, 4, 3)).eval().to(dtype), torch.randn(2, 9, 12, dtype=dtype)
    report = check_equivariance(layer, group, x)
    assert report.verdict in (EXACT, ROUNDING), report
    assert report.border_width == 0
    assert report.worst.maximal <= 1e-14
    assert report.to_verdict().holds is True
    broken = check_equivariance(Moved(layer, torch.randn(9, 12, dtype=dtype)).eval(), group, x)
    assert broken.verdict is BROKEN, broken
    assert broken.to_verdict().holds is False
    assert broken.worst.relative > 0.1
    assert check_invariance(layer, group, x).verdict is BROKEN


def test_torch_attention_is_equivariant_too() -> None:
    layer, x = nn.MultiheadAttention(12, 3, batch_first=True).eval(), torch.randn(2, 9, 12)
    assert check_equivariance(layer, permutations(), x, call=lambda m, x: m(x, x, x)[0]).holds
    first = nn.MultiheadAttention(12, 3).eval()
    assert check_equivariance(
        first, permutations(), x.transpose(0, 1), axes=(0,), call=lambda m, x: m(x, x, x)[0]
    ).holds
    encoder = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True).eval()
    assert check_equivariance(encoder, permutations(), x).holds


@pytest.mark.parametrize("group", [permutations(4), translations(3), flips()], ids=lambda g: g.name)
def test_learned_queries_pool_invariantly_and_not_equivariantly(group: SymmetryGroup) -> None:
    layer, x = LearnedQuery(12, 9, 3).eval(), torch.randn(2, 9, 12)
    report = check_invariance(layer, group, x)
    assert report.holds, report
    assert report.to_verdict().holds is True
    assert check_equivariance(layer, group, x).verdict is BROKEN
    assert check_invariance(Moved(layer, torch.randn(9, 12)).eval(), group, x).verdict is BROKEN


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("group", GROUPS, ids=lambda g: g.name)
def test_grid_attention_and_pointwise_convolution_commute_with_permutations(dims: int, group: SymmetryGroup) -> None:
    if dims == 1 and group.name == "quarter turns":
        return
    x = grid(dims)[..., :5]
    for layer in (GridAttention(2, 1).eval(), conv(dims, 1)):
        report = check_equivariance(layer, group, x, axes="grid")
        assert report.verdict in (EXACT, ROUNDING), report


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_convolution_commutes_with_translations_and_with_nothing_else(dims: int) -> None:
    x, circular, padded = grid(dims), conv(dims, 3, "circular"), conv(dims, 3)
    assert check_equivariance(circular, translations(), x, axes="grid").verdict in (EXACT, ROUNDING)
    report = check_equivariance(padded, translations(), x, axes="grid")
    assert report.verdict is BORDER_ONLY, report
    assert report.border_width == 1
    assert report.to_verdict().holds is False
    for element in report.elements:
        interior, border = element.float64.interior, element.float64.border
        assert interior is not None
        assert border is not None
        assert interior.maximal < 1e-14 < 0.01 < border.maximal
    for layer in (circular, padded):
        for check in (check_equivariance, check_invariance):
            assert check(layer, permutations(), x, axes="grid").verdict is BROKEN
        assert check_equivariance(layer, flips(), x, axes="grid").verdict is BROKEN
        if dims > 1:
            assert check_equivariance(layer, quarter_turns(), x, axes="grid").verdict is BROKEN


@pytest.mark.parametrize(
    "kernel, options, width",
    [
        (3, {}, 1),
        (5, {}, 2),
        (7, {}, 3),
        (3, {"dilation": 2, "padding": 2}, 2),
        (3, {"padding_mode": "reflect"}, 1),
        (3, {"padding_mode": "replicate"}, 1),
        (5, {"padding": 0}, 1),  # a smaller output; only positions at the seam differ
        (3, {"padding": 0}, 1),
    ],
)
def test_the_width_of_the_border_is_the_reach_of_the_kernel(kernel: int, options: dict[str, Any], width: int) -> None:
    report = check_equivariance(conv(2, kernel, **options), translations(2), torch.randn(1, 2, 24, 25), axes="grid")
    assert report.verdict is BORDER_ONLY, report
    assert report.border_width == width


def test_a_strided_convolution_moves_its_output_by_one_where_the_input_moves_by_the_stride() -> None:
    x = torch.randn(1, 2, 32, 32)
    layer = conv(2, 3, stride=2)
    assert check_equivariance(layer, translations(2, stride=2), x, axes="grid").verdict is BORDER_ONLY
    assert check_equivariance(layer, translations(2), x, axes="grid").verdict is BROKEN
    circular = conv(2, 3, "circular", stride=2)
    assert check_equivariance(circular, translations(2, stride=2), x, axes="grid").holds


def test_layers_widen_the_border_and_a_grid_without_interior_is_broken() -> None:
    stack = nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv1d(2, 2, 5, padding=2)).eval()
    report = check_equivariance(stack, translations(2), torch.randn(1, 2, 40), axes="grid")
    assert (report.verdict, report.border_width) == (BORDER_ONLY, 3)
    small = check_equivariance(stack, translations(2), torch.randn(1, 2, 7), axes="grid")
    assert (small.verdict, small.border_width) == (BROKEN, None)


def test_window_attention_is_border_only_and_a_cyclic_relative_bias_is_equivariant() -> None:
    n, x = 20, torch.randn(2, 20, 12)
    layer = MultiHead(12, 3).eval()
    apart = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    window = check_equivariance(layer, translations(2), x, call=lambda m, x: m(x, pair_mask=apart <= 2))
    assert (window.verdict, window.border_width) == (BORDER_ONLY, 2), window
    relative = torch.randn(n)[(torch.arange(n)[:, None] - torch.arange(n)) % n]
    biased: Any = lambda m, x: m(x, attn_bias=relative.to(x.dtype))  # noqa: E731
    assert check_equivariance(layer, translations(2), x, call=biased).holds
    assert check_equivariance(layer, permutations(), x, call=biased).verdict is BROKEN
    assert check_equivariance(layer, translations(2), x, call=lambda m, x: m(x, causal=True)).verdict is BROKEN


def test_a_symmetric_kernel_commutes_with_flips_and_rotations_for_every_padding() -> None:
    layer: Any = conv(2, 3)
    with torch.no_grad():
        by_distance = torch.tensor([[2, 1, 2], [1, 0, 1], [2, 1, 2]])
        layer.weight.copy_(torch.randn(3, 2, 3)[:, :, by_distance])
    x = grid(2)
    assert check_equivariance(layer, quarter_turns(), x, axes="grid").holds
    assert check_equivariance(layer, flips(), x, axes="grid").holds


@pytest.mark.parametrize("sides", [(9,), (9, 9), (8, 9)])
def test_positions_that_do_not_move_are_no_evidence(sides: tuple[int, ...]) -> None:
    """A function of the position alone equals its flip in the middle row, but has no symmetry."""
    place = torch.randn(1, 1, *sides)
    groups = [flips(), quarter_turns()] if len(set(sides)) == 1 and len(sides) > 1 else [flips()]
    for group in groups:
        report = check_equivariance(lambda x: x * 0 + place.to(x), group, torch.randn(1, 1, *sides), axes="grid")
        assert report.verdict is BROKEN, report


def test_a_defect_in_the_middle_is_not_a_border() -> None:
    spot = torch.zeros(24)
    spot[6] = 1.0
    report = check_equivariance(Moved(nn.Tanh(), spot).eval(), translations(2), grid(1), axes="grid")
    assert report.verdict is BROKEN, report
    edge = torch.zeros(24)
    edge[0] = 1.0
    report = check_equivariance(Moved(nn.Tanh(), edge).eval(), translations(2), grid(1), axes="grid")
    assert (report.verdict, report.border_width) == (BORDER_ONLY, 1)


@pytest.mark.parametrize("strength, verdict", [(1e-4, APPROXIMATE), (1e-7, APPROXIMATE), (1.0, BROKEN)])
def test_a_small_violation_is_distinguished_from_rounding_even_below_float32_precision(
    strength: float, verdict: Symmetry
) -> None:
    layer = Moved(MultiHead(12, 3), strength * torch.randn(9, 12)).eval()
    report = check_equivariance(layer, permutations(), torch.randn(2, 9, 12))
    assert report.verdict is verdict, report
    assert 0.01 * strength < report.worst.relative < 10 * strength


def test_exact_means_bit_for_bit() -> None:
    report = check_equivariance(nn.ReLU().eval(), permutations(), torch.randn(2, 9, 12))
    assert report.verdict is EXACT
    assert all(element.given.whole.maximal == 0 for element in report.elements)
    report = check_invariance(lambda x: x.sum(-2), permutations(), torch.randn(2, 500, 12))
    assert report.verdict is ROUNDING
    assert report.worst.given.whole.maximal > 0
    assert report.worst.maximal / report.scale <= report.threshold
    assert torch.finfo(torch.float32).eps <= report.floor < 1e-5


def test_a_violation_below_the_precision_of_the_dtype_is_not_exact() -> None:
    layer = Moved(nn.Identity(), 1e-6 * torch.rand(9, 12)).eval().to(torch.bfloat16)
    report = check_equivariance(layer, permutations(), torch.randn(2, 9, 12).to(torch.bfloat16) + 4)
    assert report.verdict is APPROXIMATE, report


def test_the_threshold_of_a_module_with_float32_parts_is_that_of_float32() -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.float() - x.float().mean(-2, keepdim=True)).to(x.dtype)

    report = check_equivariance(Norm().eval(), permutations(), torch.randn(2, 100, 12))
    assert report.verdict is ROUNDING, report
    assert any("eps 1e-07 after conversion to float64" in note for note in report.notes)
    broken = check_equivariance(Moved(Norm(), torch.randn(100, 12)).eval(), permutations(), torch.randn(2, 100, 12))
    assert broken.verdict is BROKEN


def test_rounding_is_assumed_for_a_function_that_cannot_run_in_float64() -> None:
    layer = MultiHead(12, 3).eval()
    report = check_equivariance(lambda x: layer(x), permutations(), torch.randn(2, 9, 12))
    assert report.verdict is ROUNDING, report
    assert any("assumed to be 256 eps" in note for note in report.notes)


def test_integer_ids_are_permuted_along_their_only_axis() -> None:
    model = nn.Sequential(nn.Embedding(50, 12), MultiHead(12, 3)).eval()
    assert check_equivariance(model, permutations(), torch.arange(18).reshape(2, 9)).holds


def test_training_mode_gives_a_warning_and_the_module_does_not_change() -> None:
    model = nn.Sequential(nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before, x = {k: v.clone() for k, v in model.state_dict().items()}, grid(1)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=r"Sequential is in training mode: dropout.*\.eval\(\)"):
        report = check_equivariance(model, permutations(), x, axes="grid")
    assert torch.equal(torch.rand(1), expected)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert report.training
    assert not report.deterministic
    assert report.verdict is BROKEN
    assert report.to_verdict().holds is None
    assert check_equivariance(model.eval(), permutations(), x, axes="grid").holds


def test_randomness_is_not_mistaken_for_rounding() -> None:
    """Noise makes two runs differ by as much as a broken symmetry, so it must not raise the threshold."""

    def noisy(x: Tensor) -> Tensor:
        return x.float() * torch.rand_like(x).float()  # different random numbers in each run

    report = check_equivariance(noisy, permutations(), torch.randn(2, 9, 12))
    assert report.verdict is BROKEN, report
    assert report.to_verdict().failed_premises == ("two runs on one input agree",)


def test_a_constant_input_fails_the_premises() -> None:
    report = check_equivariance(conv(1, 3, "circular"), permutations(), torch.ones(1, 2, 12), axes="grid")
    assert not report.moved
    assert report.to_verdict().failed_premises == ("every element moves the input",)
    assert any("use a random x" in note for note in report.notes)


def test_the_report_is_plain_data() -> None:
    report = check_equivariance(conv(2, 3), translations(1), grid(2), axes="grid")
    plain = json.loads(json_text(report.to_json()))
    assert plain["verdict"] == "BORDER ONLY"
    assert plain["border_width"] == 1
    assert plain["worst"] == report.worst.name
    assert len(plain["elements"]) == len(report.elements) == 6  # two axes and the diagonal, there and back
    assert plain["elements"][0]["float64"]["border"]["relative"] > 0.01
    assert "BORDER ONLY, border 1 wide; worst translation" in str(report)


def test_number_of_elements_of_each_group() -> None:
    def names(group: SymmetryGroup, *sizes: int) -> list[str]:
        return [element.name for element in group.elements(sizes)]

    assert len(names(permutations(5), 4)) == 5
    swap = torch.tensor([[1.0], [0.0]])
    assert all(torch.equal(element.act(swap.flip(0), (0,)), swap) for element in permutations(20).elements((2,)))
    assert names(translations(1), 9) == ["translation (1,)", "translation (-1,)"]
    assert len(names(translations(2), 9, 9, 9)) == 16
    assert names(flips(), 4, 4) == ["flip of axes (0,)", "flip of axes (1,)", "flip of axes (0, 1)"]
    assert len(names(quarter_turns(), 4, 4, 4)) == 9
    assert len(names(flips(), 4, 4, 4)) == 7


def test_elements_act_as_named() -> None:
    x = torch.arange(6.0).reshape(1, 1, 2, 3)
    where = (2, 3)
    assert torch.equal(flips().elements((2, 3))[1].act(x, where)[0, 0], torch.tensor([[2.0, 1, 0], [5, 4, 3]]))
    assert torch.equal(
        quarter_turns().elements((2, 3))[0].act(x, where)[0, 0], torch.tensor([[2.0, 5], [1, 4], [0, 3]])
    )
    assert torch.equal(translations(1).elements((2, 3))[2].act(x, where)[0, 0], torch.tensor([[2.0, 0, 1], [5, 3, 4]]))
    shuffled = permutations(1).elements((2, 3))[0].act(x, where)
    assert shuffled.shape == x.shape
    assert not torch.equal(shuffled, x)
    assert torch.equal(shuffled.flatten().sort().values, x.flatten())


def test_depth_counts_steps_from_the_edge_and_from_the_seam() -> None:
    assert edge_distance((5,), [0]).tolist() == [0, 1, 2, 1, 0]
    depth = translations(3).elements((9,))[4].depth
    assert depth is not None
    assert depth((9,)).tolist() == [0, 1, 0, 0, 1, 2, 2, 1, 0]
    assert edge_distance((3, 4), [1]).tolist() == [[0, 1, 1, 0]] * 3


@pytest.mark.parametrize(
    "call, error, sentence",
    [
        (
            lambda: check_equivariance(nn.ReLU().eval(), quarter_turns(), torch.ones(1, 5, 2)),
            ShapeError,
            "needs two axes",
        ),
        (lambda: check_equivariance(nn.ReLU().eval(), flips(), torch.ones(1, 1, 2)), ShapeError, "single position"),
        (lambda: check_equivariance(nn.ReLU().eval(), flips(), torch.ones(5)), ShapeError, r"no axes 'tokens'"),
        (lambda: check_equivariance(nn.ReLU().eval(), flips(), torch.ones(5, 2), axes="grid"), ShapeError, "'grid'"),
        (lambda: check_equivariance(nn.ReLU().eval(), flips(), torch.ones(5, 2), axes="rows"), InputError, "'rows'"),  # pyright: ignore
        (
            lambda: check_equivariance(nn.ReLU().eval(), translations(5), torch.ones(5, 2)),
            ShapeError,
            "needs longer sides",
        ),
        (
            lambda: check_equivariance(nn.ReLU().eval(), flips(), torch.full((5, 2), torch.nan)),
            NonFiniteError,
            "10 non-",
        ),
        (
            lambda: check_equivariance(lambda x: x.mean(-2), flips(), torch.rand(1, 5, 2)),
            ShapeError,
            "check_invariance",
        ),
        (
            lambda: check_equivariance(lambda x: x[:, 1:], permutations(), torch.rand(1, 5, 2)),
            ShapeError,
            "5 positions",
        ),
        (lambda: check_equivariance(lambda x: (x, x), flips(), torch.rand(5, 2)), InputError, "returned tuple.*call="),
        (lambda: check_equivariance(lambda x: x.log(), flips(), -torch.rand(5, 2)), NonFiniteError, "10 non-finite"),
        (lambda: permutations(0), InputError, "samples must be at least 1, but is 0"),
        (lambda: translations(0), InputError, "max_shift and stride"),
    ],
)
def test_bad_input_is_reported(call, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        call()
