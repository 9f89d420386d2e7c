"""Attention over patterns of keys by the compiled kernels: the contract again, every pattern against a slow sum in
float64, gradients, masks, threads, large scores, second derivatives and refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.errors import NonFiniteError
from headwise.operators import fixed, hashed, near_far, softmax, strided, window
from headwise.operators._kernels import native
from headwise.operators._kernels.key_patterns import KeyPattern, PatternAttention, attend
from headwise.operators._kernels.queries_keys import QueriesKeys
from headwise.operators.linear.near_far import NearFar
from headwise.operators.masks import Mask
from headwise.operators.sparse.fixed import Fixed
from headwise.operators.sparse.hashed import Hashed
from headwise.operators.sparse.strided import Strided
from headwise.operators.sparse.window import Window
from headwise.replacement import Choice
from headwise.replacement.install.mixed_heads import MixedHeads
from headwise.testing import Case
from headwise.testing.contract import normal
from tests.operators.cases import CASES

pytestmark = pytest.mark.usefixtures("kernels")

KINDS = (Window, Strided, Fixed, NearFar)
CONTRACT = [case for case in CASES if isinstance(case.operator(), KINDS)]
CHECKS = ("values", "gradients", "adjoint", "broadcast", "strides", "half", "masked", "vmap")


def by_hash(q: Tensor, k: Tensor) -> Hashed:
    rotations = (4 * normal(2, 16, 2, seed=8)).round()  # the same in every precision
    return hashed(q, k, rotations.to(q.dtype), chunk=8)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that has one entry for each call of the kernel's forward pass."""
    made: list[int] = []
    forward = PatternAttention.forward
    monkeypatch.setattr(PatternAttention, "forward", lambda self, *x: made.append(1) or forward(self, *x))
    return made


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.name)
def test_contract(case: Case, check: str, calls: list[int]) -> None:
    case.check(check)
    if check in ("values", "gradients", "strides", "half"):
        assert calls, "the kernel did not run"


# ---- every pattern against a sum over visible keys ----

B, G, K, D = 2, 2, 5, 7
PATTERNS = {
    "all": KeyPattern(),
    "band": KeyPattern(3, 2),
    "wide band": KeyPattern(40, 21),
    "beside": KeyPattern(-1, 1),
    "nothing": KeyPattern(-1, -1),
    "leading": KeyPattern(2, 2, leading=3),
    "blocks": KeyPattern(4, 4, leading=1, block=4),
    "long blocks": KeyPattern(0, 33, block=33),
    "summaries": KeyPattern(0, 0, block=6, every=6, last=2),
    "leading summaries": KeyPattern(0, 0, leading=5, block=6, every=6, last=2),
    "summaries and itself": KeyPattern(0, 0, every=5, last=1),
    "only leading": KeyPattern(-1, -1, leading=4),
    "strided": KeyPattern(4, 4, stride=4),
    "columns": KeyPattern(-1, -1, stride=9),
}


def visible(pattern: KeyPattern, m: int, n: int, causal: bool) -> Tensor:
    """Boolean (m, n), pair by pair as `KeyPattern` describes them."""
    out = torch.zeros(m, n, dtype=torch.bool)
    for i, j in itertools.product(range(m), range(n)):
        p = i + n - m
        begin, end = p, p + 1
        if pattern.block:
            begin = pattern.leading + (p - pattern.leading) // pattern.block * pattern.block
            end = begin + pattern.block
        sees = begin - pattern.left <= j < end + pattern.right or j < pattern.leading
        if pattern.every and j >= pattern.leading:
            block, place = divmod(j - pattern.leading, pattern.every)
            others = block != (p - pattern.leading) // pattern.every and block < (n - pattern.leading) // pattern.every
            sees = sees or (others and place >= pattern.every - pattern.last)
        if pattern.stride:
            sees = sees or (p - j) % pattern.stride == 0
        if not causal:
            sees = sees or p < pattern.leading
        out[i, j] = sees and (j <= p or not causal)
    return out


def written_out(
    q: Tensor, k: Tensor, v: Tensor, patterns: list[KeyPattern], scale: float, causal: bool, key_mask: Tensor | None
) -> Tensor:
    q, k, v = (x.double() for x in (q, k, v))
    shared, (m, n) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    heads = []
    for h, pattern in enumerate(patterns):
        pairs = visible(pattern, m, n, causal).expand(len(q), m, n)
        pairs = pairs if key_mask is None else pairs & key_mask[:, h, None]
        weights = (scale * q[:, h] @ k[:, h // shared].mT).masked_fill(~pairs, -math.inf).softmax(-1)
        heads.append(weights.masked_fill(~pairs, 0).nan_to_num(0) @ v[:, h // shared])
    return torch.stack(heads, dim=1)


def no_plain(*tensors: Tensor) -> Tensor:
    raise AssertionError("no second derivative was asked for")


def compare(
    patterns: list[KeyPattern], m: int, n: int, *, causal: bool, masked: bool, dtype: torch.dtype = torch.float32
) -> None:
    """Values and gradients of one call, each head with its own pattern and pairs of heads sharing keys."""
    h = len(patterns)
    q = normal(B, m, h, K, seed=0, dtype=dtype).transpose(1, 2).requires_grad_()
    k, v = (normal(B, h // 2, n, width, seed=width, dtype=dtype).requires_grad_() for width in (K, D))
    key_mask = (normal(B, 1, n, seed=3) > -0.7).expand(B, h, n) if masked else None
    options = {"scale": 0.8, "causal": causal, "key_mask": key_mask}
    actual = attend(q, k, v, patterns, **options, plain=no_plain)
    expected = written_out(q, k, v, patterns, **options)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)
    assert actual.transpose(1, 2).is_contiguous()
    pull = normal(*actual.shape, seed=4)
    fast = torch.autograd.grad(actual, (q, k, v), pull.to(dtype))
    slow = torch.autograd.grad(expected, (q, k, v), pull)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=4 * tolerance, rtol=4 * tolerance)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_heads_of_every_pattern_in_one_call(causal: bool, masked: bool) -> None:
    compare(list(PATTERNS.values()), 43, 43, causal=causal, masked=masked)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 300], ids="n = {}".format)
def test_lengths_around_a_tile_and_beyond_a_list_of_keys(n: int) -> None:
    patterns = [
        KeyPattern(),
        KeyPattern(20, 20, leading=1),
        KeyPattern(0, 0, block=8, every=8, last=1),
        KeyPattern(2, 2),
    ]
    compare(patterns, n, n, causal=n == 300, masked=n == 31, dtype=torch.float64)


@pytest.mark.parametrize("m, n", [(1, 40), (5, 40), (40, 33)])
def test_fewer_or_more_queries_than_keys(m: int, n: int) -> None:
    few = [KeyPattern(), KeyPattern(3, 3), KeyPattern(3, 3, leading=2), KeyPattern(0, 4, block=4)]
    for causal in (False, True):
        compare(few if m < n else [KeyPattern()] * 2, m, n, causal=causal, masked=True)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads(threads: int) -> None:
    """With fewer key heads than threads, gradients of keys are summed from copies."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare([KeyPattern(), KeyPattern(9, 9, leading=1)], 200, 200, causal=False, masked=False)
        compare([KeyPattern(8, 8, stride=8), KeyPattern(9, 9)], 100, 100, causal=True, masked=False)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_scores(size: float) -> None:
    """Weights of a row are differences from its maximum, forward and backward."""
    q, k, v = (normal(1, 2, 70, 8, seed=i, dtype=torch.float32).requires_grad_() for i in range(3))
    patterns, options = [KeyPattern(20, 20), KeyPattern()], {"causal": False, "key_mask": None}
    actual = attend(q, k, v, patterns, scale=size, **options, plain=no_plain)
    expected = written_out(q, k, v, patterns, size, **options)
    # scores are rounded to about 1e-6 of themselves, and so is the difference of two
    torch.testing.assert_close(actual.double(), expected, atol=3e-6 * size, rtol=0)
    assert all(x.isfinite().all() for x in torch.autograd.grad(actual.sum(), (q, k, v)))


def test_scores_far_below_zero() -> None:
    """Lanes of a tile without a query have no part in the gradients, however small all scores of the others are."""
    q, k, v = (normal(1, 2, 70, 8, seed=i, dtype=torch.float32) for i in range(3))
    q, k, v = (x.requires_grad_() for x in (q.abs() + 10, -k.abs() - 20, v))
    patterns, options = [KeyPattern(20, 20), KeyPattern()], {"causal": False, "key_mask": None}
    results = []
    for function in (lambda *x, **y: attend(*x, **y, plain=no_plain), written_out):
        out = function(q, k, v, patterns, scale=0.5, **options)
        results.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-3, rtol=1e-3)  # scores of -1000 are rounded to 6e-5


def test_rows_without_keys_are_zero_and_masked_keys_are_not_read() -> None:
    q, k, v = (normal(1, 2, 40, 4, seed=i, dtype=torch.float32) for i in range(3))
    key_mask = torch.arange(40).expand(1, 2, 40) >= 25
    k, v = (torch.where(key_mask.unsqueeze(-1), x, torch.nan).requires_grad_() for x in (k, v))
    q.requires_grad_()
    out = attend(q, k, v, [KeyPattern(5, 5)] * 2, scale=1.0, key_mask=key_mask, plain=no_plain)
    assert out.isfinite().all()
    assert (out[:, :, :20] == 0).all()
    assert (out[:, :, 20:] != 0).any()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_bfloat16_is_computed_in_single_precision() -> None:
    q, k, v = (normal(1, 2, 300, 32, seed=i, dtype=torch.bfloat16) for i in range(3))
    out = attend(q, k, v, [KeyPattern()] * 2, scale=0.2, plain=no_plain)
    exact = written_out(q, k, v, [KeyPattern()] * 2, 0.2, False, None)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, atol=2**-9, rtol=2**-8)  # one rounding of the result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("build", [softmax, lambda q, k: window(q, k, 9), by_hash], ids=["softmax", "window", "hashed"])
def test_gradients_of_nearly_equal_keys(build: Callable[..., Any], dtype: torch.dtype) -> None:
    """dQ = dS K, and the rows of dS sum to zero: what keys have in common cancels, and rounding errors of dS do not."""
    q, k, v, pull = (normal(1, 2, 45, 16, seed=i, dtype=dtype) for i in range(4))
    q, k, v = (x.requires_grad_() for x in (q, (7 + k / 4).to(dtype), v))
    (fast,) = torch.autograd.grad(build(q, k)(v), q, pull)
    with native.switched("off"):
        wide = q.detach().double().requires_grad_()
        (slow,) = torch.autograd.grad(build(wide, k.detach().double())(v.detach().double()), wide, pull.double())
    torch.testing.assert_close(fast.double(), slow, atol=2**-8 * slow.abs().max().item(), rtol=2**-7)


# ---- far keys ----


def test_far_blocks_of_very_different_sizes() -> None:
    """Sums over blocks keep their own maximum: keys of weight e^90 in one block leave those of others as they were."""
    n, q = 40, normal(1, 1, 40, 4, seed=0, dtype=torch.float32)
    k = normal(1, 1, n, 4, seed=1, dtype=torch.float32)
    k[..., :4, :] += 40.0
    a, b, c = torch.zeros(1, 4), torch.full((1, 4), 0.6), torch.zeros(1)
    v = normal(1, 1, n, 3, seed=2, dtype=torch.float32)
    options = {"block": 4, "scale": 1.0, "causal": True}
    actual = near_far(q, k, a, b, c, **options)(v)
    with native.switched("off"):
        expected = near_far(*(x.double() for x in (q, k, a, b, c)), **options)(v.double())
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("leading", [0, 3])
def test_states_of_keys_that_are_not_there(causal: bool, leading: int) -> None:
    """Rows of a long sequence, from the leading and the near keys and the states of all others: two derivatives."""
    n, block, first, last = 43, 4, leading + 18, leading + 25
    begin, end = leading + 12, last if causal else leading + 32  # blocks 3 to 7, of which 4 to 6 have queries
    shapes = ((2, 3, n, 5), (2, 3, n, 5), (2, 3, n, 4), (3, 2, 5), (3, 2, 5), (3, 2))
    leaves = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    visible = torch.arange(n).expand(2, 1, n) % 5 != 2

    def whole(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        options: dict[str, Any] = {"block": block, "leading": leading, "causal": causal, "key_mask": visible}
        return near_far(q, k, a, b, c, **options)(v)[..., first:last, :]

    def cut(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        positions = torch.arange(n)
        inside = (positions < leading) | ((positions >= begin) & (positions < end))
        far = (~inside & (positions < begin)) if causal else ~inside
        scores = (5**-0.5 * b @ k[..., far, :].mT).masked_fill(~visible[..., None, far], -math.inf)
        states = scores.logsumexp(-1), scores.softmax(-1) @ v[..., far, :]
        mask = Mask(end - first, int(inside.sum()), causal, visible[..., inside])
        qk = QueriesKeys(q[..., first:end, :], mask.hide(k[..., inside, :]), 5**-0.5, mask)
        local = NearFar(qk, a, b, c, block, leading)
        return local.last_rows(v[..., inside, :], states)[..., : last - first, :]

    def derivatives(rows: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = rows(*leaves)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return out, *first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    actual, without_kernels = derivatives(cut), None
    with native.switched("off"):
        expected, without_kernels = derivatives(whole), derivatives(cut)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(without_kernels, expected)


def test_states_of_masked_keys_count_for_nothing(calls: list[int]) -> None:
    """lse = -inf, as where all further keys are masked, and queries without any key: finite, with finite gradients."""
    q, k, v, a, b, c = leaves = [
        normal(1, 2, *shape, seed=len(shape)).requires_grad_() for shape in [(9, 4)] * 3 + [(2, 4)] * 2 + [(2,)]
    ]
    mask = Mask(9, 9, False, torch.arange(9).expand(1, 2, 9) >= 9)
    states = (
        torch.full((1, 2, 2), -math.inf, dtype=q.dtype).requires_grad_(),
        normal(1, 2, 2, 4, seed=9).requires_grad_(),
    )
    for mode in ("build", "off"):
        with native.switched(mode):
            out = NearFar(QueriesKeys(q, k, 0.5, mask), a, b, c, 2, 0).last_rows(v, states)
            assert (out == 0).all()
            for gradient in torch.autograd.grad(out.sum(), [*leaves, *states]):
                assert (gradient == 0).all()
    assert len(calls) == 1


# ---- second derivatives, other transformations, checks of torch ----

BUILDERS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "window": lambda q, k: window(q, k, 5, leading=1),
    "strided": lambda q, k: strided(q, k, 3, causal=True),
    "fixed": lambda q, k: fixed(q, k, 4),
    "near_far": lambda q, k: near_far(q, k, 0.1 * q[:, :3].detach(), q[:, 3:6].detach(), q[:, 0, :3].detach(), block=2),
}


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
def test_second_derivatives(build: Callable[[Tensor, Tensor], Callable[[Tensor], Tensor]]) -> None:
    q, k, v = (normal(2, 13, 4, seed=i).requires_grad_() for i in range(3))

    def second() -> tuple[Tensor, ...]:
        first = torch.autograd.grad(build(q, k)(v).square().sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), (q, k, v))

    actual = second()
    with native.switched("off"):
        torch.testing.assert_close(actual, second())


def test_second_derivatives_of_mixed_heads() -> None:
    """A window over all keys stands for softmax, of which torch's kernel has no second derivative."""
    choices = [
        Choice("window", {"width": 3, "leading": 1}),
        Choice("near_far", {"block": 2, "rank": 2}),
        Choice("uniform"),
    ]
    fast, slow = (
        MixedHeads([*choices, last], 4, 13).double() for last in (Choice("softmax"), Choice("window", {"width": 26}))
    )
    for x, y in zip(fast.parameters(), slow.parameters(), strict=True):
        torch.nn.init.normal_(x, std=0.5)
        y.data.copy_(x.data)
    q, k, v = (normal(2, h, 13, 4, seed=h + i).requires_grad_() for i, h in enumerate((4, 2, 2)))
    key_mask = torch.arange(13) < torch.tensor([[13], [9]])

    def second(heads: MixedHeads) -> tuple[Tensor, ...]:
        leaves = [q, k, v, *heads.parameters()]
        out = heads(q, k, v, scale=0.5, key_mask=key_mask)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    actual = second(fast)
    with native.switched("off"):
        torch.testing.assert_close(actual, second(slow))


def arguments(features: bool) -> tuple[tuple[object, ...], list[int]]:
    q = normal(2, 4, 11, 6, seed=0, dtype=torch.float32).requires_grad_()
    k, v = (normal(2, 2, 11, width, seed=width, dtype=torch.float32).requires_grad_() for width in (6, 3))
    pattern = KeyPattern(2, 2, 1, 2, features=3) if features else KeyPattern(2, 2, 1)
    return (q, k, v, torch.rand(2, 1, 11).expand(2, 4, 11) > 0.3), [x for _ in range(4) for x in pattern]


def test_opcheck() -> None:
    (q, k, v, mask), patterns = arguments(False)
    torch.library.opcheck(torch.ops.headwise.sparse_attention, (q, k, v, mask, None, None, None, patterns, 0.5, True))
    (q, k, v, mask), patterns = arguments(True)
    b = normal(2, 4, 3, 6, seed=5, dtype=torch.float32).requires_grad_()
    call = (k, v, b, mask, patterns, 0.5, False)
    torch.library.opcheck(torch.ops.headwise.far_sums, call)
    masses, means = (x.detach() for x in torch.ops.headwise.far_sums(*call))
    bias, means = masses.nan_to_num(neginf=-9.0).requires_grad_(), means.requires_grad_()
    call = (q, k, v, mask, b, bias, means, patterns, 0.5, False)
    torch.library.opcheck(torch.ops.headwise.sparse_attention, call)


def test_compile_runs_the_kernels_as_one_graph() -> None:
    (q, k, v, mask), patterns = arguments(False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * torch.ops.headwise.sparse_attention(q, k, v, mask, None, None, None, patterns, 0.5, True)[0]

    out = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(out, run(q, k, v))
    gradients = [torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (out, run(q, k, v))]
    torch.testing.assert_close(*gradients)


def test_patterns_and_sizes_that_do_not_fit_are_refused() -> None:
    (q, k, v, mask), patterns = arguments(False)
    call = torch.ops.headwise.sparse_attention
    rest = (None, None, None, patterns, 0.5, False)
    with pytest.raises(RuntimeError, match="do not fit together"):
        call(q, k[:, :, :5], v, None, *rest)
    with pytest.raises(RuntimeError, match=r"key_mask must be boolean \(b, h, n\)"):
        call(q, k, v, mask[..., :5], *rest)
    with pytest.raises(RuntimeError, match="8 numbers for each of 4 heads, but there are 31"):
        call(q, k, v, mask, None, None, None, patterns[1:], 0.5, False)
    for wrong in (
        {"leading": 12},
        {"every": 3, "last": 4},
        {"block": -1},
        {"features": 1},
        {"stride": 3, "leading": 1},
    ):
        with pytest.raises(RuntimeError, match=r"the pattern .* of head 0 is not one"):
            call(q, k, v, mask, None, None, None, [*KeyPattern(2, 2)._replace(**wrong), *patterns[8:]], 0.5, False)


# ---- rewritten layers ----


def test_mixed_heads_are_one_call(calls: list[int]) -> None:
    """Groups of the kernel in one call, others beside it; values and gradients equal those without the kernel."""
    near = [Choice("near_far", {"block": block, "rank": rank, "leading": 1}) for block, rank in ((2, 1), (4, 3))]
    some = [
        Choice("softmax"),
        Choice("window", {"width": 5, "leading": 1}),
        Choice("uniform"),
        Choice("offset", {"by": -1}),
    ]
    heads = MixedHeads([near[0], *some, *near, some[0]], 4, 21)
    for x in heads.parameters():
        torch.nn.init.normal_(x, std=0.5)
    q, k, v = (normal(2, h, 21, 4, seed=h, dtype=torch.float32).requires_grad_() for h in (8, 4, 2))
    v = normal(2, 4, 21, 4, seed=9, dtype=torch.float32).requires_grad_()
    leaves = [q, k, v, *heads.parameters()]
    padding = torch.arange(21) < torch.tensor([[21], [15]])
    for causal, key_mask in itertools.product((False, True), (None, padding)):
        calls.clear()
        out = heads(q, k, v, key_mask=key_mask, causal=causal, scale=0.6)
        assert len(calls) == 1
        assert out.transpose(1, 2).is_contiguous()
        pull = normal(*out.shape, seed=3, dtype=torch.float32)
        gradients = torch.autograd.grad(out, leaves, pull)
        with native.switched("off"):
            slow = heads(q, k, v, key_mask=key_mask, causal=causal, scale=0.6)
            torch.testing.assert_close(out, slow, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(gradients, torch.autograd.grad(slow, leaves, pull), atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(heads(q, k, v, key_mask=key_mask, causal=causal, scale=0.6), out)


def test_mixed_heads_refuse_numbers_that_are_not_finite() -> None:
    q, k, v = (normal(1, 2, 9, 4, seed=i, dtype=torch.float32) for i in range(3))
    q[0, 0, 3] = math.nan
    with pytest.raises(NonFiniteError, match="MixedHeads: q has 4 non-finite of 72 entries"):
        MixedHeads([Choice("window"), Choice("softmax")], 4, 9)(q, k, v, scale=0.5)
