"""Every sum of one pass equals the same quantity of a dense float64 P: torch calls and the compiled kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.examination.measure import streaming
from headwise.examination.measure.streaming import REACH, SAMPLED_ROWS, Workspace, stream
from headwise.operators._kernels import native
from headwise.operators._kernels.scores import Scores
from headwise.operators.masks import Mask


@pytest.fixture(params=["torch", "kernel"])
def path(request: pytest.FixtureRequest) -> str:
    if request.param == "kernel":
        request.getfixturevalue("kernels")
    return request.param


def call(path: str, scores: Scores, v: Tensor, **options: Any) -> streaming.HeadSums:
    """`stream` by one of its two paths, and a check that it was that one."""
    used: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        torch_path = streaming._stream
        patch.setattr(streaming, "_stream", lambda *args: (used.append("torch"), torch_path(*args))[1])
        found = stream(scores, v, **options)
    assert (used or ["kernel"]) == [path]
    return found


def dense_twin(scores: Scores, v: Tensor) -> dict[str, Tensor]:
    """The fields of HeadSums from all of P, row by row in float64."""
    (h, m, n), mask = scores.shape, scores.mask
    s = scores.scale * scores.q.double() @ scores.k.double().mT
    if mask.attn_bias is not None:
        s = s + mask.attn_bias.double()
    allowed = torch.ones(h, m, n, dtype=torch.bool)
    if mask.causal:
        allowed &= torch.arange(n) <= torch.arange(m).unsqueeze(-1) + (n - m)
    if mask.key_mask is not None:
        allowed &= mask.key_mask.unsqueeze(-2)
    if mask.pair_mask is not None:
        allowed &= mask.pair_mask
    s = s.masked_fill(~allowed, -torch.inf)
    p = torch.softmax(s, dim=-1).nan_to_num(0)  # a row of -inf
    rows = torch.linspace(0, m - 1, min(SAMPLED_ROWS, m)).round().long()
    return {
        "entropy": torch.special.entr(p).sum(-1),
        "row_maximum": p.amax(-1),
        "row_squares": p.square().sum(-1),
        "log_sum_exp": s.logsumexp(-1),
        "largest_score": s.amax((-2, -1)).clamp(min=-1e30),
        "received": p.sum(-2) / m,
        "diagonals": torch.stack([p.diagonal(o, -2, -1).sum(-1) for o in range(-(m - 1), n)], dim=-1),
        "visible": allowed.sum(-1).double(),
        "output": p @ v.double(),
        "values": v.double(),
        "sampled_rows": p[:, rows],
    }


def problem(h: int, m: int, n: int, k: int, d: int, **masks: Any) -> tuple[Scores, Tensor]:
    q, keys, v = 2 * torch.randn(h, m, k), torch.randn(h, n, k), torch.randn(h, n, d)
    return Scores(q, keys, k**-0.5, Mask(m, n, **masks)), v


def hidden_some(*shape: int) -> Tensor:
    mask = torch.rand(*shape) < 0.6
    mask[..., 0] = True
    return mask


def empty_rows(h: int, m: int, n: int) -> Tensor:
    mask = hidden_some(h, m, n)
    mask[:, 3:20] = False
    return mask


SHAPES = [(3, 40, 40, 8, 8), (2, 1, 1, 1, 1), (2, 1, 70, 16, 5), (1, 77, 130, 24, 33), (2, 200, 90, 33, 100)]
MASKS: dict[str, Any] = {
    "plain": lambda h, m, n: {},
    "causal": lambda h, m, n: {"causal": True},
    "key_mask": lambda h, m, n: {"key_mask": hidden_some(n)},
    "key_mask of a head, causal": lambda h, m, n: {"key_mask": hidden_some(h, n), "causal": True},
    "pair_mask": lambda h, m, n: {"pair_mask": hidden_some(m, n)},
    "pair_mask of a head": lambda h, m, n: {"pair_mask": hidden_some(h, m, n), "causal": True},
    "bias": lambda h, m, n: {"attn_bias": torch.randn(m, n)},
    "bias of a head": lambda h, m, n: {"attn_bias": 3 * torch.randn(h, 1, n), "key_mask": hidden_some(n)},
    "bias of -inf": lambda h, m, n: {"attn_bias": torch.zeros(m, n).masked_fill(~hidden_some(m, n), -torch.inf)},
    "queries without keys": lambda h, m, n: {"pair_mask": empty_rows(h, m, n)},
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_sum_equals_that_of_a_dense_p(shape: tuple[int, ...], name: str, path: str) -> None:
    h, m, n, k, d = shape
    masks = MASKS[name](h, m, n)
    scores, v = problem(h, m, n, k, d, **masks)
    found = call(path, scores, v, workspace=Workspace(7 * h * n))  # several blocks of rows
    for field, expected in dense_twin(scores, v).items():
        if field == "visible" and name == "bias of -inf":  # a bias hides nothing from the count
            continue
        actual = getattr(found, field).double()
        torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-6, msg=lambda text, f=field: f"{f}: {text}")


def test_extreme_scores_neither_overflow_nor_lose_small_weights(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "LARGE_SCORES", torch.inf)  # both paths in single precision
    scores, v = problem(2, 50, 60, 16, 8)
    for factor in (1e-6, 60.0, 1e4):
        sharp = Scores(scores.q * factor, scores.k, scores.scale, scores.mask)
        found, expected = call(path, sharp, v), dense_twin(sharp, v)
        # a score of size s has a rounding error of s eps, which is the relative error of its exponential
        rounding = 1e-5 + 2e-7 * float(expected["largest_score"].abs().amax())
        for field in ("output", "received", "row_maximum", "entropy"):
            torch.testing.assert_close(getattr(found, field).double(), expected[field], rtol=0, atol=4 * rounding)


def test_strided_and_half_precision_inputs(path: str) -> None:
    h, m, n, k, d = 4, 33, 47, 16, 16
    q, keys, v = torch.randn(m, h, k).bfloat16(), torch.randn(n, h, k).bfloat16(), torch.randn(n, h, d).bfloat16()
    q, keys, v = q.transpose(0, 1), keys.transpose(0, 1), v.transpose(0, 1)
    scores = Scores(q, keys, 0.3, Mask(m, n))
    found, expected = call(path, scores, v), dense_twin(scores, v)
    for field in expected:
        torch.testing.assert_close(getattr(found, field).double(), expected[field], rtol=2e-5, atol=2e-6)


def test_long_rows_keep_their_digits(path: str) -> None:
    """Sums of thousands of terms: nearly uniform rows, where every term counts."""
    scores, v = problem(1, 64, 12_000, 8, 4)
    scores = Scores(0.1 * scores.q, scores.k, scores.scale, scores.mask)
    found, expected = call(path, scores, v), dense_twin(scores, v)
    for field in ("entropy", "row_squares", "log_sum_exp", "diagonals", "received"):
        torch.testing.assert_close(getattr(found, field).double(), expected[field], rtol=4e-6, atol=1e-9)


def test_what_is_not_a_number_is_not_hidden(path: str) -> None:
    scores, v = problem(2, 30, 40, 8, 4)
    nan = torch.tensor([0x7FC00000, 0x7FC00001, -0x3FFFFF], dtype=torch.int32).view(torch.float32)  # of several kinds
    for x in nan:
        q = scores.q.clone()
        q[1, 7, 3] = x
        found = call(path, Scores(q, scores.k, scores.scale, scores.mask), v)
        for field in ("entropy", "row_maximum", "row_squares", "log_sum_exp", "output"):
            rows = getattr(found, field).reshape(2, 30, -1).isnan().any(-1)
            assert rows.nonzero().tolist() == [[1, 7]], field
        assert found.received.isnan().any(-1).tolist() == [False, True]


@pytest.mark.usefixtures("kernels")
def test_threads_do_not_change_the_sums() -> None:
    scores, v = problem(3, 300, 280, 16, 16, causal=True)
    one = stream(scores, v)
    torch.set_num_threads(3)
    try:
        three = stream(scores, v)
    finally:
        torch.set_num_threads(1)
    for name in ("output", "entropy", "received", "diagonals", "sampled_rows"):
        torch.testing.assert_close(getattr(three, name), getattr(one, name), rtol=1e-7, atol=1e-9)


@pytest.mark.usefixtures("kernels")
def test_a_model_of_double_precision_is_measured_in_single_precision() -> None:
    scores, v = problem(2, 20, 20, 4, 4)
    with native.switched("off"):
        expected = call("torch", scores, v)
    double = Scores(scores.q.double(), scores.k.double(), scores.scale, scores.mask)
    torch.testing.assert_close(call("kernel", double, v.double()).entropy, expected.entropy)


POSITIONS = {
    "all queries": torch.arange(60),
    "queries at the end": torch.arange(20, 80),
    "queries with gaps": torch.arange(80)[torch.arange(80) % 4 < 3],
}


@pytest.mark.parametrize("places", POSITIONS)
@pytest.mark.parametrize("entries", [1 << 19, 12000, 1000])
def test_queries_may_stand_anywhere_on_the_axis_of_keys(places: str, entries: int, path: str) -> None:
    """Several heads, or one, and several rows, or one, at a time; the kernel takes no gaps."""
    positions = POSITIONS[places]
    scores, v = problem(4, 60, 80, 8, 5, causal=True)
    s = scores.scale * scores.q.double() @ scores.k.double().mT
    p = torch.softmax(s.masked_fill(~scores.mask.rows(0, 60), -torch.inf), -1)
    offsets = torch.arange(80) - positions[:, None]
    on = [offsets == o for o in range(-int(positions[-1]), 80)]
    used = "torch" if places == "queries with gaps" else path
    found = call(used, scores, v, positions=positions, workspace=Workspace(entries))

    def close(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)

    close(found.diagonals, torch.stack([p[:, here].sum(-1) for here in on], -1))
    energy = [p[:, here].sum(-1).square() / max(1, int(here.sum())) for here in on]
    close(found.diagonal_energy, torch.stack(energy, -1))
    close(found.mass_within(4), p[:, offsets.abs() <= 4].sum(-1) / 60)
    close(found.profile()[:, REACH - 1], p[:, offsets == -1].sum(-1) / 60)
    assert found.profile().shape == (4, 2 * REACH + 1)


@pytest.mark.parametrize("causal", [False, True])
def test_large_scores_are_not_rounded_in_single_precision(causal: bool) -> None:
    """|S| around 5e4, two of them close together in every row: rounding them to single precision moves P by 1e-3."""
    torch.manual_seed(0)
    scores, v = problem(3, 40, 40, 16, 8, causal=causal)
    base = 2e2 * scores.k[:, :1]  # every key is nearly the same: differences of scores are of ordinary size
    scores = Scores(scores.q + base, base + 0.01 * scores.k, scores.scale, scores.mask)
    expected = dense_twin(scores, v)
    assert expected["largest_score"].min() > 1e4
    found = call("torch", scores, v)
    for name in ("entropy", "row_maximum", "row_squares", "received", "diagonals", "output", "sampled_rows"):
        torch.testing.assert_close(getattr(found, name).double(), expected[name], rtol=1e-5, atol=1e-6, msg=name)
