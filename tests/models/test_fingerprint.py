"""Hashes of weights, batches and runs change with every value that a result depends on, and with nothing else."""

from __future__ import annotations

import copy
import io
import tracemalloc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import headwise.models.fingerprint
from headwise.errors import InputError, NonFiniteError
from headwise.models.fingerprint import batch_hash, check_weights, content_hash, run_key, weights_hash


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({f"layer{i}": nn.Linear(40, 40) for i in range(150)})  # 300 tensors


@pytest.mark.parametrize("name", ["layer0.weight", "layer73.bias", "layer149.weight"])
def test_every_entry_of_every_weight_counts(name: str) -> None:
    before = weights_hash(model())
    changed = model()
    with torch.no_grad():
        changed.get_parameter(name).view(-1)[-1] += 1e-3
    assert weights_hash(changed) != before
    assert weights_hash(model()) == before


def test_buffers_count_also_those_that_are_not_saved() -> None:
    net = nn.BatchNorm1d(3)
    net.register_buffer("frequencies", torch.zeros(3), persistent=False)
    before = weights_hash(net)
    net.get_buffer("frequencies")[1] = 1
    between = weights_hash(net)
    net.get_buffer("running_mean")[1] = 1
    assert len({before, between, weights_hash(net)}) == 3


class Packed(nn.Linear):
    """Its scale is neither a parameter nor a buffer, but saved, as in layers of bitsandbytes and TransformerEngine."""

    def __init__(self, way: str, scale: float) -> None:
        super().__init__(2, 2)
        self.way, self.scale = way, scale

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.way == "tensor":
            destination[prefix + "weight.absmax"] = torch.tensor([self.scale])
        elif self.way == "bytes":
            destination[prefix + "_extra_state"] = io.BytesIO(str(self.scale).encode())
        else:
            destination[prefix + "_packed"] = (torch.tensor([self.scale]), Anonymous())
        destination[prefix + "another_name"] = self.weight if keep_vars else self.weight.detach()


class Anonymous:
    """Its repr holds its address."""


@pytest.mark.parametrize("way", ["tensor", "bytes", "tuple"])
def test_what_only_the_state_dict_holds_counts(way: str) -> None:
    hashes = []
    for scale in (1.0, 2.0, 1.0):
        torch.manual_seed(0)
        hashes.append(weights_hash(nn.Sequential(Packed(way, scale))))
    assert hashes[0] == hashes[2] != hashes[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_packed_weights_of_a_quantised_model_count() -> None:
    hashes = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        packed = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
        assert not list(packed.parameters())
        hashes.append(weights_hash(packed))
    assert hashes[0] == hashes[2] != hashes[1]


def test_names_shapes_and_dtypes_count() -> None:
    x = torch.zeros(6)
    tensors = [x, x.view(2, 3), x.view(3, 2), x.to(torch.int32), torch.zeros(12, dtype=torch.bfloat16)]
    assert len({content_hash(tensor) for tensor in tensors}) == len(tensors)
    hashes = set()
    for name in ("a", "b"):
        net = nn.Module()
        net.register_buffer(name, x)
        hashes.add(weights_hash(net))
    assert len(hashes) == 2


def test_a_pooler_does_not_count() -> None:
    net = nn.ModuleDict({"body": nn.Linear(2, 2)})
    before = weights_hash(net)
    net["pooler"] = nn.Linear(2, 2)
    assert weights_hash(net) == before


def test_ties_and_strides_do_not_count() -> None:
    net = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    net["b"].weight = net["a"].weight
    apart = copy.deepcopy(net)
    apart["b"].weight = nn.Parameter(net["a"].weight.detach().clone())
    assert weights_hash(apart) == weights_hash(net)
    apart["a"].weight = nn.Parameter(net["a"].weight.detach().T.contiguous().T)
    assert not apart["a"].weight.is_contiguous()
    assert weights_hash(apart) == weights_hash(net)


DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1.0, 1.0]).to(dtype)
    assert content_hash(x) != content_hash(torch.tensor([1.0, 1.0, 0.0]).to(dtype))
    assert content_hash(x[1]) == content_hash(x[2])  # without axes
    assert content_hash(x[:0]) != content_hash(x)


def test_conjugates_are_what_they_stand_for() -> None:
    x = torch.tensor([1 + 2j])
    assert content_hash(x.conj()) == content_hash(x.conj().clone().resolve_conj()) != content_hash(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["per tensor", "per channel", "sparse", "csr", "subclass"])
def test_quantised_and_sparse_weights(kind: str) -> None:
    def made(scale: float, last: float) -> Tensor:
        x = torch.tensor([[0.0, 1.0], [2.0, last]])
        if kind == "per tensor":
            return torch.quantize_per_tensor(x, scale, 0, torch.qint8)
        if kind == "per channel":
            return torch.quantize_per_channel(x, torch.tensor([scale, 1.0]), torch.zeros(2), 0, torch.qint8)
        x = x * scale
        if kind == "subclass":
            return TwoTensor(x, x)
        return x.to_sparse() if kind == "sparse" else x.to_sparse_csr()

    hashes = [content_hash(made(*values)) for values in ((0.5, 3.0), (0.5, 5.0), (0.25, 3.0), (0.5, 3.0))]
    assert len(set(hashes)) == 3
    assert hashes[0] == hashes[3]


def test_weights_without_values_are_refused() -> None:
    net = nn.Linear(2, 2, device="meta")
    for check in (weights_hash, check_weights):
        with pytest.raises(InputError, match=r"weight '(weight|bias)' is on the meta device and has no values"):
            check(net)


@pytest.mark.parametrize("shape", [(64, 1000), (1, 64, 1000), (64000,)])
def test_large_weights_are_read_in_chunks(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.arange(64000, dtype=torch.float32).view(shape)
    slanted = torch.zeros(*shape, 2)[..., 0].copy_(x)
    whole = content_hash(x)
    monkeypatch.setattr(headwise.models.fingerprint, "CHUNK", 5000)
    parts = list(headwise.models.fingerprint._chunks(slanted))
    assert max(part.numel() * part.element_size() for part in parts) <= 5000
    assert torch.equal(torch.cat([part.flatten() for part in parts]), x.flatten())
    assert content_hash(slanted) == whole


def test_no_copy_of_a_contiguous_weight_is_made() -> None:
    x = torch.zeros(1 << 22)
    tracemalloc.start()
    content_hash(x)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_batches_differ_in_names_values_and_order() -> None:
    x = torch.arange(3)
    batches: list[Any] = [
        {"x": x},
        {"x": x + 1},
        {"y": x},
        {"x": x, "mask": None},
        {"x": x, "mask": True},
        [x],
        [x, x],
        x,
        [x, "a"],
        [x, ["a"]],
    ]
    assert len({batch_hash(batch) for batch in batches}) == len(batches)
    assert batch_hash({"x": torch.arange(3)}) == batch_hash(batches[0])


def test_a_run_has_a_key_of_its_weights_settings_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [run_key("a", {"seed": 0}), run_key("b", {"seed": 0}), run_key("a", {"seed": 1})]
    assert run_key("a", {"seed": 0}) == keys[0]
    monkeypatch.setattr("headwise.__version__", "0.0.0")
    keys.append(run_key("a", {"seed": 0}))
    monkeypatch.setattr("torch.__version__", "0.0.0")
    keys.append(run_key("a", {"seed": 0}))
    assert len(set(keys)) == 5


def test_non_finite_weights_are_named() -> None:
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.bias[1] = torch.inf
    with pytest.raises(NonFiniteError, match="weight 'bias' has 1 non-finite of 2 entries"):
        check_weights(net)
