"""Which dimensions of a module's queries and keys turn together with the position, seen from what it computes.

The module is called once more with the same vector at every position.  Dimensions that stay equal are not rotated; a
pair (a, b) of those that change is rotated if a^2 + b^2 stays equal.  Both layouts in use are tried: b = a + k/2
(halves) and b = a + 1 (neighbours), over all of the width or its first part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.errors import UnsupportedError

TOLERANCE = 1e-3
"""Of the largest value: rounding of float32 through a projection and a rotation."""


def rotated_pairs(owner: str, q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    """The pairs, from queries (b, h, n, k) and keys (b, h_kv, n, k) of one vector repeated; [] if none turns."""
    n = min(q.shape[-2], k.shape[-2])
    both = torch.cat([x[..., :n, :].double().flatten(0, 1) for x in (q, k)])  # (heads, n, k)
    scale = both.abs().amax().clamp(min=torch.finfo(torch.float64).tiny)
    turning = (both - both[:, :1]).abs().amax((0, 1)) > TOLERANCE * scale
    if not bool(turning.any()):
        return []
    least = int(turning.nonzero().max()) + 1
    # the slowest pairs may not have turned measurably: the widest layout that fits is taken
    for width in (w for w in range(both.shape[-1], least - 1, -1) if w % 2 == 0):
        halves = [(i, i + width // 2) for i in range(width // 2)]
        neighbours = [(i, i + 1) for i in range(0, width, 2)]
        for pairs in (halves, neighbours):
            a, b = (both[..., list(side)] for side in zip(*pairs, strict=True))
            length = a.square() + b.square()
            if bool(((length - length[:, :1]).abs() <= 2 * TOLERANCE * scale**2).all()):
                return pairs
    raise UnsupportedError(
        f"{owner}: its queries or keys change with the position, but not by rotating pairs of dimensions; its heads "
        "keep their width"
    )
