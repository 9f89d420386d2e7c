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

from headwise.testing.contract import CHECKS as CHECKS
from headwise.testing.contract import Case as Case
from headwise.testing.contract import ContractError as ContractError
from headwise.testing.contract import assert_operator as assert_operator
from headwise.testing.counting import count_multiply_adds as count_multiply_adds
from headwise.testing.counting import peak_bytes as peak_bytes
