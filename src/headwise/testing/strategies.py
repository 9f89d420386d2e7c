"""Hypothesis strategies for attention: shapes, queries and keys, masks, dtypes, and input that must be refused.

    from hypothesis import given
    from headwise.testing import strategies

    @given(strategies.queries_and_keys())
    def test_rows_sum_to_one(pair):
        q, k = pair
        ...

This is the one module of headwise that needs hypothesis (`pip install headwise[test]`); nothing else imports it.
Numbers come from a seed that hypothesis draws, so a failing example shrinks in its shape and replays exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

sizes = st.integers(1, 5)
"""A small axis."""

batches = st.lists(st.integers(1, 3), max_size=3).map(tuple)
"""Up to three batch axes."""

dtypes = st.sampled_from(FLOATING)
"""Every floating dtype that attention is computed in."""


@st.composite
def tensors(draw: st.DrawFn, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers of one shape."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, int]:
    """(batch, m, n, k): queries and keys of one attention."""
    return draw(batches), draw(sizes), draw(sizes), draw(sizes)


@st.composite
def queries_and_keys(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """q (*batch, m, k) and k (*batch, n, k); either may leave out leading batch axes or have one of size one."""
    batch, m, n, width = draw(shapes())
    q = draw(tensors(*draw(broadcasting(batch)), m, width, dtype=dtype))
    return q, draw(tensors(*batch, n, width, dtype=dtype))


@st.composite
def queries_keys_and_values(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and values v (*batch, n, d) of any width."""
    q, k = draw(queries_and_keys(dtype))
    return q, k, draw(tensors(*k.shape[:-1], draw(sizes), dtype=dtype))


@st.composite
def broadcasting(draw: st.DrawFn, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Batch axes that broadcast to `batch`."""
    left_out = draw(st.integers(0, len(batch)))
    return tuple(draw(st.sampled_from([1, size])) for size in batch[left_out:])


@st.composite
def masks(draw: st.DrawFn, *shape: int) -> Tensor:
    """Booleans, from none to all True: fully masked rows are among them."""
    density = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return torch.rand(*shape, generator=generator) < density


@dataclass(frozen=True, eq=False)
class Bad:
    """What an operator over q (*batch, m, k) and k (*batch, n, k) must refuse, and what its words must name."""

    what: str
    q: Tensor
    k: Tensor
    masks: dict[str, Tensor]
    names: tuple[str, ...]  # every one of these appears in the message

    def __repr__(self) -> str:
        given = {"q": self.q, "k": self.k, **self.masks}
        return f"{self.what}: " + ", ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in given.items())


@st.composite
def good(draw: st.DrawFn) -> Bad:
    """Input with nothing wrong, for the defects below to be put into."""
    batch, m, n, width = draw(shapes())
    q, k = draw(tensors(*batch, m, width)), draw(tensors(*batch, n, width))
    return Bad("nothing", q, k, {}, ())


@st.composite
def wrong_width(draw: st.DrawFn) -> Bad:
    bad = draw(good())
    *rows, width = bad.k.shape
    k = draw(tensors(*rows, width + draw(sizes)))
    return replace(bad, what="wrong width", k=k, names=("'k'", str(width), str(k.shape[-1])))


@st.composite
def wrong_batch(draw: st.DrawFn) -> Bad:
    bad = draw(good())
    b = draw(st.integers(2, 4))
    q, k = bad.q.expand(b, *bad.q.shape).clone(), bad.k.expand(b + 1, *bad.k.shape).clone()
    return replace(bad, what="wrong batch", q=q, k=k, names=(str(b), str(b + 1)))


@st.composite
def empty(draw: st.DrawFn) -> Bad:
    bad = draw(good())
    name, axis = draw(st.sampled_from(["q", "k"])), draw(st.sampled_from([-2, -1]))
    both = axis == -1  # an empty width is empty in both
    cut = {x: getattr(bad, x).narrow(axis, 0, 0) for x in (["q", "k"] if both else [name])}
    shape = tuple((cut.get("q") if both else cut[name]).shape)  # type: ignore[union-attr]
    return replace(bad, what="empty axis", **cut, names=(str(shape), "empty"))


@st.composite
def missing_axis(draw: st.DrawFn) -> Bad:
    bad = draw(good())
    name = draw(st.sampled_from(["q", "k"]))
    flat = getattr(bad, name).flatten()
    return replace(bad, what="missing axis", **{name: flat}, names=(name, str(tuple(flat.shape))))


@st.composite
def not_finite(draw: st.DrawFn) -> Bad:
    bad = draw(good())
    name = draw(st.sampled_from(["q", "k"]))
    x = getattr(bad, name).clone()
    x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    return replace(bad, what="not finite", **{name: x}, names=(name, "1 non-finite", str(x.numel())))


@st.composite
def mixed_dtypes(draw: st.DrawFn) -> Bad:
    bad = draw(good())
    a, b = draw(st.permutations(FLOATING))[:2]
    return replace(bad, what="mixed dtypes", q=bad.q.to(a), k=bad.k.to(b), names=(f"q is {a}", f"k is {b}"))


@st.composite
def integers(draw: st.DrawFn) -> Bad:
    bad = draw(good())
    dtype = draw(st.sampled_from([torch.int64, torch.int32, torch.uint8, torch.bool]))
    name = draw(st.sampled_from(["q", "k"]))
    x = getattr(bad, name).to(dtype)
    return replace(bad, what="integers", **{name: x}, names=(name, str(dtype)))


@st.composite
def mixed_devices(draw: st.DrawFn) -> Bad:
    bad = draw(good())
    name = draw(st.sampled_from(["q", "k"]))
    return replace(bad, what="mixed devices", **{name: getattr(bad, name).to("meta")}, names=("meta", "cpu"))


@st.composite
def wrong_mask(draw: st.DrawFn) -> Bad:
    """A mask that does not broadcast to (*batch, m, n): a wrong size, or more axes than P has."""
    bad = draw(good())
    shape = [*bad.q.shape[:-1], bad.k.shape[-2]]
    if draw(st.booleans()):
        axis = draw(st.sampled_from([-2, -1]))
        shape[axis] += draw(sizes)
        if shape[axis] == 1:  # would broadcast
            shape[axis] = 2
    else:
        shape.insert(0, 2)
    return replace(
        bad, what="wrong mask", masks={"pair_mask": torch.ones(*shape, dtype=torch.bool)}, names=(str(tuple(shape)),)
    )


@st.composite
def wrong_bias(draw: st.DrawFn) -> Bad:
    """An attn_bias of a wrong shape, of integers, or on another device."""
    bad = draw(good())
    m, n = bad.q.shape[-2], bad.k.shape[-2]
    shape, dtype, device, names = draw(
        st.sampled_from(
            [
                ((m + 1, n + 1), torch.float64, "cpu", (str((m + 1, n + 1)),)),
                ((m, n), torch.bool, "cpu", ("attn_bias", "torch.bool")),
                ((m, n), torch.float64, "meta", ("attn_bias", "meta", "cpu")),
            ]
        )
    )
    return replace(
        bad, what="wrong attn_bias", masks={"attn_bias": torch.ones(*shape, dtype=dtype, device=device)}, names=names
    )


@st.composite
def wrong_padding(draw: st.DrawFn) -> Bad:
    bad = draw(good())
    n = bad.k.shape[-2]
    size = n + draw(sizes)
    key_mask = torch.ones(*bad.k.shape[:-2], size, dtype=torch.bool)
    return replace(bad, what="wrong padding", masks={"key_mask": key_mask}, names=("key_mask", str(n), str(size)))


@st.composite
def not_boolean(draw: st.DrawFn) -> Bad:
    bad = draw(good())
    m, n = bad.q.shape[-2], bad.k.shape[-2]
    name, shape = draw(st.sampled_from([("pair_mask", (m, n)), ("key_mask", (n,))]))
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.uint8]))
    return replace(
        bad,
        what=f"{name} not boolean",
        masks={name: torch.ones(*shape, dtype=dtype)},
        names=(name, "boolean", str(dtype)),
    )


@st.composite
def mask_elsewhere(draw: st.DrawFn) -> Bad:
    bad = draw(good())
    m, n = bad.q.shape[-2], bad.k.shape[-2]
    name, shape = draw(st.sampled_from([("pair_mask", (m, n)), ("key_mask", (n,))]))
    pair_mask = torch.ones(*shape, dtype=torch.bool, device="meta")
    return replace(bad, what=f"{name} elsewhere", masks={name: pair_mask}, names=(name, "meta", "cpu"))


BAD_TENSORS: tuple[Callable[[], st.SearchStrategy[Bad]], ...] = (
    wrong_width,
    wrong_batch,
    empty,
    missing_axis,
    not_finite,
    mixed_dtypes,
    integers,
    mixed_devices,
)
BAD_MASKS: tuple[Callable[[], st.SearchStrategy[Bad]], ...] = (wrong_mask, wrong_padding, not_boolean, mask_elsewhere)
