"""Run a model once over a batch and measure every head, every layer, of every sequence in it.

Nothing of size m x n is kept: each attention call is measured while it happens, and so is the residual stream between
the blocks of the model.  A block is the module of a list (`nn.ModuleList`, `nn.Sequential`) that holds a call's module.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise.examination.measure.spectra import Spectral, spectra
from headwise.examination.measure.streaming import CHUNK, Memory, Streamed, stream
from headwise.models.intercept import Call, intercept, nothing_seen
from headwise.models.run import blocks_of, hidden_states, run_model
from headwise.operators._kernels.scores import Scores
from headwise.operators.masks import Mask

T = TypeVar("T")


@dataclass(frozen=True)
class Site:
    """One place where the model attends: a row of the map of heads."""

    name: str
    kind: str  # self or cross
    causal: bool
    heads: int
    groups: int  # key/value heads; fewer than heads means grouped queries
    key_width: int
    value_width: int
    block: str | None  # the block of the model it belongs to


@dataclass(eq=False)
class Measurement:
    """What one sequence showed.  Numbers are (heads of all sites in order,); layers (blocks + 1,)."""

    sites: list[Site]
    lengths: list[tuple[int, int]]  # (m, n) of every site
    numbers: dict[str, Tensor]
    profile: Tensor
    redundancy: Tensor  # cosine between heads' sampled rows; NaN where lengths differ
    layers: dict[str, Tensor]
    blocks: list[str]
    spectral: dict[str, Tensor] = field(default_factory=dict)
    leading: Tensor | None = None
    spectra_exact: bool = True


@dataclass(eq=False)
class _Head:
    """One call of one sequence, waiting for the rest of the forward pass; nothing in it is as long as the text."""

    site: Site
    lengths: tuple[int, int]
    streamed: Streamed
    spectral: Spectral | None
    contribution: Tensor | None = None


def observe(
    model: nn.Module,
    batch: Mapping[str, Tensor] | Sequence[Tensor] | Tensor,
    *,
    with_spectra: bool = True,
    entries: int = CHUNK,
    generator: torch.Generator | None = None,
) -> list[Measurement]:
    """One forward pass, one Measurement for each sequence in the batch."""
    seen: dict[int, list[_Head]] = {}
    pending: list[_Head] = []
    outputs: list[Tensor] = []
    memory = Memory(entries)

    def see(call: Call) -> None:
        pending.clear()
        outputs.clear()
        for b in range(call.scores.shape[0]):
            scores, v = sequence(call, b)
            streamed, output = stream(scores, v, memory=memory)
            spectral = spectra(scores, output, generator=generator) if with_spectra else None
            m, n = scores.shape[-2:]
            head = _Head(_site(call, blocks), (m, n), streamed, spectral)
            seen.setdefault(b, []).append(head)
            pending.append(head)
            if _is_plain(call):
                outputs.append(output)
        _own_projection(call, pending)

    def answer(site: str, attention: Callable[..., Tensor], args: tuple, kwargs: dict) -> Tensor:
        """P V is known already where nothing is padded: to compute it again is a quarter of the forward pass."""
        if not outputs:
            return attention(*args, **kwargs)
        query = args[0] if args else kwargs["query"]
        known = (torch.stack(outputs) if len(outputs) > 1 else outputs[0]).reshape(*query.shape[:-1], -1)
        outputs.clear()
        return known

    blocks = blocks_of(model)
    states: dict[str, list[dict[str, float]]] = {}
    with (
        torch.no_grad(),
        hidden_states(blocks, lambda x: [_states(one) for one in x], states),
        _projections(model, pending),
        intercept(model, see, answer=answer),
    ):
        run_model(model, batch)
    if not seen:
        raise nothing_seen(model)
    return [_measurement(b, heads, states) for b, heads in sorted(seen.items())]


def _is_plain(call: Call) -> bool:
    """Float32 with no mask but causality: the measured output is what the model would compute, to rounding."""
    s = call.scores
    return s.q.dtype == torch.float32 == call.v.dtype and s.keep is None and s.bias is None and (s.ahead or 0) >= 0


def sequence(call: Call, b: int) -> tuple[Scores, Tensor]:
    """Sequence b of the call without its padding: keys that no query may see, and those queries in self-attention."""
    s, m, n = call.scores, call.scores.shape[-2], call.scores.shape[-1]
    q, k, v = s.q[b], s.k[b], call.v[b]
    keep, bias = _of(s.keep, b), _of(s.bias, b)
    if keep is not None:
        real = keep.any(dim=-2).any(dim=0)
        if not bool(real.all()):
            rows = real if call.kind == "self" and m == n else torch.ones(m, dtype=torch.bool)
            q, k, v = q[:, rows], k[:, real], v[:, real]
            keep, bias = _cut(keep, rows, real), _cut(bias, rows, real)
            keep = None if keep is None or bool(keep.all()) else keep
    mask = Mask(q.shape[-2], k.shape[-2], s.ahead is not None, None, keep, bias, s.ahead)
    return Scores(q, k, s.scale, mask), v


def _of(x: Tensor | None, b: int) -> Tensor | None:
    return None if x is None else x[b if x.shape[0] > 1 else 0]


def _cut(x: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor | None:
    if x is None:
        return None
    x = x[..., columns] if x.shape[-1] > 1 else x
    return x[:, rows] if x.shape[-2] > 1 else x


# ---- the head's share of the residual stream: ||P V W_O|| with W_O the next matrix of fitting width ----


def _own_projection(call: Call, pending: list[_Head]) -> None:
    if isinstance(call.module, nn.MultiheadAttention):
        _contribute(pending, call.module.out_proj.weight.mT)
        pending.clear()


@contextlib.contextmanager
def _projections(model: nn.Module, pending: list[_Head]) -> Iterator[None]:
    def before(module: Any, args: tuple) -> None:
        if not pending or not args or not isinstance(args[0], Tensor):
            return
        weight = module.weight if type(module).__name__ == "Conv1D" else module.weight.mT  # (in, out)
        h, d = pending[0].streamed.output_gram.shape[:2]
        if args[0].shape[-1] == h * d == weight.shape[0]:
            _contribute(pending, weight)
            pending.clear()

    linear = [m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"]
    handles = [module.register_forward_pre_hook(before) for module in linear]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _contribute(pending: list[_Head], weight: Tensor) -> None:
    """||O_h W_h||_F^2 = <O_h^T O_h, W_h W_h^T>: two d x d matrices instead of one as long as the text."""
    for head in pending:
        h, d = head.streamed.output_gram.shape[:2]
        w = weight.detach().float().reshape(h, d, -1)
        head.contribution = (head.streamed.output_gram * (w @ w.mT)).sum((-2, -1)).clamp(min=0).sqrt().double()


# ---- the residual stream ----


def _states(x: Tensor) -> dict[str, float]:
    """What a hidden state (n, d) says of collapse.

    relative_residual   ||res X|| / ||X|| in the composite norm, res X = X less its row mean: 0 for equal tokens
    difference          ||res X||_F^2 / ||X||_F^2: the share that tells tokens apart, between 0 and 1
    mean_cosine         between two different tokens: (||sum of unit rows||^2 - n) / (n (n - 1))
    norm                root mean square length of a token
    """
    n, mean = x.shape[-2], x.mean(-2, dtype=torch.float64)
    columns, unit = torch.zeros(2, x.shape[-1], dtype=torch.float64), torch.zeros(x.shape[-1], dtype=torch.float64)
    highest, squares = [0.0, 0.0], [0.0, 0.0]
    for part in x.split(512):  # in float64, a few rows at a time
        part = part.double()
        for i, rows in enumerate((part, part - mean)):
            squares[i] += torch.linalg.vector_norm(rows).item() ** 2
            sizes = rows.abs()
            columns[i] += sizes.sum(-2)
            highest[i] = max(highest[i], sizes.sum(-1).amax().item())
        unit = unit + (1 / torch.linalg.vector_norm(part, dim=-1).clamp(min=1e-12)) @ part
    one_norms = columns.amax(-1).tolist()
    composite = [math.sqrt(one) * math.sqrt(infinity) for one, infinity in zip(one_norms, highest, strict=True)]
    return {
        "relative_residual": composite[1] / max(composite[0], 1e-300),
        "difference": squares[1] / max(squares[0], 1e-300),
        "mean_cosine": (unit.square().sum().item() - n) / max(1, n * (n - 1)),
        "norm": math.sqrt(squares[0] / n),
    }


# ---- putting one sequence together ----


def _measurement(b: int, heads: list[_Head], states: dict[str, list[dict[str, float]]]) -> Measurement:
    sites = [head.site for head in heads]
    names = set.intersection(*(set(head.streamed.numbers) for head in heads))
    numbers = {name: torch.cat([head.streamed.numbers[name] for head in heads]) for name in sorted(names)}
    nothing = [
        head.streamed.numbers["entropy"].new_full((site.heads,), torch.nan)
        for head, site in zip(heads, sites, strict=True)
    ]
    numbers["contribution"] = torch.cat(
        [blank if head.contribution is None else head.contribution for head, blank in zip(heads, nothing, strict=True)]
    )
    measurement = Measurement(
        sites,
        [head.lengths for head in heads],
        numbers,
        torch.cat([head.streamed.profile for head in heads]),
        _redundancy([head.streamed.sample for head in heads]),
        _layers(b, states, measured_blocks := list(states)),
        measured_blocks,
    )
    spectral = [head.spectral for head in heads if head.spectral is not None]
    if spectral:
        measurement.spectral = {name: torch.cat([s.numbers[name] for s in spectral]) for name in spectral[0].numbers}
        width = max(s.leading.shape[-1] for s in spectral)
        measurement.leading = torch.cat(
            [torch.nn.functional.pad(s.leading, (0, width - s.leading.shape[-1])) for s in spectral]
        )
        measurement.spectra_exact = all(s.exact for s in spectral)
    return measurement


def _site(call: Call, blocks: dict[str, nn.Module]) -> Site:
    s = call.scores
    owner = next((block for block in blocks if call.name == block or call.name.startswith(block + ".")), None)
    return Site(call.name, call.kind, call.causal, s.shape[-3], call.groups, s.q.shape[-1], call.v.shape[-1], owner)


def _layers(b: int, states: dict[str, list[dict[str, float]]], names: list[str]) -> dict[str, Tensor]:
    rows = [states[name][b if len(states[name]) > b else 0] for name in names]
    return {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in (rows[0] if rows else ())}


def _redundancy(samples: list[Tensor]) -> Tensor:
    """Cosine between sampled rows of P, for every pair of heads that see sequences of the same lengths."""
    total = sum(len(x) for x in samples)
    cosine = torch.full((total, total), torch.nan)
    starts = torch.tensor([0, *(len(x) for x in samples)]).cumsum(0).tolist()
    for shape in {x.shape[1:] for x in samples}:
        group = [i for i, x in enumerate(samples) if x.shape[1:] == shape]
        index = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in group])
        rows = torch.cat([samples[i].flatten(1) for i in group])
        gram = rows @ rows.mT
        length = gram.diagonal().sqrt().clamp(min=1e-12)
        cosine[index[:, None], index] = gram / length / length.unsqueeze(-1)
    return cosine
