"""A model comes back exactly as it was, and so does the process: after success, an error, and Ctrl-C in the middle.

The model is an awkward one: modules in different modes, a forward set on an instance, hooks, frozen parameters, some
gradients.  The process has an unusual default dtype, grad mode and random state.
"""

from __future__ import annotations

import copy
import itertools
import logging
import random
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise
from headwise.convolution.receptive_field_recorder import model_receptive_fields
from headwise.errors import UnsupportedError
from headwise.examination.measure.depth import with_depth
from headwise.growth.demo import Reader, lookup
from headwise.ledger.audit import audit_weights
from headwise.models import LoadedModel, adopt
from headwise.models.receipt import evaluate
from headwise.models.run import as_it_was
from headwise.models.widths import widened_attention
from headwise.replacement.install.saved import load
from headwise.replacement.install.transformers_attention import register
from headwise.replacement.kinds import Choice
from headwise.replacement.model_comparison import compare_models
from tests.models.tiny_models import bert, gpt2, torch_encoder
from tests.replacement.plans import plan_for

HOOKS = [name for name in vars(nn.Module()) if "hooks" in name]
MAPS = torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(0))
WINDOW = Choice("window", {"width": 3})


def of_model(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a user could miss; tensors as bytes, objects by identity."""
    facts: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = vars(module)
        facts[f"{name}: mode"] = module.training
        facts[f"{name}: class and attributes"] = id(type(module)), sorted(own)
        facts[f"{name}: forward"] = id(own.get("forward"))
        facts[f"{name}: hooks"] = {kind: [(key, id(hook)) for key, hook in (own[kind] or {}).items()] for kind in HOOKS}
        facts[f"{name}: tensors"] = {key: id(x) for kind in ("_parameters", "_buffers") for key, x in own[kind].items()}
    for name, x in model.state_dict().items():
        facts[f"{name}: bytes"] = x.dtype, x.numpy().tobytes()
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        facts[f"{name}: gradient"] = parameter.requires_grad, None if grad is None else grad.tolist()
    config = getattr(model, "config", None)
    if config is not None:
        facts["config"] = config.to_dict(), config._attn_implementation
    return facts


def of_process() -> dict[str, Any]:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.utils import logging as of_transformers

    return {
        "torch random state": torch.get_rng_state().tolist(),
        "python random state": random.getstate(),
        "numpy random state": str(np.random.get_state()),
        "default dtype": torch.get_default_dtype(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore[reportAttributeAccessIssue]
        ),
        "matmul precision": torch.get_float32_matmul_precision(),
        "functions": [
            id(F.scaled_dot_product_attention),
            id(F.multi_head_attention_forward),
            id(torch.backends.mha.get_fastpath_enabled),
        ],
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "attention functions": {key: id(AttentionInterface()[key]) for key in AttentionInterface().valid_keys()},
        "masks": {key: id(AttentionMaskInterface()[key]) for key in AttentionMaskInterface().valid_keys()},
        "warnings": list(warnings.filters),
        "logging": (of_transformers.get_verbosity(), of_transformers.is_progress_bar_enabled(), logging.root.level),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in {**before, **after} if before.get(key) != after.get(key)]


def make_awkward(model: nn.Module, late: nn.Module, instance: nn.Module) -> Callable[[Any], None]:
    """Mixed modes, hooks, frozen parts; returns a function that makes the n-th call of `late` raise."""
    parts = [module for module in model.modules() if not list(module.children())]
    model.train()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0  # which an audit of weights refuses
    for part in parts[::2]:
        part.eval()
    for index, parameter in enumerate(model.parameters()):
        if index % 3 == 0:
            parameter.requires_grad_(False)
        elif index % 3 == 1:
            parameter.grad = torch.randn_like(parameter)
    parts[0].register_forward_pre_hook(lambda module, args: None)
    parts[-1].register_full_backward_hook(lambda module, grad_input, grad_output: None)
    plain = type(instance).forward
    instance.forward = types.MethodType(lambda self, *args, **kwargs: plain(self, *args, **kwargs), instance)
    fault: dict[str, Any] = {"left": None}

    def hook(module: nn.Module, args: tuple, output: Any) -> None:
        if fault["left"] is not None:
            fault["left"] -= 1
            if fault["left"] == 0:
                raise fault["error"]

    late.register_forward_hook(hook)

    def arm(error: Any) -> None:
        fault.update({"left": None} if error is None else {"left": error[1], "error": error[0]})

    return arm


@dataclass
class Case:
    """A model, what is done with it, and how to make it fail."""

    models: list[nn.Module]
    work: Callable[[], Any]
    arm: Callable[[Any], None]


BRIEF: dict[str, Any] = {"evaluations": 2, "objective": "multiply-adds"}


def _bert(work: Callable[[nn.Module, dict[str, Tensor]], Callable[[], Any]]) -> Case:
    model, batch = bert()
    case = work(model, batch)
    return Case([model], case, make_awkward(model, model.encoder.layer[1].output, model.encoder.layer[0]))


def _encoder(work: Callable[[nn.Module, dict[str, Tensor]], Callable[[], Any]]) -> Case:
    model, batch = torch_encoder()
    case = work(model, batch)
    return Case([model], case, make_awkward(model, model.layers[1].linear2, model.layers[0].linear1))


def batches(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    return [{name: x.roll(i, 1) for name, x in batch.items()} for i in range(count)]


def examine(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], Any]:
    return lambda: headwise.examine(model, batches(batch, 2))


def depth(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], Any]:
    examination = headwise.examine(model.eval(), [batch])
    return lambda: with_depth(examination, model, batch)


def planned(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], Any]:
    return lambda: headwise.plan(model, batches(batch, 6), tolerance=0.5, choices=[WINDOW], **BRIEF)


def rewritten(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], Any]:
    plan = plan_for(model.eval(), batch, [WINDOW])
    return lambda: headwise.rewrite(model, plan, probe=batch)[0]


def audited(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], Any]:
    return lambda: audit_weights(model, tokens=6)


def compared() -> Case:
    case = _bert(lambda model, batch: lambda: None)
    other, batch = bert()
    old, new = (LoadedModel(model, name, name) for model, name in ((case.models[0], "old"), (other.train(), "new")))
    return Case([case.models[0], other], lambda: compare_models(old, new, batches(batch, 2)), case.arm)


def replaced(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], Any]:
    def work() -> None:
        with headwise.replace(model, "window", width=3), torch.random.fork_rng():  # for the model's own dropout
            model(**batch)

    return work


def narrowed(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], Any]:
    return lambda: headwise.shrink(model, batches(batch, 2))


def network() -> tuple[nn.Sequential, Callable[[Any], None]]:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3), nn.ReLU())
    arm = make_awkward(model, model[3], model[1])
    return model.train(), arm


def converted() -> Case:
    model, arm = network()
    return Case([model], lambda: headwise.convert(model, probe=MAPS), arm)


def fields() -> Case:
    model, _ = network()
    attention, _ = headwise.convert(model)
    return Case([attention], lambda: model_receptive_fields(attention, MAPS), lambda error: None)


def evaluated() -> Case:
    model, arm = network()
    return Case([model], lambda: evaluate(model, MAPS), arm)


def growing() -> Case:
    """Observe and search, and decide to change nothing; closing removes the hooks."""
    task = lookup(8, 4, 4, 2)
    model = Reader(task, width=8, layers=2, heads=2, key_width=2)
    arm = make_awkward(model, model.norm, model.blocks[0])
    for block in model.blocks:
        block.requires_grad_(True)
    tokens, answers = task.draw(4, torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def work() -> None:
        grower = headwise.Grower(model, optimizer)
        try:
            gradients = [parameter.grad for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.grad = None
            try:
                with torch.enable_grad():
                    model.loss(tokens, answers).backward()
            finally:
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.grad = gradient
            grower.observe()
            assert not grower.grow(loss=lambda: model.loss(tokens, answers) * 0 + 1).changes
        finally:
            grower.close()

    return Case([model], work, arm)


CASES: dict[str, Callable[[], Case]] = {
    "examine bert": lambda: _bert(examine),
    "examine encoder": lambda: _encoder(examine),
    "depth bert": lambda: _bert(depth),
    "plan bert": lambda: _bert(planned),
    "plan encoder": lambda: _encoder(planned),
    "rewrite bert": lambda: _bert(rewritten),
    "rewrite encoder": lambda: _encoder(rewritten),
    "replace bert": lambda: _bert(replaced),
    "replace encoder": lambda: _encoder(replaced),
    "shrink bert": lambda: _bert(narrowed),
    "audit bert": lambda: _bert(audited),
    "audit encoder": lambda: _encoder(audited),
    "compare": compared,
    "convert": converted,
    "receptive fields": fields,
    "evaluate": evaluated,
    "grow": growing,
}
RUN_ONCE = {"evaluate", "grow", *(f"{verb} {name}" for verb in ("rewrite", "replace") for name in ("bert", "encoder"))}
REPORTED = {"depth bert"}
NEVER_FAIL = {"audit bert", "audit encoder", "receptive fields"}  # they do not run the model


@pytest.fixture
def process() -> Iterator[None]:
    """An unusual process, usual again afterwards."""
    register()  # rewritten and narrowed models of transformers need their attention registered, for good
    widened_attention.register()
    torch.set_default_dtype(torch.float64)
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def check(case: Case, outcome: Callable[[], Any]) -> None:
    models, process = [of_model(model) for model in case.models], of_process()
    outcome()
    assert differences(process, of_process()) == []
    for model, before in zip(case.models, models, strict=True):
        assert differences(before, of_model(model)) == []


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_behind(name: str, request: pytest.FixtureRequest) -> None:
    case = CASES[name]()
    request.getfixturevalue("process")

    def fail(error: BaseException, call: int) -> None:
        case.arm((error, call))
        try:
            if name in REPORTED and isinstance(error, Exception):
                case.work()  # an error becomes a part of the result
                return
            with pytest.raises(type(error), match="in the middle"):
                case.work()
        finally:
            case.arm(None)

    with torch.no_grad() if name in ("examine bert", "convert") else torch.enable_grad():
        check(case, case.work)
        if name in NEVER_FAIL:
            return
        for call in (1, 2):
            if call == 2 and name in RUN_ONCE:
                continue
            check(case, lambda call=call: fail(KeyboardInterrupt("in the middle"), call))
            check(case, lambda call=call: fail(LookupError("in the middle"), call))


def test_a_kind_with_learned_tensors_ignores_the_default_dtype(process: None) -> None:
    torch.set_default_dtype(torch.float32)
    model, batch = bert()
    kinds = [Choice("projected", {"rank": 3}), Choice("toeplitz", {"reach": 3}), Choice("factored", {"rank": 3})]
    arguments: dict[str, Any] = {"tolerance": 0.5, "choices": kinds, **BRIEF}
    expected = headwise.plan(model, batches(batch, 6), **arguments)
    torch.set_default_dtype(torch.float64)
    found = headwise.plan(model, batches(batch, 6), **arguments)
    for one, other in zip(found.curve, expected.curve, strict=True):
        assert (one.sites, one.cost, one.drift) == (other.sites, other.cost, other.drift)


@pytest.mark.parametrize("family", [bert, gpt2])
def test_loading_and_saving_leave_the_process_alone(family: Callable, tmp_path: Path) -> None:
    register()
    model, batch = family()
    model.eval()
    plan = plan_for(model, batch, [WINDOW])
    new, _ = headwise.rewrite(model, plan)
    before, of_new = of_process(), of_model(new)
    new.save_pretrained(tmp_path)
    assert differences(before, of_process()) == []
    assert differences(of_new, of_model(new)) in ([], ["config"])  # transformers notes the saved class there
    again = load(tmp_path)
    assert differences(before, of_process()) == []
    assert torch.equal(*(x(**batch)[0] for x in (new, again)))


def test_adopting_replaces_everything_or_nothing() -> None:
    model, _ = bert()
    model.eval()
    model.encoder.layer[1].attention.self.train()  # its dropout is refused, after the first layer was read
    before, process = of_model(model), of_process()
    with pytest.raises(UnsupportedError, match=r"dropout 0.1 on the attention weights"):
        adopt(model)
    assert differences(before, of_model(model)) == []
    assert differences(process, of_process()) == []


def test_threads_share_the_modes_of_a_model() -> None:
    """The second examination of a model ends after the first, and both restore what the first one found."""
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    model[1].eval()
    first, second = as_it_was(model), as_it_was(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(module.training for module in model.modules())
    second.__exit__(None, None, None)
    assert [module.training for module in model.modules()] == [True, True, False]


def test_a_module_that_merges_weights_in_eval_mode_keeps_its_bits() -> None:
    """As LoRA layers do: `train` is overridden and changes the weights, so it must not be called behind their back."""

    class Merging(nn.Linear):
        merged = False

        def train(self, mode: bool = True) -> nn.Linear:
            if self.merged == mode:
                with torch.no_grad():
                    self.weight += -1e-3 if mode else 1e-3
                self.merged = not mode
            return super().train(mode)

    model = nn.Sequential(Merging(4, 4), nn.Dropout())
    before = of_model(model)
    evaluate(model, torch.randn(2, 4))
    assert differences(before, of_model(model)) == []


@pytest.mark.parametrize("call", range(1, 6))
def test_growth_that_is_interrupted_changes_nothing(call: int) -> None:
    """In the call-th evaluation of the held-out loss: before the search, in it, and after the head was widened."""
    model, batch = bert()
    model.eval()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    grower, calls = headwise.Grower(model, optimizer, probe=batch), itertools.count(1)

    def loss() -> Tensor:
        if next(calls) == call:
            raise KeyboardInterrupt("in the middle")
        return model(**batch).last_hidden_state.square().mean()

    model(**batch).last_hidden_state.square().mean().backward()
    grower.observe()
    optimizer.step()
    before, process, moments = of_model(model), of_process(), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(KeyboardInterrupt, match="in the middle"):
        grower.grow(p=2, heads=[("encoder.layer.0.attention.self", 1)], loss=loss)
    assert differences(before, of_model(model)) == []
    assert differences(process, of_process()) == []
    torch.testing.assert_close(optimizer.state_dict(), moments, rtol=0, atol=0)
