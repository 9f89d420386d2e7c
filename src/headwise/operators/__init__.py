"""Attention as a linear operator P, one published idea a file.  Each builder checks its input and returns an operator.

    exact       softmax, gaussian, embedded_gaussian, dot_product, concatenation, similarity (any f), uniform
    sparse      window, strided, fixed, hashed
    linear      efficient, factored, projected, nystrom, window_low_rank, near_far, and `projections` for their slots
    relative    positional, quadratic, shift, offset, toeplitz, toeplitz_softmax
    composed    add, product, scale, transpose, kronecker, per_head, low_rank

Masks are keyword arguments (causal, key_mask, pair_mask, attn_bias); a builder raises UnsupportedError for those it
does not support (`supported(builder)` lists the others).
"""

from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.operators.compose import add, kronecker, per_head, product, scale, transpose
from headwise.operators.concatenation import concatenation
from headwise.operators.dot_product import dot_product
from headwise.operators.linear.efficient import efficient
from headwise.operators.linear.factored import factored, factored_blocks
from headwise.operators.linear.near_far import near_far
from headwise.operators.linear.nystrom import nystrom
from headwise.operators.linear.projected import projected, projected_blocks
from headwise.operators.linear.window_low_rank import window_low_rank, window_low_rank_blocks
from headwise.operators.low_rank import low_rank
from headwise.operators.mask_support import MaskKind, supported, supports
from headwise.operators.masks import Mask
from headwise.operators.relative.offset import offset
from headwise.operators.relative.positional import positional
from headwise.operators.relative.quadratic import quadratic
from headwise.operators.relative.shift import shift
from headwise.operators.relative.toeplitz import toeplitz, toeplitz_softmax
from headwise.operators.similarity import embedded_gaussian, gaussian, similarity
from headwise.operators.softmax import Softmax, softmax
from headwise.operators.sparse.fixed import fixed, fixed_steps
from headwise.operators.sparse.hashed import hashed
from headwise.operators.sparse.strided import strided, strided_steps
from headwise.operators.sparse.window import window
from headwise.operators.uniform import uniform

__all__ = [
    "AttentionOperator",
    "Claim",
    "Mask",
    "MaskKind",
    "Softmax",
    "add",
    "concatenation",
    "dot_product",
    "efficient",
    "embedded_gaussian",
    "factored",
    "factored_blocks",
    "fixed",
    "fixed_steps",
    "gaussian",
    "hashed",
    "kronecker",
    "low_rank",
    "near_far",
    "nystrom",
    "offset",
    "per_head",
    "positional",
    "product",
    "projected",
    "projected_blocks",
    "quadratic",
    "scale",
    "shift",
    "similarity",
    "softmax",
    "strided",
    "strided_steps",
    "supported",
    "supports",
    "toeplitz",
    "toeplitz_softmax",
    "transpose",
    "uniform",
    "window",
    "window_low_rank",
    "window_low_rank_blocks",
]
