"""Hash a model, its batches and the settings of a run, so that results of different runs are never mixed."""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError, NonFiniteError

CHUNK = 1 << 24
"""Bytes of a tensor that are copied at a time, where it must be copied: from a device, or if not contiguous."""


def check_weights(model: nn.Module) -> None:
    """Raise NonFiniteError if a weight is NaN or infinite, which would make every measure NaN."""
    for name, weight in model.named_parameters():
        if weight.is_meta:
            raise _no_values(name)
        if weight.is_floating_point() and not bool(weight.detach().isfinite().all()):
            bad = int((~weight.detach().isfinite()).sum())
            raise NonFiniteError(
                f"weight {name!r} has {bad} non-finite of {weight.numel()} entries; load finite weights"
            )


def weights_hash(model: nn.Module) -> str:
    """SHA-256 over the name, dtype, shape and bytes of every parameter and buffer, in the order of their names.

    What the model's state dict holds beside these, such as packed weights or the scales of quantised ones, is part of
    it.  It does not depend on the device, on strides, or on whether equal weights are tied.  A pooler on top of the
    model is left out, since whether there is one depends on how the model was loaded, and no attention depends on it.
    """
    digests: dict[int, str] = {}  # by id: tied weights are read once
    lines = []
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    for name in sorted(tensors):
        if name.partition(".")[0] == "pooler":
            continue
        x = tensors[name]
        if x.is_meta:
            raise _no_values(name)
        if id(x) not in digests:
            digests[id(x)] = content_hash(x)
        lines.append(f"{name} {digests[id(x)]}\n")
    lines += [f"{name} {content_hash(value)}\n" for name, value in sorted(_other_state(model, tensors).items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _other_state(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What modules save beside parameters and buffers: packed weights, `quant_state`, `get_extra_state`."""
    known = {_place(x) for x in tensors.values()} - {0}
    return {
        name: value
        for name, value in model.state_dict().items()
        if name not in tensors
        and name.partition(".")[0] != "pooler"
        and not (isinstance(value, Tensor) and _place(value) in known)  # a parameter under another name
    }


def _place(x: Tensor) -> int:
    """The address of the entries; 0 if there is none."""
    try:
        return x.data_ptr()
    except RuntimeError:  # a sparse tensor, or a subclass without storage
        return 0


def batch_hash(batch: Any) -> str:
    """SHA-256 of a batch: names of its arguments, and dtype, shape and bytes of its tensors."""
    return content_hash(batch)


def run_key(weights: str, settings: Mapping[str, Any]) -> str:
    """The key of a run: SHA-256 of the hash of its weights, its settings, and the versions of headwise and torch.

    A setting is whatever the result depends on, such as the seed and the `batch_hash` of each batch.
    """
    known = versions()
    parts = {"weights": weights, "settings": dict(settings), "versions": [known["headwise"], known["torch"]]}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def content_hash(value: Any) -> str:
    """SHA-256 of tensors, and of mappings, sequences and plain values that contain them."""
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of headwise, torch, Python, and transformers if it is imported."""
    import headwise

    names = {"headwise": headwise.__version__, "torch": torch.__version__, "python": sys.version.split()[0]}
    if "transformers" in sys.modules:
        names["transformers"] = sys.modules["transformers"].__version__
    return names


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        _add_tensor(digest, value.detach())
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}\n".encode())
        for key, item in value.items():
            _add(digest, key)
            _add(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"sequence {len(value)}\n".encode())
        for item in value:
            _add(digest, item)
    elif isinstance(value, io.BytesIO):
        _add(digest, value.getvalue())
    else:
        text = re.sub(r" at 0x[0-9a-f]+", "", repr(value)).encode(errors="surrogatepass")
        digest.update(f"{type(value).__name__} {len(text)}\n".encode() + text)


def _add_tensor(digest: Any, x: Tensor) -> None:
    digest.update(f"{x.dtype} {tuple(x.shape)} {x.layout}\n".encode())
    if hasattr(x, "__tensor_flatten__"):  # a subclass made of several tensors, such as a quantised weight of torchao
        names, context = x.__tensor_flatten__()  # type: ignore[attr-defined]
        _add(digest, [repr(context), *(getattr(x, name) for name in names)])
    elif x.layout is torch.sparse_coo:
        x = x.coalesce()
        _add(digest, [x.indices(), x.values()])
    elif x.layout in (torch.sparse_csr, torch.sparse_bsr):
        _add(digest, [x.crow_indices(), x.col_indices(), x.values()])
    elif x.layout in (torch.sparse_csc, torch.sparse_bsc):
        _add(digest, [x.ccol_indices(), x.row_indices(), x.values()])
    elif x.is_quantized:
        per_channel = x.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
        scales = (
            [x.q_per_channel_scales(), x.q_per_channel_zero_points(), x.q_per_channel_axis()]
            if per_channel
            else [x.q_scale(), x.q_zero_point()]
        )
        _add(digest, [scales, x.int_repr()])
    else:
        for part in _chunks(x):
            part = part.resolve_conj().resolve_neg().cpu().contiguous()
            size = part.numel() * part.element_size()
            if size:  # read in place: without numpy, in any dtype, and without a copy
                digest.update((ctypes.c_ubyte * size).from_address(part.data_ptr()))


def _chunks(x: Tensor) -> Iterator[Tensor]:
    """The entries of x in order, in pieces of at most CHUNK bytes where a piece has to be copied."""
    size = x.numel() * x.element_size()
    if size <= CHUNK or x.dim() == 0 or (x.is_contiguous() and x.device.type == "cpu"):
        yield x
    elif x.is_contiguous():
        yield from x.view(-1).split(max(1, CHUNK // x.element_size()))
    elif len(x) == 1:
        yield from _chunks(x[0])
    else:
        for part in x.split(max(1, len(x) * CHUNK // size)):
            yield from _chunks(part) if len(part) == 1 else (part,)


def _no_values(name: str) -> InputError:
    return InputError(f"weight {name!r} is on the meta device and has no values; load the weights first")
