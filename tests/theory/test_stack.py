"""Stacks of attention weights: equal to modules, exact residuals, error messages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.linalg.norms import composite_norm
from headwise.nn import MultiHead
from headwise.operators import efficient
from headwise.theory.collapse import residual
from headwise.theory.stack import Layer, Stack, layer_of, random_stack


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def test_a_module_is_its_layer() -> None:
    for widths in (None, (3, 5)):
        module = MultiHead(8, 2, key_width=widths, value_width=widths).double()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.5)
        x = gaussian(6, 8)
        with torch.no_grad():
            torch.testing.assert_close(layer_of(module)(x), module(x))


def test_residuals_are_exact_where_differences_are_rounding() -> None:
    """Three layers in 400 digits: the last residual is far below what the difference of two states can show."""
    mpmath = pytest.importorskip("mpmath")
    for skip in (False, True):
        stack = random_stack(3, 2, 3, bias=0.3, skip=skip, generator=torch.Generator().manual_seed(0))
        x = 1e-4 * torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 1
        with mpmath.workdps(400):
            expected = _residual_in_many_digits(mpmath, stack, x)
        found = stack.residuals(x)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-300)
        assert (composite_norm(found[-1]) < 1e-30).item() is not skip
        torch.testing.assert_close(found[1], residual(stack.states(x)[1]), rtol=1e-3, atol=1e-14)


def _residual_in_many_digits(mpmath, stack: Stack, x: torch.Tensor) -> list[torch.Tensor]:
    matrix = lambda t: mpmath.matrix(t.tolist())  # noqa: E731
    y, found = matrix(x), []
    n, d = x.shape

    def rest(y) -> torch.Tensor:
        means = [mpmath.fsum(y[i, j] for i in range(n)) / n for j in range(d)]
        return torch.tensor([[float(y[i, j] - means[j]) for j in range(d)] for i in range(n)], dtype=torch.float64)

    found.append(rest(y))
    for layer in stack.layers:
        out = y.copy() if stack.skip else mpmath.zeros(n, d)
        for h in range(len(layer.wq)):
            q = y * matrix(layer.wq[h])
            for i in range(n):
                for j in range(q.cols):
                    q[i, j] += mpmath.mpf(layer.bq[h, j].item())
            s = q * (y * matrix(layer.wk[h])).T / mpmath.sqrt(layer.wq.shape[-1])
            p = s.apply(mpmath.exp)
            for i in range(n):
                total = mpmath.fsum(p[i, j] for j in range(n))
                for j in range(n):
                    p[i, j] /= total
            out += p * y * (matrix(layer.wv[h]) * matrix(layer.wo[h]))
        for i in range(n):
            for j in range(d):
                out[i, j] += mpmath.mpf(layer.bias[j].item())
        y = out
        found.append(rest(y))
    return found


def test_unusable_weights_are_reported() -> None:
    good = random_stack(2, 2, 6)
    broken = Layer(*(x.clone() for x in vars(good.layers[0]).values()))
    broken.wq[0, 0, 0] = torch.nan
    with pytest.raises(HeadwiseError, match="wq of layer 1 has non-finite"):
        Stack((good.layers[0], broken))
    with pytest.raises(HeadwiseError, match="width 4 to 4, but the stack has width 6"):
        Stack((good.layers[0], random_stack(1, 2, 4).layers[0]))
    with pytest.raises(HeadwiseError, match="softmax attention, not to efficient"):
        layer_of(MultiHead(8, 2, build=efficient))
