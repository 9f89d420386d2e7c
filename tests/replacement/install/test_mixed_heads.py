"""Replaced heads: every kind equals its reference, alone and beside other kinds, with masks and with a cache."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor

from headwise.errors import ShapeError, UnsupportedError
from headwise.replacement import Choice
from headwise.replacement.install.mixed_heads import MixedHeads
from tests.replacement.plans import CACHED, CAUSAL, SMALL, written_out

N, WIDTH, SCALE = 13, 4, 0.6
RIGHT = torch.arange(N) < torch.tensor([[13], [9]])
LEFT = RIGHT.flip(-1)
SIMPLE = {"softmax": Choice("softmax"), "window": Choice("window", {"width": 4}), "uniform": Choice("uniform")}


def drawn(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def fitted(choices: list[Choice]) -> MixedHeads:
    """MixedHeads with random learned tensors."""
    heads = MixedHeads(choices, WIDTH, N).double()
    for x in heads.parameters():
        torch.nn.init.normal_(x, std=0.5)
    return heads


def expected(heads: MixedHeads, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, causal: bool) -> Tensor:
    shared = q.shape[1] // k.shape[1]
    rows = []
    for i, choice in enumerate(heads.choices):
        group = next(group for group in heads._groups() if i in group.heads)
        own = {name: x[group.heads.index(i)] for name, x in group.named_parameters()}
        p = written_out(choice, q[:, i], k[:, i // shared], key_mask=key_mask, causal=causal, scale=SCALE, own=own)
        rows.append(p @ v[:, i // shared])
    return torch.stack(rows, dim=1)


MASKED = [(choice, False) for choice in SMALL] + [(choice, True) for choice in CAUSAL]


@pytest.mark.parametrize("choice, causal", MASKED, ids=str)
@pytest.mark.parametrize("key_mask", [None, RIGHT], ids=["whole", "key_mask"])
def test_each_kind_equals_its_reference(choice: Choice, causal: bool, key_mask: Tensor | None) -> None:
    heads = fitted([choice] * 2)
    inputs = [drawn(2, 2, N, WIDTH).requires_grad_() for _ in range(3)]
    fast = heads(*inputs, key_mask=key_mask, causal=causal, scale=SCALE)
    slow = expected(heads, *inputs, key_mask=key_mask, causal=causal)
    real = slice(None) if key_mask is None else key_mask[:, None, :, None].expand_as(fast)
    torch.testing.assert_close(fast[real], slow[real], rtol=1e-6, atol=1e-8)
    pull = drawn(*fast.shape) * (1 if key_mask is None else key_mask[:, None, :, None])
    leaves = [*inputs, *heads.parameters()]
    gradients = [torch.autograd.grad(y, leaves, pull, allow_unused=True, retain_graph=True) for y in (fast, slow)]
    for actual, target in zip(*gradients, strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(*(zero.double() if g is None else g for g in (actual, target)), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("groups", [12, 4, 2], ids="{} key heads".format)
def test_groups_of_heads_equal_single_heads(groups: int) -> None:
    """A run of neighbours, scattered heads, and heads alone; with grouped queries the runs cross the groups."""
    a, b, c = SIMPLE.values()
    learned = Choice("toeplitz", {"reach": 2})
    choices = [a, a, a, b, learned, b, c, c, b, learned, a, c]
    heads = fitted(choices)
    assert [group.heads for group in heads._groups()] == [(0, 1, 2), (3, 5, 8), (4, 9), (6, 7, 11), (10,)]
    q, k, v = (drawn(2, h, N, WIDTH).requires_grad_() for h in (12, groups, groups))
    for causal, key_mask in itertools.product((False, True), (None, RIGHT)):
        out = heads(q, k, v, key_mask=key_mask, causal=causal, scale=SCALE)
        real = slice(None) if key_mask is None else key_mask[:, None, :, None].expand_as(out)
        torch.testing.assert_close(out[real], expected(heads, q, k, v, key_mask=key_mask, causal=causal)[real])
        assert out.transpose(1, 2).is_contiguous()  # as models read it next
        slow = expected(heads, q, k, v, key_mask=key_mask, causal=causal)
        leaves, pull = (
            [q, k, v, *heads.parameters()],
            drawn(*out.shape) * (1 if key_mask is None else key_mask[:, None, :, None]),
        )
        for actual, target in zip(*(torch.autograd.grad(y, leaves, pull) for y in (out, slow)), strict=True):
            torch.testing.assert_close(actual, target)


@pytest.mark.parametrize("choice", [*SIMPLE.values(), Choice("offset", {"by": -1}), Choice("hashed", {"chunk": 3})])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_queries(choice: Choice, causal: bool) -> None:
    heads = fitted([choice] * 4)
    q, k, v = drawn(2, 4, N, WIDTH), drawn(2, 2, N, WIDTH), drawn(2, 2, N, WIDTH)
    torch.testing.assert_close(
        heads(q, k, v, causal=causal, scale=SCALE), expected(heads, q, k, v, key_mask=None, causal=causal)
    )


PADDED = [(*at, key_mask) for at, key_mask in itertools.product(MASKED, (RIGHT, LEFT))]


@pytest.mark.parametrize("choice, causal, key_mask", PADDED, ids=str)
def test_padding_has_no_effect(choice: Choice, causal: bool, key_mask: Tensor) -> None:
    heads = fitted([choice] * 2)
    q, k, v = (drawn(2, 2, N, WIDTH) for _ in range(3))
    options = {"key_mask": key_mask, "causal": causal, "scale": SCALE}
    out, padding = heads(q, k, v, **options), ~key_mask[:, None, :, None]
    assert out.isfinite().all()
    others = (torch.where(padding, drawn(*x.shape), x) for x in (q, k, v))
    torch.testing.assert_close(heads(*others, **options)[1:, :, key_mask[1]], out[1:, :, key_mask[1]])


@pytest.mark.parametrize(
    "choice, causal, key_mask",
    # the buckets of a hash and the segments of nystrom are those of the padded length
    [case for case in PADDED if case[0].kind not in ("hashed", "nystrom")],
    ids=str,
)
def test_a_padded_sequence_equals_the_shorter_one(choice: Choice, causal: bool, key_mask: Tensor) -> None:
    heads = fitted([choice] * 2)
    q, k, v = (drawn(2, 2, N, WIDTH) for _ in range(3))
    out = heads(q, k, v, key_mask=key_mask, causal=causal, scale=SCALE)
    part = [x[1:, :, key_mask[1]] for x in (q, k, v)]
    torch.testing.assert_close(out[1:, :, key_mask[1]], heads(*part, causal=causal, scale=SCALE))


@pytest.mark.parametrize("choice", CACHED, ids=str)
@pytest.mark.parametrize("key_mask", [None, LEFT], ids=["whole", "padding first"])
def test_new_queries_against_a_cache_are_the_last_rows(choice: Choice, key_mask: Tensor | None) -> None:
    heads = fitted([choice, Choice("softmax")])
    q, k, v = (drawn(2, 2, N, WIDTH) for _ in range(3))
    whole = heads(q, k, v, key_mask=key_mask, causal=True, scale=SCALE)
    for m in (1, 3):
        late = heads(q[:, :, -m:], k, v, key_mask=key_mask, causal=True, scale=SCALE)
        torch.testing.assert_close(late, whole[:, :, -m:])


@pytest.mark.parametrize("choice", [choice for choice in SMALL if choice not in CACHED], ids=str)
def test_kinds_that_cannot_use_a_cache_raise(choice: Choice) -> None:
    heads = fitted([choice])
    with pytest.raises(UnsupportedError, match=r"attends to later keys|use_cache=False"):
        heads(drawn(1, 1, 1, WIDTH), drawn(1, 1, N, WIDTH), drawn(1, 1, N, WIDTH), causal=True, scale=SCALE)


def test_cross_attention_is_for_kinds_without_positions() -> None:
    q, k = drawn(1, 1, 5, WIDTH), drawn(1, 1, N, WIDTH)
    with pytest.raises(UnsupportedError, match=r"window: m = 5 queries against n = 13 keys.*use softmax"):
        fitted([Choice("window")])(q, k, k, scale=SCALE)
    heads = fitted([Choice("projected", {"rank": 3})])
    torch.testing.assert_close(heads(q, k, k, scale=SCALE), expected(heads, q, k, k, key_mask=None, causal=False))


def test_sequences_longer_than_a_fitted_projection() -> None:
    q = drawn(1, 1, N + 1, WIDTH)
    with pytest.raises(UnsupportedError, match=r"projected: its projection was fitted for at most 13 keys.*are 14"):
        fitted([Choice("projected", {"rank": 3})])(q, q, q, scale=SCALE)
    assert fitted([Choice("toeplitz", {"reach": 2})])(q, q, q, scale=SCALE).isfinite().all()


def test_sequences_shorter_than_the_rank() -> None:
    heads = fitted([Choice("projected", {"rank": 9}), Choice("factored", {"rank": 9})])
    q, k, v = (drawn(1, 2, 4, WIDTH) for _ in range(3))
    torch.testing.assert_close(heads(q, k, v, scale=SCALE), expected(heads, q, k, v, key_mask=None, causal=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_other_precisions(dtype: torch.dtype) -> None:
    heads = fitted(SMALL)
    q, k, v = (drawn(2, len(SMALL), N, WIDTH) for _ in range(3))
    for key_mask in (None, RIGHT):
        whole = heads(q, k, v, key_mask=key_mask, scale=SCALE)
        out = copy.deepcopy(heads).to(dtype)(q.to(dtype), k.to(dtype), v.to(dtype), key_mask=key_mask, scale=SCALE)
        assert out.dtype == dtype
        # half a hash may fall the other way, and a pseudo-inverse is worse conditioned than the rest
        safe = [i for i, choice in enumerate(SMALL) if choice.kind not in ("hashed", "nystrom")]
        torch.testing.assert_close(
            out.double()[:, safe], whole[:, safe], rtol=0, atol=0.2 if dtype.itemsize == 2 else 1e-4
        )


def test_one_head_alone() -> None:
    heads = fitted([Choice("gaussian_window"), Choice("gaussian_window")])
    heads.load_head(1, {"centre": torch.tensor(-1.0), "log_width": torch.tensor(-9.0)})
    assert heads.head_parameters(1)["centre"].item() == -1.0 != heads.head_parameters(0)["centre"].item()
    v = drawn(1, 2, N, WIDTH)
    out = heads(v, v, v, scale=SCALE)
    torch.testing.assert_close(out[:, 1, 1:], v[:, 1, :-1])  # so narrow that only the key before counts
    with pytest.raises(ShapeError, match=r"head 1 is gaussian_window with learned tensors centre \(\), log_width \(\)"):
        heads.load_head(1, {"profile": torch.zeros(3)})


def test_shapes_that_disagree() -> None:
    heads, q = fitted([Choice("softmax")] * 2), drawn(1, 3, N, WIDTH)
    with pytest.raises(ShapeError, match="axis 'h' must agree, but choices has 2, q has 3"):
        heads(q, q, q, scale=SCALE)
    with pytest.raises(ShapeError, match="key_mask has shape \\(1, 12\\), but there are n = 13 keys"):
        heads(q[:, :2], q[:, :2], q[:, :2], key_mask=torch.ones(1, 12, dtype=torch.bool), scale=SCALE)
