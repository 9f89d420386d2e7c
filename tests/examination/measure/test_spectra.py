"""Spectra, and what the best matrix of rank r does to the output, against a float64 decomposition of the whole P."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from headwise.examination.measure.observe import Measurement, observe

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
