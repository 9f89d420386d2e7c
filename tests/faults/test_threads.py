"""Other threads never notice that a model is intercepted, rewritten, examined or planned in this one.

Every comparison is bit for bit: a thread that is let through computes what it computes alone.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise
from headwise.examination.measure.observe import observe
from headwise.examination.measure.path_lengths import by_length
from headwise.models import InterceptionError, intercept
from headwise.models.unseen import DID_NOT_RUN, unseen_attention
from headwise.models.widths.widened_attention import attention_sites
from headwise.replacement.kinds import Choice
from headwise.replacement.planning.capture import find_sites
from headwise.replacement.planning.drift import PooledStates, Predictions, run_with
from headwise.replacement.planning.sensitivity import sensitivities
from tests.models.tiny_models import ALL, bert, gpt2, torch_encoder
from tests.replacement.plans import plan_for


def output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out = model(**batch)
    return out if isinstance(out, Tensor) else out[0]


@contextmanager
def meanwhile(*jobs: Callable[[], Any], at_least: int = 1) -> Iterator[None]:
    """Each job again and again in a thread of its own, at least so often; its first exception is raised at the end."""
    done, problems, stop = [0] * len(jobs), list[BaseException](), threading.Event()

    def repeat(index: int) -> None:
        try:
            while not stop.is_set() or done[index] < at_least:
                jobs[index]()
                done[index] += 1
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if problems:
        raise problems[0]


def unchanged(work: Callable[[], Tensor]) -> Callable[[], None]:
    """Work whose result must always be what it is now."""
    expected = work()

    def check() -> None:
        assert torch.equal(work(), expected)

    return check


def sites(model: nn.Module, batch: dict[str, Tensor]) -> list[tuple[str, float]]:
    seen: list[tuple[str, float]] = []
    with intercept(model, lambda call: seen.append((call.site, call.q.double().sum().item()))):
        output(model, batch)
    return seen


def test_attention_in_other_threads_is_untouched() -> None:
    q = torch.randn(2, 4, 16, 8)
    attention = unchanged(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    fused, x = torch_encoder()[0].eval(), torch.randn(3, 12, 32)  # its layers run as one kernel
    layer = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    jobs = [attention, unchanged(lambda: output(fused, {"src": x})), unchanged(lambda: layer(x, x, x)[1])]
    model, batch = bert()
    expected = sites(model.eval(), batch)
    with meanwhile(*jobs, at_least=100):
        for _ in range(40):
            assert sites(model, batch) == expected


def test_threads_intercept_different_models_at_once() -> None:
    made = [(model.eval(), batch) for model, batch in (ALL[name]() for name in ("bert", "gpt2", "torch_encoder"))]
    expected = [sites(*one) for one in made]
    jobs = [
        lambda one=one, right=right: check_equal(sites(*one), right) for one, right in zip(made, expected, strict=True)
    ]
    with meanwhile(*jobs, at_least=60):
        pass


def check_equal(a: Any, b: Any) -> None:
    assert a == b


@pytest.mark.parametrize("family", ["bert", "torch_encoder"])
def test_other_threads_run_the_intercepted_model_and_are_not_recorded(family: str) -> None:
    model, batch = ALL[family]()
    other = {name: x.flip(1) for name, x in batch.items()}
    expected = sites(model.eval(), batch)
    with meanwhile(unchanged(lambda: output(model, other)), at_least=100):
        for _ in range(60):
            assert sites(model, batch) == expected


def test_an_examination_records_its_own_thread() -> None:
    model, batch = bert()
    model.eval()
    other = {"input_ids": batch["input_ids"].flip(1)}

    def numbers() -> list[Tensor]:
        (found,) = observe(model, batch, generator=torch.Generator().manual_seed(0))
        return [*found.numbers.values(), *found.layers.values(), found.redundancy]

    expected = numbers()
    with meanwhile(lambda: output(model, other), lambda: output(model, other)):
        for _ in range(12):
            assert all(torch.equal(a, b) for a, b in zip(numbers(), expected, strict=True))


def test_threads_share_a_rewritten_model() -> None:
    model, batch = torch_encoder()
    model.eval()
    new, _ = headwise.rewrite(model, plan_for(model, batch, [Choice("window", {"width": 3})] * 4))
    inputs = [torch.randn(1, 40, 32) for _ in range(3)]
    jobs = [unchanged(lambda x=x: output(new, {"src": x})) for x in inputs]
    jobs.append(unchanged(lambda: output(model, batch)))
    with meanwhile(*jobs, at_least=50):
        pass


def test_threads_narrow_different_models_at_once() -> None:
    """Each finds the attention modules of its own model, while another thread runs a narrowed one."""
    pairs = [family() for family in (bert, gpt2)]
    narrowed, _ = headwise.shrink(pairs[0][0].eval(), [pairs[0][1]] * 2)
    expected = [sorted(headwise.shrink(model.eval(), [batch] * 2)[1].widths) for model, batch in pairs]

    def narrow(index: int) -> None:
        model, batch = pairs[index]
        assert sorted(attention_names(copy.deepcopy(model), batch)) == expected[index]

    jobs = [lambda: narrow(0), lambda: narrow(1), unchanged(lambda: output(narrowed, pairs[0][1]))]
    with meanwhile(*jobs, at_least=30):
        pass


def attention_names(model: nn.Module, batch: dict[str, Tensor]) -> list[str]:
    return [site.name for site in attention_sites(model, batch)]


def test_drift_is_measured_in_its_own_thread() -> None:
    """Heads are replaced in the measuring thread only."""
    model, batch = bert()
    model.eval()
    heads = {"encoder.layer.1.attention.self": lambda q, k, v, **options: torch.zeros_like(q)}
    other = {"input_ids": batch["input_ids"].flip(1)}
    with meanwhile(unchanged(lambda: output(model, other)), at_least=60):
        expected = run_with(model, batch, PooledStates(), heads)
        for _ in range(30):
            assert torch.equal(run_with(model, batch, PooledStates(), heads), expected)


def test_threads_share_recomputed_layers() -> None:
    """Sensitivities of one model in three threads, while another one runs it; the last thread restores its layers."""
    model, batch = ALL["gpt2"]()
    model.eval()
    sites = find_sites(model, batch)
    candidates = {name: [lambda q, k, v, **options: torch.zeros_like(q)] for name in sites}

    def measure() -> Tensor:
        found = sensitivities(model, batch, sites, candidates, Predictions(), torch.Generator().manual_seed(0))
        return torch.cat(list(found.values()))

    jobs = [unchanged(measure)] * 3 + [unchanged(lambda: output(model, batch))]
    with meanwhile(*jobs, at_least=12):
        pass
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_threads_rewrite_models_at_once() -> None:
    model, batch = bert()
    model.eval()
    plan = plan_for(model, batch, [Choice("window", {"width": 3})] * 4)
    jobs = [lambda: headwise.rewrite(copy.deepcopy(model), plan)] * 3
    with meanwhile(*jobs, at_least=8):
        pass


def test_depth_is_measured_while_another_thread_intercepts() -> None:
    model, batch = bert()
    model.eval()
    expected = by_length(model, batch)
    assert expected["supported"]
    other, ids = bert()
    with meanwhile(lambda: sites(other, ids)):
        for _ in range(3):
            assert by_length(model, batch) == expected


def test_contexts_close_in_any_order() -> None:
    originals = F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled
    made = [(model.eval(), batch) for model, batch in (bert(), torch_encoder(), bert())]
    closing, opened = [threading.Event() for _ in made], [threading.Event() for _ in made]

    def hold(index: int) -> int:
        calls: list[Any] = []
        with intercept(made[index][0], calls.append):
            opened[index].set()
            assert closing[index].wait(60)
            output(*made[index])
        return len(calls)

    with ThreadPoolExecutor(3) as pool:
        results = []
        for index in range(3):
            results.append(pool.submit(hold, index))
            assert opened[index].wait(60)
        for index in (0, 2, 1):  # the first one opened closes first
            assert F.scaled_dot_product_attention is originals[0]  # nothing is replaced
            closing[index].set()
            assert results[index].result() == 2
    now = F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled
    assert all(a is b for a, b in zip(now, originals, strict=True))


class InThreads(nn.Module):
    """Branches in threads of its own, but the first."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.branches = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(3))
        self.workers = workers

    def forward(self, x: Tensor) -> Tensor:
        here, elsewhere = list(self.branches)[self.workers :], list(self.branches)[: self.workers]
        with ThreadPoolExecutor(3) as pool:
            results = [pool.submit(branch, x) for branch in elsewhere]
            return sum([one.result() for one in results] + [branch(x) for branch in here], start=torch.zeros(()))


def test_a_model_that_attends_in_threads_of_its_own_says_so() -> None:
    model, x = InThreads(1).train(), torch.randn(1, 5, 8)
    assert unseen_attention(model, x) == [
        {"name": "branches.0.self_attn", "class": "MultiheadAttention", "why": DID_NOT_RUN}
    ]
    assert "not in this thread" in DID_NOT_RUN
    with pytest.raises(
        InterceptionError, match=r"InThreads never called .* in this thread .*run all of the model in one"
    ):
        observe(InThreads(3).train(), x)
    assert len(sites(InThreads(0).eval(), {"x": x})) == 3


def test_somebody_elses_replacement_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    original, count = F.scaled_dot_product_attention, []
    model, batch = bert()
    model.eval()

    def wrapped(inner: Callable) -> Callable:
        return lambda *args, **kwargs: (count.append(1), inner(*args, **kwargs))[1]

    monkeypatch.setattr(F, "scaled_dot_product_attention", original)  # put back at the end
    with intercept(model, lambda call: None):
        F.scaled_dot_product_attention = theirs = wrapped(F.scaled_dot_product_attention)
    assert F.scaled_dot_product_attention is theirs
    assert len(sites(model, batch)) == len(count) == 2
    assert F.scaled_dot_product_attention is theirs
