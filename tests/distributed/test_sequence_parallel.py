"""Every operator on two and on four processes equals the operator in one, with its gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed.pool import Pool
from tests.distributed.sharded import SUBJECTS, Setting, differences, products, second_derivatives, unread

OF_ANY_HEADS = ("strided", "hashed")
"""Subjects that have an exchange of their own, which is taken where heads cannot be dealt out evenly."""

DTYPES = (torch.float64, torch.float64, torch.float32, torch.bfloat16)


@st.composite
def comparisons(draw: st.DrawFn, subject: str, ranks: int, most: int = 7) -> Setting:
    """Slices of any lengths, some of them empty; masks that the subject takes; three dtypes.

    Long ones of `nystrom` in float64 only: its inverse makes rounding larger, on slices by chance more than in whole.
    """
    taken = SUBJECTS[subject]
    sizes = st.lists(st.integers(0, most), min_size=ranks, max_size=ranks)
    lengths = tuple(draw(sizes.filter(lambda lengths: sum(lengths) >= taken.at_least)))
    cross = taken.cross and draw(st.booleans())
    inverse = subject == "nystrom" and most > 40
    batches, grouped = [(2, 4), (4,), (1, 4)], subject in ("softmax", "window", "efficient")
    if subject.startswith(OF_ANY_HEADS):  # several heads on each rank are exchanged
        batches, grouped = [(2, 1), (1,), (3,), (1, 6), (2, 4)], True
    batch = draw(st.sampled_from(batches))
    return Setting(
        subject,
        lengths,
        query_lengths=tuple(draw(sizes.filter(any))) if cross else None,
        zigzag=draw(st.booleans()),
        causal=taken.causal and draw(st.booleans()),
        hidden=draw(st.sampled_from(["", "", "some", "of one rank", "of one text"])) if taken.key_mask else "",
        dtype=torch.float64 if inverse else draw(st.sampled_from(DTYPES)),
        batch=batch,
        key_heads=2 if grouped and batch[-1] % 2 == 0 and draw(st.booleans()) else None,
        values=draw(st.integers(4, 6)),
        exchange=draw(st.sampled_from(["cheapest", "heads", "ring"])) if subject == "softmax" else "cheapest",
        seed=draw(st.integers(0, 9)),
    )


def assert_same(pool: Pool, setting: Setting, kernel_cache: Path | None = None) -> None:
    for rank, found in enumerate(pool.run(differences, setting, kernel_cache and str(kernel_cache))):
        for name, ratio in found.items():
            assert ratio <= 1, f"rank {rank}: {name} is {ratio:.3g} tolerances from that of one process"


@pytest.mark.parametrize("subject", SUBJECTS)
@settings(max_examples=3)
@given(data=st.data())
def test_two_ranks_equal_one(two: Pool, subject: str, data: st.DataObject) -> None:
    assert_same(two, data.draw(comparisons(subject, 2)))


@pytest.mark.parametrize("subject", SUBJECTS)
@settings(max_examples=2)
@given(data=st.data())
def test_four_ranks_equal_one(four: Pool, subject: str, data: st.DataObject) -> None:
    assert_same(four, data.draw(comparisons(subject, 4)))


@pytest.mark.parametrize("hidden", ["", "some", "of one rank", "of one text"])
@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("subject", [name for name in SUBJECTS if name.startswith(OF_ANY_HEADS)])
def test_one_head_on_four_ranks(four: Pool, subject: str, causal: bool, hidden: str) -> None:
    for lengths, zigzag in (((6, 0, 9, 4), False), ((5, 8, 3, 6), True)):
        assert_same(four, Setting(subject, lengths, None, zigzag, causal, hidden, batch=(2, 1)))


@pytest.mark.parametrize("subject", ["hashed", "hashed, shared"])
def test_fewer_chunks_than_ranks(four: Pool, subject: str) -> None:
    assert_same(four, Setting(subject, (2, 0, 3, 1), batch=(1,)))


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("subject", ["strided", "hashed", "hashed, shared"])
def test_what_masked_keys_hold_is_not_read(two: Pool, subject: str, causal: bool) -> None:
    assert max(two.run(unread, subject, (9, 9), causal)) == 0


BY_KERNELS = ("softmax", "gaussian", "window", "window, leading", "fixed", "fixed, two summaries", "fixed_steps")
BY_KERNELS += ("strided", "strided, long", "strided_steps", "hashed", "hashed, shared")
BY_KERNELS += ("efficient", "factored, pooling", "nystrom", "projected", "near_far", "near_far, leading")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("subject", BY_KERNELS)
@settings(max_examples=4)
@given(data=st.data())
def test_slices_by_compiled_kernels(two: Pool, kernel_cache: Path, subject: str, data: st.DataObject) -> None:
    """Slices as long as some tiles of the kernels, against torch's operations in one process."""
    assert_same(two, data.draw(comparisons(subject, 2, 90)), kernel_cache)


OFF = [
    Setting("fixed", (0, 19, 24, 19), causal=True, dtype=torch.bfloat16, batch=(4,), values=4, seed=5),
    Setting("fixed_steps", (15, 14, 30, 7), None, True, hidden="of one rank", dtype=torch.bfloat16, values=6, seed=1),
]
"""Gradients of rows that several ranks want were once added in bfloat16."""


@pytest.mark.parametrize("setting", OFF, ids=lambda setting: setting.subject)
def test_gradients_of_shared_rows_are_rounded_once(four: Pool, setting: Setting) -> None:
    assert_same(four, setting)


WIDE = {"dtype": torch.float32, "width": 20, "values": 18}
WITH_STATES = [
    Setting("near_far", (19, 12), values=4),
    Setting("near_far", (13, 20), causal=True, hidden="some", dtype=torch.float32),
    Setting("near_far", (12, 17), hidden="of one rank", dtype=torch.bfloat16),
    Setting("near_far, leading", (15, 9), zigzag=True, hidden="of one text"),
    Setting("near_far, leading", (1, 30), causal=True, zigzag=True),
    Setting("near_far, leading", (14, 15), causal=True, batch=(4,)),
    Setting("efficient", (70, 83), **WIDE),
    Setting("efficient", (70, 0), (40, 60), hidden="some", **WIDE),
    Setting("efficient", (83, 70), hidden="of one text", key_heads=2, **WIDE),
    Setting("efficient", (150, 83), causal=True, **WIDE),
    Setting("efficient", (71, 80), zigzag=True, causal=True, hidden="of one rank", key_heads=2, **WIDE),
    Setting("efficient", (0, 100), causal=True, hidden="some", dtype=torch.bfloat16),
    Setting("factored, pooling", (70, 83), **WIDE),
]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("setting", WITH_STATES, ids=lambda setting: setting.subject)
def test_the_kernels_add_the_states_of_other_ranks(two: Pool, kernel_cache: Path, setting: Setting) -> None:
    assert_same(two, setting, kernel_cache)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("lengths", [(1, 42), (1, 1)], ids=str)
def test_the_kernels_where_a_rank_holds_fewer_keys_than_are_leading(
    two: Pool, kernel_cache: Path, lengths: tuple[int, ...], causal: bool
) -> None:
    assert_same(two, Setting("window, leading", lengths, causal=causal, width=16), kernel_cache)


@pytest.mark.usefixtures("kernels")
def test_the_kernels_round_on_slices_as_in_one_process(four: Pool, kernel_cache: Path) -> None:
    """Scores of some ten, whose exponentials lose a digit."""
    lengths, query_lengths = (0, 58, 90, 90), (0, 67, 90, 90)
    setting = Setting("gaussian", lengths, query_lengths, causal=True, dtype=torch.float32, values=6, seed=2)
    assert_same(four, setting, kernel_cache)


@pytest.mark.parametrize("subject", ["softmax", "window", "strided", "hashed", "efficient", "kronecker"])
def test_the_adjoint_is_the_transpose(two: Pool, subject: str) -> None:
    heads = 1 if subject.startswith(OF_ANY_HEADS) else 4
    forth, back = (sum(parts) for parts in zip(*two.run(products, subject, (5, 7), heads), strict=True))
    assert forth == pytest.approx(back, rel=1e-12)


@pytest.mark.parametrize("lengths", [(9, 7), (0, 5)], ids=["two slices", "an empty one"])
@pytest.mark.parametrize("zigzag", [False, True], ids=["contiguous", "zig-zag"])
@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("subject", ["efficient", "dot_product", "uniform", "strided", "strided_steps", "hashed"])
def test_second_derivatives(two: Pool, subject: str, causal: bool, zigzag: bool, lengths: tuple[int, ...]) -> None:
    assert max(two.run(second_derivatives, subject, lengths, zigzag, causal)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("subject", SUBJECTS)
@settings(max_examples=40)
@given(data=st.data())
def test_many_slices(
    request: pytest.FixtureRequest, two: Pool, four: Pool, subject: str, compiled: bool, data: st.DataObject
) -> None:
    if compiled:
        request.getfixturevalue("kernels")
    ranks = data.draw(st.sampled_from([2, 4]))
    cache = request.getfixturevalue("kernel_cache") if compiled else None
    assert_same({2: two, 4: four}[ranks], data.draw(comparisons(subject, ranks, 90 if compiled else 40)), cache)
