"""Every check of the contract detects an operator that violates it, and names the operator and the error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise.cost import Cost
from headwise.operators.base import AttentionOperator
from headwise.operators.claims import Claim
from headwise.testing import CHECKS, Case, ContractError, assert_operator

INPUTS = {"p": (2, 3, 4)}


@dataclass(frozen=True, eq=False)
class Honest(AttentionOperator):
    """P as a dense matrix; each broken operator below differs from it in one method."""

    p: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.p.shape

    def apply(self, v: Tensor) -> Tensor:
        return self.p @ v

    def adjoint(self, u: Tensor) -> Tensor:
        return self.p.mT @ u

    def cost(self, d: int) -> Cost:
        return Cost(self.p.numel() * d)


class Affine(Honest):
    def apply(self, v: Tensor) -> Tensor:
        return self.p @ v + 1e-6


class WrongAdjoint(Honest):
    def adjoint(self, u: Tensor) -> Tensor:
        return 1.001 * (self.p.mT @ u)


class WrongDense(Honest):
    def dense(self, like: Tensor | None = None) -> Tensor:
        return self.p.softmax(-1)


class Boastful(Honest):
    @property
    def claims(self) -> frozenset[Claim]:
        return frozenset({Claim.STOCHASTIC})


class Detached(Honest):
    def apply(self, v: Tensor) -> Tensor:
        return self.p.detach() @ v


class DetachedAdjoint(Honest):
    def adjoint(self, u: Tensor) -> Tensor:
        return self.p.mT.detach() @ u


class Cheap(Honest):
    def cost(self, d: int) -> Cost:
        return Cost(self.p.numel() * d - 1)


class Dear(Honest):
    def cost(self, d: int) -> Cost:
        return Cost(self.p.numel() * d + 1)


class DearAdjoint(Honest):
    def adjoint_cost(self, d: int) -> Cost:
        return Cost(2 * self.p.numel() * d)


class Unbatched(Honest):
    def apply(self, v: Tensor) -> Tensor:
        return torch.stack([p @ x for p, x in zip(self.p, v, strict=True)])


class IgnoresStrides(Honest):
    def apply(self, v: Tensor) -> Tensor:
        packed = v.as_strided(v.shape, torch.empty(v.shape, device="meta").stride())
        return self.p @ (v if v.storage_offset() or v.dim() != 3 else packed)


class ClonesStrides(Honest):
    def apply(self, v: Tensor) -> Tensor:
        v = v.clone()  # a spread view becomes contiguous, a transposed one stays transposed
        packed = v.as_strided(v.shape, torch.empty(v.shape, device="meta").stride())
        return self.p @ packed


class NoVmap(Honest):
    def apply(self, v: Tensor) -> Tensor:
        return self.p @ v if v.sum().item() < 1e9 else v


class GraphBreak(Honest):
    def apply(self, v: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.p @ v


class WrongUnderCompile(Honest):
    def apply(self, v: Tensor) -> Tensor:
        return (2 if torch.compiler.is_compiling() else 1) * (self.p @ v)


class PoorInHalf(Honest):
    def apply(self, v: Tensor) -> Tensor:
        return self.p @ v * (1.2 if self.p.dtype == torch.float16 else 1.0)


class WidensHalf(Honest):
    def apply(self, v: Tensor) -> Tensor:
        return self.p.float() @ v.float() if v.dtype == torch.bfloat16 else self.p @ v


class ForgetsWhenCopied(Honest):
    def __deepcopy__(self, memo: dict) -> ForgetsWhenCopied:
        return type(self)(2 * self.p)


class ForgetsWhenSaved(Honest):
    def __deepcopy__(self, memo: dict) -> ForgetsWhenSaved:
        return self

    def __reduce__(self) -> tuple:
        return type(self), (2 * self.p,)


@dataclass(frozen=True, eq=False)
class Restless(Honest):
    calls: list[int] = field(default_factory=list)

    def apply(self, v: Tensor) -> Tensor:
        self.calls.append(1)
        return self.p @ v * (1 + 1e-12 * len(self.calls))


class Leaky(Honest):
    """A masked key has weight zero, and 0 * NaN is NaN."""


def leaky(p: Tensor, key_mask: Tensor) -> Leaky:
    return Leaky(p.masked_fill(~key_mask, 0))


BROKEN = [
    ("linear", Affine, "linear: error"),
    ("adjoint", WrongAdjoint, r"adjoint: <Pv, u> = <v, P\^T u> at width 1: error"),
    ("dense", WrongDense, r"dense = apply\(I\): error"),
    ("claims", Boastful, "claims: declares STOCHASTIC .* but the error is .*, tolerance 1.0e-09"),
    ("values", WrongAdjoint, "values of adjoint"),
    ("values", Affine, "values of apply"),
    ("gradients", Detached, "gradient of apply at width 1 with respect to p"),
    ("gradients", DetachedAdjoint, "gradient of adjoint at width 1 with respect to p"),
    ("cost", Cheap, r"cost: cost\(1\) states 23 multiply-adds, but matrix products need 24"),
    ("cost", Dear, r"cost: cost\(1\) states 25 multiply-adds, but matrix products need 24"),
    ("cost", DearAdjoint, r"cost: adjoint_cost\(1\) states 48 multiply-adds, but matrix products need 24"),
    ("broadcast", Unbatched, "broadcast: raised ValueError"),
    ("vmap", NoVmap, "vmap: raised RuntimeError"),
    ("compile", GraphBreak, "compile: raised Unsupported"),
    ("trace", GraphBreak, "trace: raised Unsupported"),
    ("strides", IgnoresStrides, "strides: apply with tensors spread out: .* not finite"),
    ("strides", ClonesStrides, "strides: apply with tensors stored by columns: error"),
    ("compile", WrongUnderCompile, r"compile \(aot_eager\) of apply: error"),
    ("half", PoorInHalf, "half: apply at width 1: error .*, tolerance 1.0e-02 in torch.float16"),
    ("half", WidensHalf, "half: apply of torch.bfloat16 returns torch.float32"),
    ("copies", ForgetsWhenCopied, "copies: deepcopy: error"),
    ("copies", ForgetsWhenSaved, "copies: torch.save and load: error"),
    ("repeatable", Restless, "repeatable: two calls of apply differ"),
]


@pytest.mark.parametrize("check, broken, message", BROKEN, ids=lambda x: getattr(x, "__name__", None))
def test_a_broken_operator_is_detected(check: str, broken: type[Honest], message: str) -> None:
    with pytest.raises(ContractError, match=f"^{broken.__name__}: {message}"):
        Case(broken.__name__, broken, INPUTS, lambda p: p).check(check)


def test_a_value_of_a_masked_key_that_leaks_is_detected() -> None:
    inputs = {**INPUTS, "key_mask": torch.tensor([True, True, False, True])}
    with pytest.raises(ContractError, match=r"^leaky: masked: apply with NaN and inf at masked keys: .* not finite"):
        Case("leaky", leaky, inputs).check("masked")


def test_every_check_has_an_operator_that_breaks_it() -> None:
    assert {check for check, *_ in BROKEN} | {"masked"} == set(CHECKS)


def test_an_honest_operator_passes() -> None:
    assert_operator(Honest, INPUTS, reference=lambda p: p)


def test_a_wrong_reference_is_detected() -> None:
    with pytest.raises(ContractError, match="Honest: dense = reference: error"):
        assert_operator(Honest, INPUTS, reference=lambda p: p + 1e-8)


def test_without_a_reference_the_operator_is_compared_with_its_own_matrix() -> None:
    assert_operator(Honest, INPUTS)
    with pytest.raises(ContractError, match="Affine: linear"):
        assert_operator(Affine, INPUTS)


def test_a_learned_builder_keeps_its_state() -> None:
    class Learned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(12.0, dtype=torch.float64).reshape(3, 4))

        def forward(self, p: Tensor) -> Honest:
            return Honest(p * self.weight.detach().to(p.dtype))

    class Forgetful(Learned):
        def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
            return None

    assert_operator(Learned(), INPUTS)
    with pytest.raises(ContractError, match="Forgetful: copies: state_dict of the builder"):
        assert_operator(Forgetful(), INPUTS)


def test_checks_are_skipped_by_name() -> None:
    assert_operator(Boastful, INPUTS, reference=lambda p: p, skip={"claims": "declares a property it does not have"})
    with pytest.raises(ContractError, match=r"Boastful: skip names \['claim'\]"):
        assert_operator(Boastful, INPUTS, skip={"claim": "misspelt"})


def test_draws_depend_on_name_and_number_alone() -> None:
    case = Case("x", Honest, {"p": (2, 3), "q": (2, 3)})
    first, again, other = case.tensors(), case.tensors(), case.tensors(draw=1)
    assert torch.equal(first["p"], again["p"])
    assert not torch.equal(first["p"], first["q"])
    assert not torch.equal(first["p"], other["p"])


def test_no_check_changes_the_tensors_it_was_given() -> None:
    mine = torch.ones(2, 3, 4, dtype=torch.float64)
    assert_operator(Honest, {"p": mine}, reference=lambda p: p)
    assert torch.equal(mine, torch.ones_like(mine))
    assert not mine.requires_grad
