"""What P is, one published idea a file: each builder checks its input and returns a frozen operator."""

from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.operators.compose import add, kronecker, per_head, product, scale, transpose
from headwise.operators.softmax import Softmax, softmax

__all__ = [
    "AttentionOperator",
    "Claim",
    "Softmax",
    "add",
    "kronecker",
    "per_head",
    "product",
    "scale",
    "softmax",
    "transpose",
]
