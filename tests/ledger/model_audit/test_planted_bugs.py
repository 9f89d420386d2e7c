"""Bugs, planted one at a time: each is found by the verdict that is about it, and by no other where it can be."""

from __future__ import annotations

import pytest

import headwise
from headwise.ledger.model_audit.attention_forms import FORMS, ROWS
from headwise.ledger.model_audit.cached_decoding import AFTER_PADDING, BY_CHUNK, BY_TOKEN
from headwise.ledger.model_audit.causality import GRADIENT, PERTURBATION
from headwise.ledger.model_audit.layer_reach import WINDOWS
from headwise.ledger.model_audit.promise import Standing
from headwise.ledger.model_audit.repeated_runs import BATCH, DETERMINISTIC, FINITE, LEFT, RIGHT
from tests.ledger.model_audit.broken_decoder import small_decoder

CAUSAL, CACHES = {PERTURBATION, GRADIENT}, {BY_TOKEN, BY_CHUNK, AFTER_PADDING}

EXACTLY = {
    "NaN": {FINITE},
    "padding is attended to": {LEFT},
    "position_ids are ignored": {LEFT},
    "positions after the cache are off by one": CACHES,
    "cached keys are not rotated": CACHES,
    "a chunk sees the beginning of the cache only": {BY_CHUNK},
    "the padding mask is dropped after the prompt": {AFTER_PADDING},
    "another scale in eager": {FORMS},
    "a mean over the batch": {BATCH},
    "dropout in eval": {DETERMINISTIC},
}
"""Bug -> the promises that it breaks."""

AMONG = {
    # keys of later queries are missing when tokens are decoded one by one, and the last real token sees padding instead
    "a mask that is off by one": (CAUSAL, CACHES | {RIGHT, LEFT}),
    "a norm over the sequence": (CAUSAL, CACHES | {RIGHT, LEFT}),
    "a convolution that looks ahead": (CAUSAL, CACHES | {RIGHT, LEFT}),
    # one of the two forms is wrong
    "a softmax over the wrong axis in eager": ({ROWS, FORMS}, set()),
}
"""Bug -> the promises that must be seen broken, and those that it breaks as a consequence."""

WINDOW_BUGS = ("a window that is ignored", "a window one too wide", "a window one too narrow")


@pytest.mark.parametrize("window", [None, 6])
def test_the_decoder_without_a_bug_keeps_everything(window: int | None) -> None:
    audit = headwise.verify(small_decoder(window=window))
    assert audit.violated == ()
    kept = {x.name for x in audit.promises if x.standing is Standing.KEPT}
    assert kept == {FINITE, DETERMINISTIC, *CAUSAL, ROWS, FORMS, BATCH, RIGHT, LEFT, *CACHES} | (
        {WINDOWS} if window else set()
    )


def test_absolute_positions_need_position_ids() -> None:
    audit = headwise.verify(small_decoder("absolute positions"))
    assert audit.violated == ()
    assert "if position_ids count the real tokens" in audit[LEFT].sentence


@pytest.mark.parametrize("bug", EXACTLY)
def test_a_bug_is_found_by_its_verdict_alone(bug: str) -> None:
    audit = headwise.verify(small_decoder(bug))
    assert set(audit.violated) == EXACTLY[bug]
    for name in EXACTLY[bug] - {FINITE}:
        promise = audit[name]
        assert promise.measured is not None
        assert promise.floor is not None
        assert promise.measured > 100 * promise.floor
        assert promise.where


def test_a_cache_that_needs_position_ids_says_so() -> None:
    """The default positions are wrong; given ones are right."""
    wrong, never = (
        small_decoder(bug) for bug in ("positions after the cache are off by one", "cached keys are not rotated")
    )
    assert headwise.verify(wrong)[BY_TOKEN].sentence.endswith("With position_ids it gives the same.")
    assert "position_ids" not in headwise.verify(never)[BY_TOKEN].sentence


@pytest.mark.parametrize("bug", AMONG)
def test_a_bug_with_consequences_is_found_by_its_verdict(bug: str) -> None:
    found, (required, consequences) = set(headwise.verify(small_decoder(bug)).violated), AMONG[bug]
    assert required <= found <= required | consequences


@pytest.mark.parametrize("bug", WINDOW_BUGS)
def test_a_wrong_window_is_found(bug: str) -> None:
    audit = headwise.verify(small_decoder(bug, window=6))
    assert audit.violated == (WINDOWS,)
    assert "layers.0, position" in audit[WINDOWS].where
