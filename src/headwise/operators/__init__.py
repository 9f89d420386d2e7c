"""What P is, one published idea a file: each builder checks its input and returns a frozen operator."""

from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.operators.compose import add, kronecker, per_head, product, scale, transpose
from headwise.operators.concatenation import concatenation
from headwise.operators.dot_product import dot_product, scaled
from headwise.operators.shift import shift
from headwise.operators.similarity import embedded_gaussian, gaussian
from headwise.operators.softmax import Softmax, softmax
from headwise.operators.toeplitz import toeplitz
from headwise.operators.toeplitz_softmax import toeplitz_softmax
from headwise.operators.uniform import uniform

__all__ = [
    "AttentionOperator",
    "Claim",
    "Softmax",
    "add",
    "concatenation",
    "dot_product",
    "embedded_gaussian",
    "gaussian",
    "kronecker",
    "per_head",
    "product",
    "scale",
    "scaled",
    "shift",
    "softmax",
    "toeplitz",
    "toeplitz_softmax",
    "transpose",
    "uniform",
]
