"""What P is, one published idea a file: each builder checks its input and returns a frozen operator.

What several of them are made of: `base` and `claims` (every operator), `pair` and `visibility` (checked q, k, masks),
`scores` (softmax without forming P), `blocks` of `tiles` (sparse patterns as merged dense blocks), `rounds` (hashing),
`projections` and `shortened` (E k and F v), `prefix` (running sums), `double_softmax`, `row_blocks` (P a few rows at a
time), `fused` (kernels with a backward of their own).
"""

from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.operators.compose import add, kronecker, per_head, product, scale, transpose
from headwise.operators.concatenation import concatenation
from headwise.operators.dot_product import dot_product, scaled
from headwise.operators.linear.efficient import efficient
from headwise.operators.linear.factored import factored
from headwise.operators.linear.factored_blocks import factored_blocks
from headwise.operators.linear.near_far import near_far
from headwise.operators.linear.nystrom import nystrom
from headwise.operators.linear.projected import projected
from headwise.operators.linear.projected_blocks import projected_blocks
from headwise.operators.linear.window_low_rank import window_low_rank
from headwise.operators.relative.positional import positional
from headwise.operators.relative.quadratic import quadratic
from headwise.operators.relative.shift import shift
from headwise.operators.relative.toeplitz import toeplitz
from headwise.operators.relative.toeplitz_softmax import toeplitz_softmax
from headwise.operators.similarity import embedded_gaussian, gaussian
from headwise.operators.softmax import Softmax, softmax
from headwise.operators.sparse.fixed import fixed, fixed_steps
from headwise.operators.sparse.hashed import hashed
from headwise.operators.sparse.strided import strided, strided_steps
from headwise.operators.sparse.window import window
from headwise.operators.uniform import uniform

__all__ = [
    "AttentionOperator",
    "Claim",
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
    "near_far",
    "nystrom",
    "per_head",
    "positional",
    "product",
    "projected",
    "projected_blocks",
    "quadratic",
    "scale",
    "scaled",
    "shift",
    "softmax",
    "strided",
    "strided_steps",
    "toeplitz",
    "toeplitz_softmax",
    "transpose",
    "uniform",
    "window",
    "window_low_rank",
]
