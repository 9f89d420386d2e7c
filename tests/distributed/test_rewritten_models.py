"""Models with other operators in place of their heads, on slices: the rows of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import headwise
from headwise.distributed import Slices, sequence_parallel
from headwise.errors import HeadwiseError
from headwise.operators import softmax
from headwise.replacement import Choice
from headwise.replacement.install.sharded_attention import sequence_parallel_model
from tests.distributed.pool import Pool
from tests.distributed.test_sharded_inputs import model, run, texts

CHOICES = [
    Choice("toeplitz", {"reach": 6}),
    Choice("gaussian_window"),
    Choice("offset", {"by": -1}),
    Choice("window", {"width": 5}),
    Choice("strided", {"stride": 4}),
    Choice("uniform"),
]


def rewritten(choice: Choice, zigzag: bool) -> float:
    net, _ = headwise.rewrite(model("Llama"), choice, probe=texts(23))
    return run(net, texts(23), Slices((9, 14), zigzag))


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_a_rewritten_model(two: Pool, choice: Choice, zigzag: bool) -> None:
    assert max(two.run(rewritten, choice, zigzag)) < 1e-5


def replaced(choice: Choice) -> float:
    net: Any = model("Llama")
    with headwise.replace(net, choice):
        return run(net, texts(23), Slices((9, 14)))


@pytest.mark.parametrize("choice", CHOICES[-3:], ids=str)
def test_a_model_whose_attention_was_replaced(two: Pool, choice: Choice) -> None:
    """It was computed as softmax, without a word."""
    assert max(two.run(replaced, choice)) < 1e-5


def narrowed() -> float:
    net, _ = headwise.shrink(model("Llama"), [texts(20), texts(30)], keep=0.5)
    return run(net, texts(23), Slices((9, 14)))


def test_a_narrowed_model(two: Pool) -> None:
    """It was computed with its old widths, without a word."""
    assert max(two.run(narrowed)) < 1e-5


def hashed_heads() -> str:
    net, _ = headwise.rewrite(model("Bert"), Choice("hashed", {"rounds": 1, "chunk": 4}), probe=texts(23))
    with pytest.raises(HeadwiseError) as error, sequence_parallel_model(net):
        net(texts(5)["input_ids"], position_ids=torch.arange(5).unsqueeze(0))
    return str(error.value)


def test_rotations_of_a_plan_cannot_be_shared(two: Pool) -> None:
    assert all("choose another kind" in found for found in two.run(hashed_heads))


def learned_by_position(causal: bool) -> float:
    """A builder that indexes its own tensor by positions on the device of q, which is meta at first."""
    torch.manual_seed(0)
    held, rank, masks = Slices((5, 11)), dist.get_rank(), {"causal": True} if causal else {}
    q, k, v = torch.randn(3, 2, 4, held.n, 4)
    scores = torch.randn(16)

    def by_index(q: torch.Tensor, k: torch.Tensor, *, causal: bool = False) -> Any:
        weight = scores[torch.arange(q.shape[-2], device=q.device)].unsqueeze(-1)
        return softmax(q * weight, k, causal=causal)

    found = sequence_parallel(by_index)(held.cut(q, rank), held.cut(k, rank), **masks)(held.cut(v, rank))
    return float((found - held.cut(by_index(q, k, **masks)(v), rank)).abs().amax())


@pytest.mark.parametrize("causal", [False, True])
def test_a_builder_with_tensors_of_its_own(two: Pool, causal: bool) -> None:
    assert max(two.run(learned_by_position, causal)) < 1e-5
