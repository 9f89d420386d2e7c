"""Every tuning constant and sentinel of the operators.  Read as `limits.NAME`, so that a test can change one."""

import torch

HIDDEN = -1e30
"""Score of a masked key.  Finite, so that no difference of two is NaN; its exponential is exactly zero."""

LARGEST_SCORE = 1e29
"""Scores of operators that use HIDDEN stay below this, so that no visible key is taken for a masked one."""

LARGEST_LSE = 2.0**-10
"""S - lse keeps ten bits if |lse| eps is below this; beyond it P is computed from differences to the row maximum."""

LARGE_NEGATIVE = -1e4
"""An additive mask of zeros and numbers up to this one is read as a boolean mask."""

SELF_SCORE = -1e5
"""Score of a position with itself in shared-QK hashing (Reformer): it counts only where there is no other key."""

NYSTROM_STEPS = 100
"""Most steps towards a pseudo-inverse; six converge for most heads."""

MAX_COLUMNS = 512
"""Columns in one call of the fused kernel; measured per column, wider calls stop getting cheaper."""

SCORE_ENTRIES = 1 << 22
"""Entries of S or P, over the whole batch, that a chunked path may hold at once (16 MB in float32)."""

CACHE_ENTRIES = 1 << 19
"""Elements worked on at once in block-wise kernels (2 MB in float32): larger buffers need new pages; measured."""

TILES_FROM = 32
"""Queries and keys from which the compiled tiles are faster than torch's fused attention in every measured case."""

HASH_ENTRIES = 1 << 20
"""Scores of one hashing round worked on at once (4 MB in float32); measured."""

PREFIX_BLOCK = 64
"""Positions in a block of causal running sums: work inside blocks equals that on the states when k = d = 64."""

DIAGONAL_BLOCK = 64
"""Side of the diagonal blocks of `dot_product` (at least) and `concatenation` that are computed entry by entry."""

SHORT_TOEPLITZ = 256
"""Up to this many queries or keys, rows of a Toeplitz P times v are faster than Fourier transforms (measured, CPU)."""

MAX_RISE = {torch.float32: 120.0, torch.float64: 1200.0}
"""How much a running maximum may rise inside a block: exponentials of half of it stay far from overflow."""

MAX_RANGE = 600.0
"""How much a running maximum may rise over the whole sequence: states are summed in double precision."""

FLOAT32_RANGE = 60.0
"""Spread of block maxima up to which sums over blocks may stay in single precision."""
