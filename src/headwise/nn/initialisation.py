"""Weights that start with a structure instead of noise, for `MultiHead` and `GridAttention`, in place.

    mimetic_   W_q W_k^T = 0.7 Z + 0.7 I,  W_v W_o = 0.4 Z' - 0.4 I      what trained transformers look like
    impulse_   softmax(p W_q W_k^T p^T) ~ a shift by one kernel cell a head   what a convolution looks like

Z and Z' are Gaussian with variance 1 / width.  Mimetic initialisation: Trockman & Kolter 2023; attention that starts as
random impulse filters: Zheng, Li & Lucey 2024.  Both rely on positions p that are added to the input, as sinusoidal
ones are by `PatchEmbedding`.  Biases of the weights that are set become zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headwise.errors import InputError, ShapeError, UnsupportedError
from headwise.nn.grid import GridAttention
from headwise.nn.multihead import MultiHead
from headwise.nn.ragged_heads import head_slices
from headwise.operators.relative.shift import shift
from headwise.shapes import all_finite, is_generator, no_empty_axis, same_axis, shown, whole_tuple

WEAKEST_DIRECTION = 0.05
"""Directions of positions below this share of the strongest one are not used."""

LARGEST_SCALE = 2.0**16
"""Scores are not made larger than this in the search for a share of the attention."""


@torch.no_grad()
def mimetic_(
    layer: MultiHead | GridAttention,
    *,
    query_key: tuple[float, float] = (0.7, 0.7),
    value_out: tuple[float, float] = (0.4, 0.4),
    generator: torch.Generator | None = None,
) -> None:
    """W_q,h W_k,h^T = a Z_h + b I, the best of its rank, and W_v W_o = a' Z' - b' I, (a, b) and (a', b') as given.

    The layer attends from x to x: its input, context and output have one width.

    >>> layer = MultiHead(8, 2)
    >>> mimetic_(layer)
    >>> (layer.out.weight @ layer.value.weight).diagonal().mean() < 0
    tensor(True)
    """
    attend = _multihead("mimetic_", layer)
    is_generator("mimetic_", generator)
    for name, pair in (("query_key", query_key), ("value_out", value_out)):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(map(_is_number, pair)):
            raise InputError(f"mimetic_: {name} must be two finite numbers, but is {shown(pair)}")
    width = attend.width
    if {*attend.context_widths, attend.out_width} != {width}:
        raise UnsupportedError(
            f"mimetic_: a multiple of the identity needs one width, but the layer maps {width}, with a context of "
            f"{attend.context_widths}, to {attend.out_width}"
        )

    def product(noise: float, identity: float, rank: int) -> tuple[Tensor, Tensor]:
        """(rank, width) twice: the rows of A and B with A^T B near noise Z + identity I."""
        z = torch.randn(width, width, generator=generator, dtype=torch.float64) / math.sqrt(width)
        return _factors(noise * z + identity * torch.eye(width, dtype=torch.float64), rank)

    for rows, k in zip(head_slices(attend.key_widths), attend.key_widths, strict=True):
        for linear, part in zip((attend.query, attend.key), product(*query_key, min(k, width)), strict=True):
            _set_rows(linear, rows, part)
    total = sum(attend.value_widths)
    noise, identity = value_out
    value, out = product(noise, -identity, min(total, width))
    _set_rows(attend.value, slice(0, total), value)
    attend.out.weight.zero_()
    attend.out.weight[:, : len(out)] = out.mT.to(attend.out.weight)
    if attend.out.bias is not None:
        attend.out.bias.zero_()


@torch.no_grad()
def impulse_(
    layer: MultiHead | GridAttention,
    positions: Tensor,
    grid: Sequence[int],
    *,
    offsets: Sequence[Sequence[int]] | None = None,
    share: float = 0.5,
    generator: torch.Generator | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Head h attends from every cell to the cell at offsets[h], with weight `share` on average; returns the offsets.

    positions  (n, width): what the layer receives besides content, such as `layer_norm(sinusoidal(cells(grid), width))`
    offsets    one for each head, in cells; by default random cells of a kernel of three cells along each axis
    share      of a row of P on the cell aimed at, for positions alone; near 1 leaves no gradient.  Less is reached if
               the heads are too narrow, or positions too much alike, to tell the cells apart.

    W_q and W_k of a head are the best of their rank for scores that are one at that cell and zero elsewhere, scaled.
    Beyond the border the nearest cell counts.

    >>> from headwise.operators.relative.encodings import cells, sinusoidal
    >>> layer, p = MultiHead(32, 2), sinusoidal(cells((4, 4)), 32)
    >>> _ = impulse_(layer, p, (4, 4), offsets=[(0, 1), (0, 0)])
    >>> layer.operator(p).dense()[0, 5].argmax().item()  # the cell to the right of cell 5
    6
    """
    attend = _multihead("impulse_", layer)
    is_generator("impulse_", generator)
    grid = whole_tuple("impulse_", "grid", grid)
    no_empty_axis("impulse_", positions=positions)
    all_finite("impulse_", positions=positions)
    same_axis("impulse_", "n", positions=positions.shape[-2], grid=math.prod(grid))
    if attend.context_widths[0] != attend.width or positions.dim() != 2:
        raise UnsupportedError(
            f"impulse_: queries and keys come from the same positions (n, width), but positions have shape "
            f"{tuple(positions.shape)}, queries come from width {attend.width} and keys from {attend.context_widths[0]}"
        )
    same_axis("impulse_", "width", positions=positions.shape[-1], layer=attend.width)
    if not _is_number(share) or not 0 < share < 1:
        raise InputError(f"impulse_: share must be a number between 0 and 1, but is {shown(share)}")
    chosen = _offsets(attend.heads, len(grid), offsets, generator)
    p = positions.double()
    # (width, n); directions in which positions hardly differ would get weights that drown content
    inverse = torch.linalg.pinv(p, rtol=WEAKEST_DIRECTION)
    for offset, rows, k in zip(chosen, head_slices(attend.key_widths), attend.key_widths, strict=True):
        target = shift(grid, offset, border="replicate").dense(p)
        wanted = inverse @ target @ inverse.mT  # p wanted p^T is the target, as far as positions tell cells apart
        # equal singular values: a little noise makes the k directions that are kept random instead of k single cells
        noise = torch.randn(wanted.shape, generator=generator, dtype=p.dtype)
        query, key = _factors(wanted + 1e-3 * wanted.abs().mean() * noise, min(k, attend.width))
        factor = _scale((p @ query.mT) @ (p @ key.mT).mT, target, share) * math.sqrt(k)
        _set_rows(attend.query, rows, math.sqrt(factor) * query)
        _set_rows(attend.key, rows, math.sqrt(factor) * key)
    return chosen


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def _multihead(owner: str, layer: nn.Module) -> MultiHead:
    layer = layer.attend if isinstance(layer, GridAttention) else layer
    if not isinstance(layer, MultiHead):
        raise InputError(f"{owner}: needs a MultiHead or GridAttention layer, but got {shown(layer)}")
    return layer


def _factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A and B (rank, width) with A^T B the best approximation of the matrix, both of one size."""
    u, s, vt = torch.linalg.svd(matrix)
    root = s[:rank].sqrt().unsqueeze(-1)
    return root * u.mT[:rank], root * vt[:rank]


def _set_rows(linear: nn.Linear, rows: slice, part: Tensor) -> None:
    """The rows of a weight and its bias: `part` first, the rest zero."""
    linear.weight[rows] = 0
    linear.weight[rows][: len(part)] = part.to(linear.weight)
    if linear.bias is not None:
        linear.bias[rows] = 0


def _offsets(
    heads: int, axes: int, offsets: Sequence[Sequence[int]] | None, generator: torch.Generator | None
) -> tuple[tuple[int, ...], ...]:
    if offsets is None:
        kernel = list(itertools.product((-1, 0, 1), repeat=axes))
        order = [i for _ in range(-(-heads // len(kernel))) for i in torch.randperm(len(kernel), generator=generator)]
        return tuple(kernel[i] for i in order[:heads])
    if isinstance(offsets, Tensor) or not isinstance(offsets, Sequence):
        raise InputError(f"impulse_: offsets must be a sequence of one offset a head, but is {shown(offsets)}")
    if len(offsets) != heads:
        raise ShapeError(f"impulse_: axis 'h' must agree, but the layer has {heads}, offsets has {len(offsets)}")
    found = tuple(whole_tuple("impulse_", f"offsets[{i}]", offset, least=-(2**31)) for i, offset in enumerate(offsets))
    for i, offset in enumerate(found):
        same_axis("impulse_", "dimension", grid=axes, **{f"offsets[{i}]": len(offset)})
    return found


def _scale(scores: Tensor, target: Tensor, share: float) -> float:
    """The factor of the scores at which a row of softmax has `share` of its weight at the target, on average."""

    def reached(factor: float) -> float:
        return (torch.softmax(factor * scores, -1) * target).sum(-1).mean().item()

    high = 1.0
    while reached(high) < share and high < LARGEST_SCALE:
        high *= 2
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) < share else (low, middle)
    return high
