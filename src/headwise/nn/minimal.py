"""Three taps in a row, two outputs from four products: y_0 = m_0 + m_1 + m_2, y_1 = m_1 - m_2 - m_3 (Winograd 1980).

    m_0 = (x_0 - x_2) w_0                       m_2 = (x_2 - x_1)(w_0 - w_1 + w_2) / 2
    m_1 = (x_1 + x_2)(w_0 + w_1 + w_2) / 2      m_3 = (x_1 - x_3) w_2

The sum of three neighbouring shifts needs 4 channel products for every 2 rows where tap by tap needs 6.  Rows are taken
in blocks that stay in the processor's cache, into buffers that are written again and again; that is why this is for
inference only: a gradient would need what was overwritten.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 18
"""Numbers in a block of transformed rows, 1 MB in float32.  Measured on 64 channels: twice as many leave the cache and
are up to 1.7 times slower, half as many up to 1.4 times for the calls."""
WORTHWHILE = 16
"""Channels from which the products outweigh the additions."""


def applies(x: Tensor, weight: Tensor, *, unit: bool) -> bool:
    """Two axes, three rows of taps one cell apart (`unit`: no stride, no gaps), wide enough, and nobody watching.

    Gradients, tracing and vmap need each step as a value of its own.
    """
    watched = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return (
        unit
        and not watched
        and min(weight.shape[-2:]) >= WORTHWHILE
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)  # pyright: ignore[reportAttributeAccessIssue]
        and type(x) is Tensor
    )


@torch.no_grad()
def three_rows(x: Tensor, weight: Tensor, gap: int, padding: tuple[tuple[int, int], tuple[int, int]]) -> Tensor:
    """sum_ij W_ij x[., ., y + i, z + gap j] of x (b, c, *) padded by zeros, weight (3, K, o, c) -> (b, o, y, z)."""
    (above, below), (left, right) = padding
    rows, wide = x.shape[2] + above + below - 2, x.shape[3] + left + right
    if rows % 2:
        return three_rows(x, weight, gap, ((above, below + 1), (left, right)))[:, :, :rows]
    top, middle, bottom = weight.detach().unbind(0)  # (K, o, c)
    ends, half = (top + bottom) / 2, middle / 2
    u = torch.stack([top, ends + half, ends - half, bottom], dim=1)  # (K, 4, o, c)
    out = x.new_empty(x.shape[0], weight.shape[2], rows, wide - gap * (weight.shape[1] - 1))
    pairs = max(1, min(rows // 2, BLOCK // (4 * x.shape[1] * wide)))
    images = max(1, BLOCK // (4 * x.shape[1] * pairs * wide)) if pairs == rows // 2 else 1
    buffers: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
    for first in range(0, x.shape[0], images):
        for row in range(0, rows, 2 * pairs):
            y = out[first : first + images, :, row : row + 2 * pairs].transpose(0, 1)
            size = (y.shape[1], y.shape[2] // 2)
            if size not in buffers:
                buffers[size] = _buffers(x, weight, *size, wide)
            block, v, m = buffers[size]
            start, stop = max(0, row - above), min(x.shape[2], row - above + block.shape[2])
            at = start - (row - above)  # rows of the block before the first row of x
            block[:, :, :at] = 0
            block[:, :, at + stop - start :] = 0
            block[:, :, at : at + stop - start, left : left + x.shape[3]] = x[
                first : first + images, :, start:stop
            ].transpose(0, 1)
            _block(block, y, u, gap, v, m)
    return out


def _buffers(x: Tensor, weight: Tensor, images: int, pairs: int, wide: int) -> tuple[Tensor, Tensor, Tensor]:
    """The padded rows of a block (the sides stay zero), their four transforms, and the four products."""
    cells = images * pairs * wide
    block = x.new_zeros(x.shape[1], images, 2 * pairs + 2, wide)
    return block, x.new_empty(4, x.shape[1], cells), x.new_empty(4, weight.shape[2], cells)


def _block(x: Tensor, y: Tensor, u: Tensor, gap: int, v: Tensor, m: Tensor) -> None:
    """One block: x (c, images, rows + 2, z) into y (o, images, rows, width), by way of v and m."""
    _, images, rows, width = y.shape
    tiles = (images, rows // 2, x.shape[3])
    even, odd = x[:, :, 0::2], x[:, :, 1::2]
    x0, x2, x1, x3 = even[:, :, :-1], even[:, :, 1:], odd[:, :, :-1], odd[:, :, 1:]
    into = v.unflatten(-1, tiles)
    torch.sub(x0, x2, out=into[0])
    torch.add(x1, x2, out=into[1])
    torch.sub(x2, x1, out=into[2])
    torch.sub(x1, x3, out=into[3])
    # columns are flat offsets: what runs over the end of a row is not read below
    length = v.shape[-1] - gap * (u.shape[0] - 1)
    sums = m[..., :length]
    for column in range(u.shape[0]):
        values = v[..., column * gap : column * gap + length]
        if column:
            sums.baddbmm_(u[column], values)
        else:
            torch.bmm(u[column], values, out=sums)
    m0, m1, m2, m3 = m.unflatten(-1, tiles)[..., :width]
    pair = y.unflatten(2, (-1, 2))
    torch.add(m1, m2, out=pair[:, :, :, 0]).add_(m0)
    torch.sub(m1, m2, out=pair[:, :, :, 1]).sub_(m3)
