"""Test your own attention operator against the contract that every operator of headwise satisfies.

>>> import torch
>>> from headwise.operators.softmax import softmax
>>> assert_operator(
...     softmax,
...     inputs={"q": (2, 5, 4), "k": (2, 7, 4)},
...     reference=lambda q, k: (q @ k.mT / 2).softmax(-1),
... )

`references` has slow float64 references of the operators, `counting` counts multiply-adds and bytes, and `strategies`
draws shapes, tensors, masks and bad input for hypothesis (the only module here that needs more than torch).
"""

from headwise.testing.contract import CHECKS, Case, ContractError, assert_operator
from headwise.testing.counting import count_multiply_adds, peak_bytes

__all__ = ["CHECKS", "Case", "ContractError", "assert_operator", "count_multiply_adds", "peak_bytes"]
