"""The operation itself: grouped queries, bad arguments, fakes.  `test_streaming` compares its numbers with float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwise.operators._kernels.native.head_statistics import HeadStatistics  # registers the fake

pytestmark = pytest.mark.usefixtures("kernels")
__all__ = ["HeadStatistics"]


def arguments(h: int = 4, g: int = 2, m: int = 21, n: int = 19, dtype: torch.dtype = torch.float32) -> list:
    q, k, v = torch.randn(h, m, 8).to(dtype), torch.randn(g, n, 8).to(dtype), torch.randn(g, n, 5).to(dtype)
    return [q, k, v, 0.3, None, None, None, torch.tensor([0, 7, 20])]


def run(*args: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.headwise.head_statistics(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_queries_share_keys_and_values(dtype: torch.dtype) -> None:
    q, k, v, *rest = arguments(dtype=dtype)
    grouped = run(q, k, v, *rest)
    repeated = run(q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), *rest)
    for one, other in zip(grouped, repeated, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(grouped[0][0], grouped[0][2])


def test_half_precision_is_summed_in_single_precision() -> None:
    q, k, v, *rest = arguments(dtype=torch.bfloat16)
    for one, other in zip(run(q, k, v, *rest), run(q.float(), k.float(), v.float(), *rest), strict=True):
        assert torch.equal(one, other)


def test_the_operation_passes_opcheck() -> None:
    args = arguments()
    torch.library.opcheck(torch.ops.headwise.head_statistics.default, tuple(args))
    args[4:7] = 3, torch.rand(1, 21, 19) < 0.5, torch.randn(4, 1, 19)
    torch.library.opcheck(torch.ops.headwise.head_statistics.default, tuple(args))


def test_a_compiled_call_gives_the_same() -> None:
    args = arguments()
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for one, other in zip(compiled(*args), run(*args), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "place, wrong, said",
    [
        (1, torch.randn(3, 19, 8), "with h a multiple of g"),
        (1, torch.randn(2, 19, 7), "expected q"),
        (2, torch.randn(2, 18, 5), "expected q"),
        (2, torch.randn(2, 19, 5).bfloat16(), "must all be float32 or all be bfloat16"),
        (5, torch.ones(1, 20, 19, dtype=torch.bool), "a mask must broadcast"),
        (5, torch.ones(1, 1, 19), "visible must be boolean"),
        (6, torch.ones(1, 1, 19).double(), "attn_bias must be float32"),
        (7, torch.tensor([0.0]), "sampled must be"),
        (7, torch.tensor([0, 21]), "sampled must be"),
        (7, torch.tensor([5, 4]), "sampled must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(place: int, wrong: Tensor, said: str) -> None:
    args = arguments()
    args[place] = wrong
    with pytest.raises(RuntimeError, match=said):
        run(*args)


def places(**other: Tensor) -> list:
    """Tokens at places 0, 4, 9 and 1, 2."""
    given = {"q": torch.randn(3, 10, 8), "k": torch.randn(3, 10, 8), "log_sum_exp": torch.full((3, 10), 3.0)}
    given |= {"order": torch.tensor([0, 4, 9, 1, 2]), "starts": torch.tensor([0, 3, 5])}
    return [*(given | other).values()]


def test_token_patterns_pass_opcheck() -> None:
    torch.library.opcheck(torch.ops.headwise.token_patterns, (*places(), 0.3, None))
    torch.library.opcheck(torch.ops.headwise.token_patterns, (*places(), 0.3, 0))


@pytest.mark.parametrize(
    "other, message",
    [
        ({"q": torch.randn(3, 9, 8)}, "must be float32 and fit together"),
        ({"k": torch.randn(3, 10, 8).double()}, "must be float32 and fit together"),
        ({"order": torch.tensor([0, 4, 10, 1, 2])}, "places of a token must ascend and be below 10"),
        ({"order": torch.tensor([0, 4, 4, 1, 2])}, "places of a token must ascend and be below 10"),
        ({"starts": torch.tensor([0, 3, 6])}, "starts must ascend to 5"),
        ({"starts": torch.tensor([0, 3, 5]).int()}, "must be lists of int64"),
    ],
)
def test_places_that_are_none_are_refused(other: dict[str, Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        torch.ops.headwise.token_patterns(*places(**other), 0.3, None)
