"""One mask: validation, reading masks of torch and transformers, slicing, transposing, and what operators support."""

from __future__ import annotations

import inspect
import itertools
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import headwise.operators
from headwise.errors import DtypeError, ShapeError, UnsupportedError
from headwise.operators.mask_support import (
    ATTN_BIAS,
    CAUSAL,
    KEY_MASK,
    PAIR_MASK,
    MaskKind,
    check_accepts,
    support_table,
    supported,
    supports,
)
from headwise.operators.masks import Mask

KEYS = torch.tensor([[True, True, False, True, False], [False, True, True, True, True]])  # (2, 5)
PAIRS = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)) > 0.3  # (2, 3, 4, 5)
BIAS = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))


def masks(m: int = 4, n: int = 5) -> list[Mask]:
    """Every combination of kinds with batch axes (2, 3)."""
    keys, pairs = KEYS.unsqueeze(1)[..., :n], PAIRS[..., :m, :n]
    kinds = itertools.product((False, True), (None, keys), (None, pairs))
    return [Mask.checked("Test", m, n, causal=c, key_mask=k, pair_mask=p, batch=(2, 3)) for c, k, p in kinds]


def written_out(mask: Mask) -> Tensor:
    """M by its definition, entry by entry, as (2, 3, m, n)."""
    out = torch.zeros(2, 3, mask.m, mask.n, dtype=torch.bool)
    for b, h, i, j in itertools.product(*(range(size) for size in out.shape)):
        out[b, h, i, j] = (
            (not mask.causal or j <= i + mask.n - mask.m)
            and (mask.key_mask is None or bool(mask.key_mask[b, 0, j]))
            and (mask.pair_mask is None or bool(mask.pair_mask[b, h, i, j]))
        )
    return out


@pytest.mark.parametrize("m, n", [(4, 5), (4, 4), (4, 2)])
def test_rows_counts_and_empty_rows_follow_the_definition(m: int, n: int) -> None:
    for mask in masks(m, n):
        full = written_out(mask)
        assert torch.equal(mask.rows(0, m).expand_as(full), full)
        assert torch.equal(mask.rows(1, 3).expand(2, 3, 2, n), full[..., 1:3, :])
        assert torch.equal(mask.counts().expand(2, 3, m), full.sum(-1))
        empty = mask.empty_rows()
        assert torch.equal(torch.zeros(2, 3, m).bool() if empty is None else empty.expand(2, 3, m), ~full.any(-1))
        assert mask.has_empty_rows() == bool((~full.any(-1)).any())


@pytest.mark.parametrize("m, n", [(4, 5), (4, 4), (4, 2)])
def test_a_part_is_those_rows_over_the_keys_they_reach(m: int, n: int) -> None:
    for mask in masks(m, n):
        part, full = mask.part(1, 3), written_out(mask)[..., 1:3, :]
        assert torch.equal(part.rows(0, 2).expand(2, 3, 2, part.n), full[..., : part.n])
        assert not full[..., part.n :].any()


@pytest.mark.parametrize("m, n", [(4, 5), (4, 4), (4, 2)])
def test_a_transposed_mask_is_the_transpose_reversed_if_causal(m: int, n: int) -> None:
    for mask in masks(m, n):
        turned = mask.transposed()
        full = written_out(mask).mT
        full = full.flip(-2, -1) if mask.causal else full
        assert torch.equal(turned.rows(0, n).expand_as(full), full)
        assert torch.equal(turned.counts().expand(2, 3, n), full.sum(-1))


def test_selecting_queries_and_keys_cuts_the_matrix() -> None:
    keys = torch.tensor([True, False, True, True])
    for mask in masks(4, 4):
        for queries in (keys, torch.tensor([True, True, False, True])):
            cut = mask.select(queries, keys)
            assert torch.equal(cut.rows(0, 3).expand(2, 3, 3, 3), written_out(mask)[..., queries, :][..., keys])
    assert Mask(4, 4, True).select(keys, keys).pair_mask is None


def test_hide_and_average_agree_with_the_matrix() -> None:
    x = torch.randn(2, 3, 5, 2, generator=torch.Generator().manual_seed(2))
    for mask in masks():
        if mask.pair_mask is None and not mask.causal:
            sums = mask.hide(x).sum(-2, keepdim=True).expand(2, 3, 4, 2)
            full = written_out(mask).float()
            torch.testing.assert_close(mask.average(sums), full @ x / full.sum(-1, keepdim=True))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("m, n", [(4, 5), (5, 5)])
def test_sdpa_arguments_mean_the_same_mask(m: int, n: int, biased: bool) -> None:
    g = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 3, m, 4, generator=g), torch.randn(2, 3, n, 4, generator=g)
    kinds = itertools.product((False, True), (None, torch.tensor([True] * 4 + [False])))
    for causal, key_mask in kinds:
        bias = torch.randn(3, m, n, generator=g) if biased else None
        mask = Mask.checked("Test", m, n, causal=causal, key_mask=key_mask, attn_bias=bias, batch=(2, 3))
        s = q @ k.mT / 2 + (0 if bias is None else bias)
        p = s.masked_fill(~mask.rows(0, m), -math.inf).softmax(-1)
        out = scaled_dot_product_attention(q, k, k, **mask.sdpa_arguments(q.dtype))
        torch.testing.assert_close(out, p @ k)
    assert Mask(m, m, True).sdpa_arguments(q.dtype) == {"attn_mask": None, "is_causal": True}


def additive(visible: Tensor, low: float) -> Tensor:
    return torch.zeros(visible.shape).masked_fill(~visible, low)


LOWS = [None, -math.inf, torch.finfo(torch.float32).min, -1e9, -1e4]


@pytest.mark.parametrize("low", LOWS)
def test_padding_and_causality_are_recognised(low: float | None) -> None:
    keys = torch.tensor([[True] * 5, [True, True, True, False, False]])
    square = torch.ones(5, 5, dtype=torch.bool).tril()

    def read(visible: Tensor) -> Mask:
        return Mask.from_sdpa(visible if low is None else additive(visible, low), False, 5, 5)

    padding = read(keys[:, None, None, :])
    assert padding.key_mask is not None
    assert padding.pair_mask is None is padding.attn_bias
    assert not padding.causal
    assert torch.equal(padding.key_mask, keys[:, None])
    assert padding.batch == (2, 1)
    spread = read(keys[:, None, None, :].expand(2, 3, 5, 5))
    assert torch.equal(spread.key_mask, keys[:, None])
    both = read(keys[:, None, None, :] & square)
    assert both.causal
    assert torch.equal(both.key_mask, keys[:, None])
    plain = read(square.expand(2, 3, 5, 5))
    assert plain.causal
    assert plain.key_mask is None is plain.pair_mask
    assert read(torch.ones(2, 1, 5, 5, dtype=torch.bool)).arguments() == {}
    band = square & ~torch.ones(5, 5, dtype=torch.bool).tril(-2)
    other = read(band)
    assert not other.causal
    assert torch.equal(other.pair_mask, band[None, None])
    assert other.hides_later_keys()
    assert not read(band.mT).hides_later_keys()


def test_masks_that_differ_between_heads_or_weigh_are_kept() -> None:
    visible = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    visible[0, 1, 2, 3] = False
    assert torch.equal(Mask.from_sdpa(visible, False, 4, 4).pair_mask, visible)
    bias = torch.randn(1, 2, 4, 4)
    weighs = Mask.from_sdpa(bias.masked_fill(~visible, -math.inf), False, 4, 4)
    assert torch.equal(weighs.pair_mask, visible)
    assert torch.equal(weighs.attn_bias, bias.masked_fill(~visible, 0))
    assert Mask.from_sdpa(bias, False, 4, 4).pair_mask is None


def test_causality_of_torch_starts_at_the_top_left_and_ours_at_the_bottom_right() -> None:
    assert Mask.from_sdpa(None, True, 4, 4).causal
    torchs = Mask.from_sdpa(None, True, 3, 5)
    assert not torchs.causal
    assert torch.equal(torchs.rows(0, 3)[0, 0], torch.ones(3, 5, dtype=torch.bool).tril())
    assert Mask.from_transformers(None, True, 3, 5).causal
    decoding = torch.ones(3, 5, dtype=torch.bool).tril(2)
    assert Mask.from_sdpa(decoding, False, 3, 5).causal


def test_two_axes_are_pairs_for_torch_and_keys_for_transformers() -> None:
    square = torch.ones(2, 2, dtype=torch.bool).tril()
    assert Mask.from_sdpa(square, False, 2, 2).causal
    keys = Mask.from_transformers(square.int(), True, 2, 2)
    assert keys.causal
    assert torch.equal(keys.key_mask, square[:, None])
    with pytest.raises(ShapeError, match=r"attention_mask has shape \(2, 2\), but there are n = 3 keys"):
        Mask.from_transformers(square, True, 2, 3)
    with pytest.raises(ShapeError, match=r"must be \(b, n\) or \(b, h, m, n\), but has shape \(1, 2, 2\)"):
        Mask.from_transformers(square[None], True, 2, 2)


def test_a_mask_longer_than_the_keys_is_cut_and_a_single_query_keeps_its_flag() -> None:
    long = torch.tensor([True, True, True, False])[None, None, None]
    mask = Mask.from_transformers(long, True, 1, 3)
    assert mask.causal
    assert mask.key_mask is None
    assert not Mask.from_transformers(long[..., :3], True, 2, 3).causal


def test_arguments_are_the_masks_that_are_given() -> None:
    for mask in masks():
        arguments = mask.arguments()
        again = Mask.checked("Test", mask.m, mask.n, **arguments, batch=(2, 3))
        assert torch.equal(again.rows(0, 4).expand(2, 3, 4, 5), written_out(mask))
        assert all(x is not None and x is not False for x in arguments.values())
    assert Mask(3, 4).arguments() == {}


def test_one_entry_of_the_batch() -> None:
    for mask in masks():
        for b in range(2):
            one = mask.index(b).rows(0, 4)
            assert torch.equal(one.expand(3, 4, 5), written_out(mask)[b])


@pytest.mark.parametrize(
    "given, error, message",
    [
        (
            {"key_mask": torch.ones(5)},
            DtypeError,
            r"Test: key_mask must be boolean \(True = attend\), but is torch.float32",
        ),
        ({"pair_mask": torch.ones(4, 5)}, DtypeError, "Test: pair_mask must be boolean"),
        ({"attn_bias": PAIRS}, DtypeError, "attn_bias must be floating point, but is torch.bool; pass .* as pair_mask"),
        ({"key_mask": KEYS[..., :4]}, ShapeError, r"key_mask has shape \(2, 4\), but there are n = 5 keys"),
        ({"key_mask": torch.tensor(True)}, ShapeError, r"key_mask has shape \(\), but there are n = 5 keys"),
        (
            {"key_mask": KEYS, "batch": (3, 2)},
            ShapeError,
            r"key_mask has shape \(2, 1, 5\), which does not broadcast to",
        ),
        ({"pair_mask": PAIRS[..., :3, :]}, ShapeError, r"pair_mask has shape \(2, 3, 3, 5\), which does not broadcast"),
        (
            {"attn_bias": BIAS, "batch": (2,)},
            ShapeError,
            r"attn_bias has shape \(3, 4, 5\), which does not broadcast to",
        ),
        ({"key_mask": KEYS, "device": torch.device("meta")}, DtypeError, "q is on meta, key_mask is on cpu; move one"),
    ],
)
def test_bad_masks_are_refused_with_their_names_and_sizes(given: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        Mask.checked("Test", 4, 5, **given)


@supports(KEY_MASK, instead={PAIR_MASK: "softmax, or a window per head"})
def padded(q: Tensor, *, key_mask: Tensor | None = None) -> Tensor | None:
    return key_mask


@supports(KEY_MASK, always_causal=True, instead={CAUSAL: "padded"})
def blocks(q: Tensor, *, key_mask: Tensor | None = None) -> Tensor | None:
    return key_mask


def test_a_mask_that_a_builder_does_not_support_raises() -> None:
    q = torch.zeros(4, 2)
    with pytest.raises(UnsupportedError, match="padded: does not support pair_mask; use softmax, or a window per head"):
        padded(q, pair_mask=PAIRS)
    with pytest.raises(UnsupportedError, match="padded: does not support causal; use softmax"):
        padded(q, causal=True)
    with pytest.raises(UnsupportedError, match="blocks: is always causal; for causal=False use padded"):
        blocks(q, causal=False)
    assert padded(q, causal=False, pair_mask=None, attn_bias=None, key_mask=KEYS) is KEYS
    assert blocks(q, causal=True, key_mask=KEYS) is KEYS
    assert supported(padded) == {KEY_MASK}
    assert supported(blocks) == {KEY_MASK, CAUSAL}
    assert ATTN_BIAS not in supported(blocks)
    with pytest.raises(TypeError):
        padded(q, tokens=3)


COMPOSITIONS = {"add", "kronecker", "low_rank", "per_head", "product", "scale", "transpose", "supported", "supports"}
BUILDERS = [name for name in headwise.operators.__all__ if name.islower() and name not in COMPOSITIONS]


@pytest.mark.parametrize("kind", MaskKind)
@pytest.mark.parametrize("name", BUILDERS)
def test_every_builder_takes_a_kind_of_mask_or_says_what_to_use_instead(name: str, kind: MaskKind) -> None:
    build = getattr(headwise.operators, name)
    parameters = inspect.signature(build).parameters
    if kind in supported(build):
        assert kind.value in parameters or (kind is CAUSAL and name.endswith("_blocks"))
        return
    assert kind.value not in parameters
    with pytest.raises(UnsupportedError, match=f"^{name}: does not support {kind.value}; use "):
        build(**{kind.value: True if kind is CAUSAL else torch.ones(3, dtype=torch.bool)})


def test_attended_keys_are_those_of_any_query_and_head() -> None:
    assert Mask(3, 4).attended_keys() is None
    assert Mask(3, 3, causal=True).attended_keys() is None
    padded = torch.tensor([True, True, False, True])
    assert torch.equal(Mask(2, 4, key_mask=padded).attended_keys(), padded)
    pairs = torch.zeros(2, 3, 4, dtype=torch.bool)  # two heads
    pairs[0, 0, 1] = pairs[1, 2, 3] = True
    assert Mask(3, 4, pair_mask=pairs).attended_keys().tolist() == [False, True, False, True]


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "operators.md"
START, END = "<!-- masks of every builder: python -m tests.operators.test_masks -->", "<!-- end of masks -->"


def table() -> str:
    return support_table([getattr(headwise.operators, name) for name in sorted(BUILDERS)])


def test_the_documentation_has_the_masks_of_every_builder() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(START)[2].partition(END)[0].strip() == table()


def test_the_table_says_yes_or_what_to_use() -> None:
    rows = support_table([padded, blocks]).splitlines()
    assert rows[2] == "| `padded` | softmax | yes | softmax, or a window per head | softmax |"
    assert rows[3] == "| `blocks` | yes | yes | softmax | softmax |"
    assert supported(partial(padded, key_mask=KEYS)) == {KEY_MASK}


# ---- the masks of nn.MultiheadAttention: True = ignore, or added to the scores ----


def multihead_masks(low: float | None, *, causal: bool, padding: str) -> tuple[Tensor | None, Tensor | None]:
    """key_padding_mask (2, 5) and attn_mask (5, 5) in torch's forms: boolean, or additive with `low` where ignored."""
    ignored = {"none": None, "left": torch.arange(5) < torch.tensor([[2], [0]])}.get(
        padding, torch.arange(5) >= torch.tensor([[3], [5]])
    )
    future = torch.ones(5, 5, dtype=torch.bool).triu(1) if causal else None
    if low is None:
        return ignored, future
    first, second = (None if x is None else torch.zeros(x.shape).masked_fill(x, low) for x in (ignored, future))
    return first, second


@pytest.mark.parametrize("low", [None, -math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_masks_of_multihead_attention_are_recognised_in_every_form(
    low: float | None, causal: bool, padding: str
) -> None:
    key_padding_mask, attn_mask = multihead_masks(low, causal=causal, padding=padding)
    mask = Mask.from_multihead(key_padding_mask, attn_mask, causal, 5, 5, 3)
    assert set(mask.arguments()) == {*(["causal"] if causal else []), *(["key_mask"] if padding != "none" else [])}
    if mask.key_mask is not None:
        assert mask.key_mask.shape == (2, 1, 5)
        ignored = multihead_masks(None, causal=False, padding=padding)[0]
        assert ignored is not None
        assert torch.equal(mask.key_mask[:, 0], ~ignored)


def test_masks_of_multihead_attention_that_weigh_or_differ_are_kept() -> None:
    bias = torch.randn(6, 4, 5)  # two sequences, three heads
    mask = Mask.from_multihead(None, bias, False, 4, 5, 3)
    assert torch.equal(mask.attn_bias, bias.unflatten(0, (2, 3)))
    both = Mask.from_multihead(torch.ones(2, 5), bias, False, 4, 5, 3)
    assert torch.equal(both.attn_bias, bias.unflatten(0, (2, 3)) + 1)
    assert torch.equal(Mask.from_multihead(None, bias > 0, False, 4, 5, 3).pair_mask, ~(bias > 0).unflatten(0, (2, 3)))
    hint = Mask.from_multihead(None, bias[0] > 0, True, 4, 5, 3)  # a wrong hint
    assert torch.equal(hint.pair_mask, ~(bias[0] > 0)[None, None])


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=["boolean", "additive"])
def test_masks_without_values_are_kept_as_they_are(dtype: torch.dtype) -> None:
    """On meta nothing can be recognised; of no queries nothing is hidden."""
    unread = Mask.from_multihead(None, torch.zeros(4, 5, dtype=dtype, device="meta"), False, 4, 5, 3)
    assert [x.shape for x in unread.arguments().values()] == [(1, 1, 4, 5)]
    nothing = Mask.from_multihead(None, torch.zeros(0, 5, dtype=dtype), False, 0, 5, 3)
    assert nothing.arguments() == {}


def test_a_learned_bias_stays_one_even_where_it_is_zero() -> None:
    bias = torch.zeros(4, 4, requires_grad=True)
    assert Mask.from_sdpa(bias, False, 4, 4).attn_bias is not None
    assert Mask.from_multihead(None, bias, False, 4, 4, 2).attn_bias is not None
    with torch.no_grad():
        assert Mask.from_sdpa(bias, False, 4, 4).arguments() == {}


def test_traced_padding_of_zeros_and_infinities_is_checked_when_it_runs() -> None:
    def keys(padding: Tensor) -> Tensor:
        found = Mask.from_multihead(padding, None, False, 4, 4, 1)
        assert found.key_mask is not None
        return found.key_mask

    compiled = torch.compile(keys, backend="aot_eager", fullgraph=True)
    assert compiled(torch.tensor([[0.0, 0.0, -math.inf, 0.0]])).tolist() == [[[True, True, False, True]]]
    with pytest.raises(RuntimeError, match="a floating key_padding_mask must be 0 or -inf"):
        compiled(torch.tensor([[0.0, 1.0, -math.inf, 0.0]]))


def test_a_builder_without_an_argument_for_a_mask_is_refused() -> None:
    def plain(q: Tensor, k: Tensor) -> None: ...

    with pytest.raises(UnsupportedError, match="Layer: plain has no argument key_mask, so it cannot be masked; use"):
        check_accepts("Layer", partial(plain), {"key_mask": KEYS})
    check_accepts("Layer", plain, {})
    check_accepts("Layer", lambda q, k, **masks: None, {"key_mask": KEYS})


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.partition(START)[0], page.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n\n{table()}\n\n{END}{after}", encoding="utf-8")
