"""Sequences that a model cuts into windows: one measurement for each site of a sequence.

A model such as Swin computes a small P for each window of an image.  All of P is block-diagonal; what is said of a head
is said of an average block: numbers are means over the windows, discrete ones the most frequent value.  Windows may
differ in size, because padding is not measured; the lengths of the site are those of its largest window.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from headwise.examination.measure.head_measures import MEASURES
from headwise.shapes import filled


class OneSite(Protocol):
    """What was measured of one attention call, on one sequence or on one window of it."""

    @property
    def site(self) -> Any: ...  # with a name

    lengths: tuple[int, int]  # (m, n)
    numbers: dict[str, Tensor]
    spectral: dict[str, Tensor]
    profile: Tensor
    leading: Tensor
    sampled_rows: Tensor
    spectra_exact: bool


S = TypeVar("S", bound=OneSite)


def over_windows(measured: list[S]) -> list[S]:
    """The measurements of one sequence, those of windows of one site combined in the first of them."""
    by_site: dict[str, list[S]] = {}
    for each in measured:
        by_site.setdefault(each.site.name, []).append(each)
    return [_combined(windows) for windows in by_site.values()]


def _combined(windows: list[S]) -> S:
    first = windows[0]
    if len(windows) > 1:
        first.numbers, first.spectral = _means([x.numbers for x in windows]), _means([x.spectral for x in windows])
        first.profile = torch.stack([x.profile for x in windows]).mean(0)
        first.lengths = max(x.lengths[0] for x in windows), max(x.lengths[1] for x in windows)
        first.leading = torch.stack(_equally_long([x.leading for x in windows])).mean(0)
        first.sampled_rows = torch.cat(_equally_long([x.sampled_rows for x in windows]), dim=1)
        first.spectra_exact = all(x.spectra_exact for x in windows)
    return first


def _equally_long(tensors: list[Tensor]) -> list[Tensor]:
    """Zeros at the end of the last axis of all but the longest: no singular value, no weight."""
    longest = max(x.shape[-1] for x in tensors)
    return [filled(x, (0, longest - x.shape[-1]), 0.0) for x in tensors]


def _means(windows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean, or the mode of a discrete measure, of what all windows have."""
    found = {}
    for name in windows[0]:
        if all(name in numbers for numbers in windows):
            values = torch.stack([numbers[name] for numbers in windows])
            found[name] = values.mode(0).values if MEASURES[name].discrete else values.nanmean(0)
    return found
