"""Choices are validated; a registered kind is planned, installed, saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import pytest
import torch
from torch import Tensor

import headwise
from headwise.cost import Cost
from headwise.errors import InputError, UnsupportedError
from headwise.operators.base import AttentionOperator
from headwise.replacement import KINDS, SOFTMAX, Choice, Kind, KindOption, Plan, load, plans, register_kind, rewrite
from headwise.replacement.kinds import candidates, has_rotary_positions
from tests.models.tiny_models import ALL
from tests.replacement.install.test_transformers_models import shaken
from tests.replacement.plans import CAUSAL, plan_for


@pytest.mark.parametrize("kind", KINDS)
def test_to_dict_and_back(kind: str) -> None:
    choice = Choice(kind)
    assert Choice.from_dict(choice.to_dict()) == choice == copy.deepcopy(choice)
    assert hash(Choice.from_dict(choice.to_dict())) == hash(choice)


def test_defaults_are_filled_in() -> None:
    assert Choice("window").to_dict() == {"kind": "window", "width": 65, "leading": 0}
    assert Choice("window", {"leading": 0, "width": 65}) == Choice("window")
    assert Choice("window", {"leading": 1}) != Choice("window")
    assert len({Choice("window", {"width": 9.0}), Choice("window", {"width": 9})}) == 1
    assert str(Choice("window", {"width": 9})) == "window width=9 leading=0"


@pytest.mark.parametrize(
    "given, message",
    [
        ({"kind": "wndow"}, "unknown kind of operator 'wndow'; the registered kinds are softmax, uniform,"),
        ({"kind": "window", "size": 3}, "window: unknown option 'size'; its options are width, leading"),
        ({"kind": "softmax", "width": 3}, "softmax: unknown option 'width'; its options are none"),
        ({"kind": "window", "width": 0}, "window: width must be at least 1, but is 0"),
        ({"kind": "window", "width": 2.5}, "window: width must be a whole number, but is 2.5"),
        ({"kind": "window", "width": "wide"}, "window: width must be a number, but is 'wide'"),
        ({"kind": "window", "width": True}, "window: width must be a number, but is True"),
        ({"kind": "efficient", "sharpness": float("nan")}, "sharpness must be a number, but is nan"),
        ({"width": 3}, 'an operator is written {"kind": "window", "width": 65}, but the plan has'),
        ("window", "but the plan has 'window'"),
    ],
)
def test_invalid_choices(given, message: str) -> None:
    with pytest.raises(InputError) as error:
        Choice.from_dict(given)
    assert message in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_costs_are_those_of_one_head(kind: str) -> None:
    choice = Choice(kind)
    short, long = (choice.cost(n, 64, False).multiply_adds for n in (512, 4096))
    assert long <= SOFTMAX.cost(4096, 64, False).multiply_adds
    if kind not in (
        "softmax",
        "offset",
        "strided",
        "fixed",
    ):  # the last two are linear in n sqrt(n) for sizes near sqrt(n)
        assert 0 < short < long < 16 * short  # not quadratic


@pytest.mark.parametrize("length", [64, 512, 4096])
def test_default_candidates_are_windows_up_to_half_the_length(length: int) -> None:
    """Learned kinds are not among them: their tensors are of the texts that they were fitted to."""
    for causal in (False, True):
        found = [choice for choice in candidates(length, causal=causal) if choice != SOFTMAX]
        assert {choice.kind for choice in found} == {"window"}
        assert max(choice.options["width"] for choice in found) == length // 2 + (not causal)
        assert all(not choice.shapes(length, 8) for choice in found)


def test_exact_causal_attention_is_priced_as_it_runs() -> None:
    assert 2 * SOFTMAX.cost(64, 8, True).multiply_adds == SOFTMAX.cost(64, 8, False).multiply_adds


@pytest.mark.parametrize("choice", [*CAUSAL, *candidates(64, causal=True)], ids=str)
def test_causal_kinds_do_not_depend_on_where_a_text_stands(choice: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shifting all positions of a rotary model by a constant changes the output of the rewritten one by rounding, or
    the kind is refused there: it reads more of rotated queries and keys than their products."""
    torch.manual_seed(0)
    model, _ = ALL["llama"]()
    model, batch = model.eval().double(), {"input_ids": torch.randint(99, (1, 64))}
    plan = plan_for(model, batch, [choice], length=64)
    if not choice.definition.by_products:
        with pytest.raises(UnsupportedError, match=f"LlamaModel rotates queries and keys .* but {choice.kind} "):
            rewrite(model, plan)
        monkeypatch.setattr(plans, "has_rotary_positions", lambda model: False)
    new = shaken(rewrite(model, plan)[0])
    with torch.no_grad():
        here, there = (new(**batch, position_ids=torch.arange(64)[None] + shift)[0] for shift in (0, 1000))
    moved = float((here - there).abs().max())  # transformers computes the angles in single precision
    assert moved < 1e-6 if choice.definition.by_products else moved > 1e-4


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_a_plan_refuses_kinds_that_positions_would_move(family: str) -> None:
    model = ALL[family]()[0].eval()
    assert has_rotary_positions(model) == (family == "llama")
    given = [{"input_ids": torch.randint(99, (1, 24))} for _ in range(4)]
    options = {"tolerance": 0.1, "choices": [Choice("efficient")], "evaluations": 1, "objective": "multiply-adds"}
    if family != "llama":
        headwise.plan(model, given, **options)
        return
    with pytest.raises(UnsupportedError, match=r"LlamaModel rotates .* efficient sharpness=1 .* use window instead"):
        headwise.plan(model, given, **options)


@final
@dataclass(frozen=True, eq=False)
class BlockMean(AttentionOperator):
    """gate * (mean of the query's block of `size` keys) + (1 - gate) * (mean of all keys), for each head."""

    n: int
    size: int
    gate: Tensor  # (h,)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.gate.shape, self.n, self.n))

    def apply(self, v: Tensor) -> Tensor:
        block = torch.arange(self.n) // self.size
        same = (block[:, None] == block).to(v.dtype)
        gate = self.gate[:, None, None].to(v.dtype)
        return gate * (same / same.sum(-1, keepdim=True)) @ v + (1 - gate) * v.mean(-2, keepdim=True)

    def cost(self, d: int) -> Cost:
        return Cost(multiply_adds=2 * self.n * d)


@pytest.fixture
def block_mean() -> Iterator[Choice]:
    register_kind(
        "block_mean",
        Kind(
            "a learned mixture of the mean of a block and the mean of all keys",
            build=lambda inputs, options, tensors: BlockMean(inputs.n, int(options["size"]), tensors["gate"]),
            options={"size": KindOption(8, 1)},
            initial=lambda options, length, width: {"gate": torch.tensor(0.5)},
            step_sizes={"gate": 0.1},
            candidates=lambda length, causal: [{"size": 4}, {"size": 8}],
            reads_scores=False,
        ),
    )
    yield Choice("block_mean", {"size": 4})
    KINDS.pop("block_mean", None)


def test_an_operator_of_ones_own_is_planned_installed_saved_and_loaded(block_mean: Choice, tmp_path: Path) -> None:
    assert block_mean in candidates(40, causal=False)
    assert block_mean not in candidates(40, causal=True)
    torch.manual_seed(0)
    model = ALL["bert"]()[0].eval()
    batches = [{"input_ids": torch.randint(99, (1, 40))} for _ in range(6)]
    plan = headwise.plan(model, batches, tolerance=2.0, choices=[block_mean], objective="multiply-adds")
    plan = replace(plan, exact_below={})
    assert {choice for choices in plan.sites.values() for choice in choices} == {block_mean}
    assert all(float(tensors["gate"]) != 0.5 for tensors in plan.fitted.values())

    plan.save(tmp_path / "plan")
    new, receipt = rewrite(model, Plan.load(tmp_path / "plan"))
    assert receipt.cost_after.multiply_adds == 8 * 2 * 40 * 8  # heads, 2 n d
    new.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        expected = new(**batches[0])[0]
        assert torch.equal(load(tmp_path / "model")(**batches[0])[0], expected)
        assert not torch.allclose(model(**batches[0])[0], expected)

    del KINDS["block_mean"]
    for read in (lambda: Plan.load(tmp_path / "plan"), lambda: load(tmp_path / "model")):
        with pytest.raises(InputError, match=r"unknown kind of operator 'block_mean'.*register_kind"):
            read()


def test_names_that_cannot_be_registered(block_mean: Choice) -> None:
    kind = block_mean.definition
    with pytest.raises(InputError, match="'block_mean' is registered already"):
        register_kind("block_mean", kind)
    with pytest.raises(InputError, match="'block mean' must be a Python identifier"):
        register_kind("block mean", kind)
