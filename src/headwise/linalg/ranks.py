"""How many directions P uses: effective, stable and numeric rank, and the energy in the leading r.

All take a `Spectrum`.  A measure that needs singular values that were not computed raises, or returns bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.errors import InputError, UnsupportedError
from headwise.linalg.spectrum import Spectrum
from headwise.shapes import shown


def effective_rank(spectrum: Spectrum) -> Tensor:  # (*batch,)
    """exp(-sum_i p_i ln p_i), p_i = sigma_i / sum_j sigma_j: 1 for one direction, k for k equal ones (0 for P = 0).

    Roy & Vetterli 2007.  Needs every singular value; for a truncated spectrum use `effective_rank_bounds`.

    >>> from headwise.linalg.spectrum import dense_spectrum
    >>> round(effective_rank(dense_spectrum(torch.eye(5))).item(), 6)
    5.0
    """
    _is_spectrum("effective_rank", spectrum)
    if not spectrum.complete:
        raise UnsupportedError(
            f"effective_rank: needs all {spectrum.count} singular values, but {spectrum.values.shape[-1]} are given; "
            "compute all of them, or use effective_rank_bounds"
        )
    return _exp_entropy(spectrum.values, torch.zeros_like(spectrum.values[..., 0]), 1)


def effective_rank_bounds(spectrum: Spectrum) -> tuple[Tensor, Tensor]:
    """(lowest, highest) effective rank consistent with the leading values, and with ||P||_F where it is known.

    Adding a value at or below the smallest one raises the entropy.  So it is lowest when the missing values are zero,
    and highest when they are equal and as large as sigma_r and the missing energy allow.  The `errors` of the values
    are not propagated.
    """
    _is_spectrum("effective_rank_bounds", spectrum)
    values, missing = spectrum.values, spectrum.count - spectrum.values.shape[-1]
    low = _exp_entropy(values, torch.zeros_like(values[..., 0]), 1)
    if missing == 0:
        return low, low
    tail = values[..., -1]
    if spectrum.frobenius is not None:
        energy = (spectrum.frobenius.square() - values.square().sum(-1)).clamp_min(0)
        tail = torch.minimum(tail, (energy / missing).sqrt())
    return low, _exp_entropy(values, tail, missing)


def _exp_entropy(values: Tensor, tail: Tensor, copies: int) -> Tensor:
    """The effective rank of `values` with `copies` more of the value `tail`."""
    total = values.sum(-1) + copies * tail
    share = values / total.clamp_min(torch.finfo(values.dtype).tiny).unsqueeze(-1)
    rest = tail / total.clamp_min(torch.finfo(values.dtype).tiny)
    entropy = -torch.xlogy(share, share).sum(-1) - copies * torch.xlogy(rest, rest)
    return torch.where(total > 0, entropy.exp(), 0.0)


def stable_rank(spectrum: Spectrum) -> Tensor:  # (*batch,)
    """||P||_F^2 / sigma_1^2, at most the rank, insensitive to small values (0 for P = 0).  Rudelson & Vershynin 2007.

    >>> from headwise.linalg.spectrum import dense_spectrum
    >>> round(stable_rank(dense_spectrum(torch.diag(torch.tensor([2.0, 1.0, 1.0])))).item(), 6)
    1.5
    """
    _is_spectrum("stable_rank", spectrum)
    top = spectrum.values[..., 0].square()
    ratio = _total("stable_rank", spectrum) / top.clamp_min(torch.finfo(top.dtype).tiny)
    return torch.where(top > 0, ratio, 0.0)


def numeric_rank(spectrum: Spectrum, tolerance: float) -> Tensor:  # (*batch,) int64
    """#{i : sigma_i > tolerance sigma_1}: the number of singular values above a relative tolerance.

    >>> from headwise.linalg.spectrum import dense_spectrum
    >>> numeric_rank(dense_spectrum(torch.diag(torch.tensor([1.0, 0.5, 1e-9]))), 1e-6).item()
    2
    """
    _is_spectrum("numeric_rank", spectrum)
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
        raise InputError(
            f"numeric_rank: tolerance is relative to sigma_1 and must lie in [0, 1), but is {shown(tolerance)}"
        )
    above = spectrum.values > tolerance * spectrum.values[..., :1]
    if not spectrum.complete and above[..., -1].any():
        raise UnsupportedError(
            f"numeric_rank: all {spectrum.values.shape[-1]} of {spectrum.count} values given are above {tolerance} "
            "sigma_1, so the rank is not known; compute more values"
        )
    return above.sum(-1)


def energy(spectrum: Spectrum) -> Tensor:  # (*batch, r)
    """sum_(j <= i) sigma_j^2 / ||P||_F^2 for i = 1..r: the share of P's energy in its leading i directions.

    High energy does not imply a small error of P V: with an attention sink, most of the energy multiplies a small value
    vector.
    """
    _is_spectrum("energy", spectrum)
    total = _total("energy", spectrum).unsqueeze(-1)
    share = spectrum.values.square().cumsum(-1) / total.clamp_min(torch.finfo(total.dtype).tiny)
    return torch.where(total > 0, share.clamp_max(1.0), 1.0)


def low_rank_error(spectrum: Spectrum) -> Tensor:  # (*batch, r)
    """min over rank-i Q of ||P - Q||_F / ||P||_F = sqrt(1 - energy_i) for i = 1..r.  Eckart & Young 1936.

    >>> from headwise.linalg.spectrum import dense_spectrum
    >>> low_rank_error(dense_spectrum(torch.diag(torch.tensor([4.0, 3.0]))))
    tensor([0.6000, 0.0000], dtype=torch.float64)
    """
    _is_spectrum("low_rank_error", spectrum)
    total = _total("low_rank_error", spectrum)
    square = spectrum.values.square()
    # summed from the small end: 1 - energy cancels once the tail is below 1e-16 of the total
    after = square.flip(-1).cumsum(-1).flip(-1) - square
    missing = torch.zeros_like(total) if spectrum.complete else (total - square.sum(-1)).clamp_min(0)
    share = (after + missing.unsqueeze(-1)) / total.clamp_min(torch.finfo(total.dtype).tiny).unsqueeze(-1)
    return share.clamp_min(0).sqrt()


def _is_spectrum(owner: str, spectrum: object) -> None:
    if not isinstance(spectrum, Spectrum):
        raise InputError(f"{owner}: spectrum must be a Spectrum, as dense_spectrum returns, but is {shown(spectrum)}")


def _total(owner: str, spectrum: Spectrum) -> Tensor:
    """||P||_F^2."""
    if spectrum.frobenius is not None:
        return spectrum.frobenius.square()
    if spectrum.complete:
        return spectrum.values.square().sum(-1)
    raise UnsupportedError(
        f"{owner}: needs ||P||_F, but {spectrum.values.shape[-1]} of {spectrum.count} values are given and no norm; "
        "add it with dataclasses.replace(spectrum, frobenius=...)"
    )
