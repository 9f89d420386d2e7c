"""What one `apply` costs: multiply-adds, stored scalars and sequential depth.

multiply_adds  products inside matrix multiplications and weighted sums; exponentials and copies are not counted
scalars        numbers stored at once beyond the inputs and the output
depth          length of the longest chain of dependent steps as a function of n (a scan over n steps has depth n;
               a matrix product counts as one step)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Costs add when operators run one after the other, and multiply when one runs many times over a batch.

    >>> Cost(10, 5) + Cost(2, 7)
    Cost(multiply_adds=12, scalars=7, depth=2)
    """

    multiply_adds: int
    scalars: int = 0
    depth: int = 1

    def __add__(self, other: Cost) -> Cost:
        """One after the other: work and depth add up, the larger working set counts."""
        return Cost(
            self.multiply_adds + other.multiply_adds, max(self.scalars, other.scalars), self.depth + other.depth
        )

    def beside(self, other: Cost) -> Cost:
        """Side by side: work and storage add up, the longer chain counts."""
        return Cost(
            self.multiply_adds + other.multiply_adds, self.scalars + other.scalars, max(self.depth, other.depth)
        )

    def times(self, count: int) -> Cost:
        """`count` copies side by side, such as the heads of a layer."""
        return Cost(self.multiply_adds * count, self.scalars * count, self.depth)
