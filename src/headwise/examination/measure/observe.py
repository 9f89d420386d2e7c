"""Run a model once over a batch and measure every head and every layer on each sequence of the batch.

Nothing of size m x n is kept: each attention call is measured when it happens, and so is the residual stream between
the blocks of the model.  A block is a member of a list (`nn.ModuleList`, `nn.Sequential`) of modules that attend.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.distributed.collectives import Ranks
from headwise.errors import InputError, NonFiniteError
from headwise.examination.measure.head_measures import HeadProjection, evaluate, evaluate_spectra
from headwise.examination.measure.layer_measures import layer_measures
from headwise.examination.measure.repeated_tokens import repeated_token_scores
from headwise.examination.measure.spectra import spectra
from headwise.examination.measure.streaming import HeadSums, Workspace, stream
from headwise.examination.measure.text_shard import TextShard
from headwise.examination.measure.token_patterns import (
    BatchTokens,
    TokenNames,
    TokenPlaces,
    delimiter_weights,
    token_weights,
)
from headwise.examination.measure.windows import over_windows
from headwise.models.fingerprint import batch_hash
from headwise.models.intercept import AttentionCall, four_axes, intercept, nothing_seen
from headwise.models.run import Batch, OwnHook, SequenceLayout, blocks_of, hidden_states, run_model, without_cache
from headwise.operators._kernels import limits
from headwise.operators._kernels.scores import Scores
from headwise.operators.masks import Mask
from headwise.shapes import filled

LEADING = 64
"""Singular values kept for the report."""

COMPARED_ROWS = 64
"""Rows of an attention output that tell whether a linear layer is given that output."""


@dataclass(frozen=True)
class ExaminedSite:
    """One place of the model that computes attention: a row of the map of heads."""

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
    """Measures of one sequence: (heads of all sites in order,) each; layers are (blocks + 1,)."""

    sites: list[ExaminedSite]
    lengths: list[tuple[int, int]]  # (m, n) of every site
    numbers: dict[str, Tensor]
    profile: Tensor
    redundancy: Tensor  # cosine between heads' sampled rows; NaN where lengths differ
    layers: dict[str, Tensor]
    blocks: list[str]
    spectral: dict[str, Tensor] = field(default_factory=dict)
    leading: Tensor | None = None  # singular values
    spectra_exact: bool = True
    digest: str = ""  # of the batch and the place of the sequence in it: equal for equal texts


class _SiteMeasurement:
    """One call on one sequence; nothing in it grows with the length of the text."""

    def __init__(self, site: ExaminedSite, sums: HeadSums) -> None:
        self.site, self.lengths = site, (sums.m, sums.n)
        self.numbers, self.profile, self.sampled_rows = evaluate(sums), sums.profile(), sums.sampled_rows
        self.output_gram = sums.output.mT @ sums.output
        self.spectral: dict[str, Tensor] = {}
        self.leading = torch.empty(len(self.profile), 0, dtype=torch.float64)
        self.spectra_exact = True

    def add_spectra(self, scores: Scores, v: Tensor, generator: torch.Generator | None) -> None:
        heads = spectra(scores, v, generator=generator)
        self.spectral, self.spectra_exact = evaluate_spectra(heads), heads[0].spectrum.exact
        self.leading = torch.stack([head.values[:LEADING] for head in heads])

    def add_tokens(self, scores: Scores, sums: HeadSums, places: TokenPlaces, entries: int) -> None:
        self.numbers.update(evaluate(token_weights(scores, sums.log_sum_exp, places, entries=entries)))
        delimiters = delimiter_weights(scores, sums.received, places)
        if delimiters is not None:
            self.numbers.update(evaluate(delimiters))

    def add_projection(self, weight: Tensor) -> None:
        """Measures of P V W_O; weight is W_O (h d, width)."""
        h, d, _ = self.output_gram.shape
        split = weight.detach().cpu().float().reshape(h, d, -1)
        self.numbers.update(evaluate(HeadProjection(self.output_gram, split)))


def observe(
    model: nn.Module,
    batch: Batch,
    *,
    with_spectra: bool = True,
    entries: int = limits.CACHE_ENTRIES,
    generator: torch.Generator | None = None,
    token_names: TokenNames | None = None,
    with_repeated_tokens: bool = False,
    ranks: Ranks | None = None,
) -> list[Measurement]:
    """One forward pass; one Measurement for each sequence in the batch.

    with_repeated_tokens  another short pass, whose scores are numbers of the first sequence
    ranks                 processes that share the batch, which is one text (see `TextShard`)
    """
    shard = None if ranks is None else TextShard(model, batch, ranks)
    token_ids = BatchTokens(batch, token_names(batch) if token_names is not None else None)
    by_sequence: dict[int, list[_SiteMeasurement]] = {}
    unprojected: list[_SiteMeasurement] = []  # the last call's, until its output projection runs
    outputs: list[Tensor] = []
    answered: list[Tensor] = []  # the output of the last call, (b, h, m, d)
    workspace = Workspace(entries)

    def see(call: AttentionCall) -> None:
        unprojected.clear()
        outputs.clear()
        is_plain = _is_plain(call)
        site, block = _site(call, blocks, states), block_of(call, blocks)
        tokens.add(block, call)
        call = (call if shard is None else shard.whole(call)).measurable
        for b in range(len(call.q)):
            part = measured_part(call, b, tokens.queries(block, call, b))
            scores, v = part.cut(call)
            sums = stream(scores, v, positions=part.positions, workspace=workspace)
            _check_finite(call, b, sums)
            measured = _SiteMeasurement(site, sums)
            places = token_ids.places(call, b, scores)
            if places is not None:
                measured.add_tokens(scores, sums, places, entries)
            if with_spectra:
                measured.add_spectra(scores, v, generator)
            by_sequence.setdefault(b // call.windows, []).append(measured)
            unprojected.append(measured)
            if is_plain or shard is not None:
                outputs.append(sums.output)
        if isinstance(call.module, nn.MultiheadAttention):
            _project(unprojected, call.module.out_proj.weight.mT, shard)

    def answer(site: str, attention: Callable[..., Tensor], args: tuple, kwargs: dict) -> Tensor:
        """P V, known already if nothing is padded: computing it again takes a quarter of the forward pass."""
        if outputs:
            query = args[0] if args else kwargs["query"]
            known = torch.stack(outputs) if len(outputs) > 1 else outputs[0]
            known = known if shard is None else shard.rows(known.to(query.device)).to(query)
            known = known.reshape(*query.shape[:-1], -1)
            outputs.clear()
        else:
            known = attention(*args, **kwargs)
        answered[:] = [four_axes(known)]
        return known

    def measure_block(block: str, x: Tensor) -> list[dict[str, float]] | None:
        with torch._C.DisableTorchFunction():  # not through the interception, which looks at what the model computes
            return _each(partial(layer_measures, ranks=ranks), tokens.of(block, x))

    blocks, tokens = blocks_of(model), BlockTokens()
    states: dict[str, list[dict[str, float]]] = {}
    with (
        torch.no_grad(),
        hidden_states(blocks, measure_block, states),
        _output_projections(model, unprojected, answered, shard),
        intercept(model, see, answer=answer),
    ):
        run_model(model, without_cache(model, batch if shard is None else shard.own))
    if not by_sequence:
        raise nothing_seen(model)
    if shard is not None:
        by_sequence[0] = list(map(_all_heads, zip(*shard.from_all(by_sequence[0]), strict=True)))
    if with_repeated_tokens:
        repeated = repeated_token_scores(model, batch)
        for measured in by_sequence[0]:
            if measured.site.name in repeated:
                measured.numbers.update(evaluate(repeated[measured.site.name]))
    digest = batch_hash(batch)
    return [_measurement(b, over_windows(sites), states, f"{digest}/{b}") for b, sites in sorted(by_sequence.items())]


def _check_finite(call: AttentionCall, b: int, sums: HeadSums) -> None:
    """NonFiniteError with the place of the first NaN or infinity: no number is measured from them."""
    output = sums.output.flatten(1)  # its extremes are NaN if there is one; isfinite takes twenty times as long
    finite = (output.amin(-1) > -math.inf) & (output.amax(-1) < math.inf)
    finite &= sums.log_sum_exp.amax(-1) < math.inf  # -inf: sees no key
    if not bool(finite.all()):
        heads = (~finite).nonzero().flatten().tolist()
        others = f" and of {len(heads) - 1} others" if len(heads) > 1 else ""
        raise NonFiniteError(
            f"{call.site}: the output of head {heads[0]}{others} on text {b} of the batch is not finite (NaN or "
            "infinity), so neither it nor what follows can be measured; check the weights, or run the model in another "
            f"precision than {str(call.q.dtype).removeprefix('torch.')}"
        )


def _is_plain(call: AttentionCall) -> bool:
    """Float32 on the CPU with no mask but causality: the measured output is what the model computes, to rounding."""
    mask = call.mask
    unmasked = mask.visible is None and mask.attn_bias is None and (mask.ahead or 0) >= 0
    return call.q.device.type == "cpu" and call.q.dtype == torch.float32 == call.v.dtype and unmasked


@dataclass(frozen=True, eq=False)
class MeasuredPart:
    """The queries and keys of one sequence of a call that are measured: no padding, no query that sees nothing."""

    b: int
    queries: Tensor | None  # (m,) boolean; None: all
    keys: Tensor | None  # (n,) boolean; None: all
    positions: Tensor | None  # of the queries on the axis of the keys that are left; None: 0, 1, ...

    def cut(self, call: AttentionCall) -> tuple[Scores, Tensor]:
        q, k, v, mask = call.q[self.b], call.k[self.b], call.v[self.b], call.mask.index(self.b)
        if self.queries is not None or self.keys is not None:
            queries, keys = (
                torch.ones(size, dtype=torch.bool, device=q.device) if chosen is None else chosen
                for size, chosen in ((mask.m, self.queries), (mask.n, self.keys))
            )
            q, k, v, mask = q[:, queries], k[:, keys], v[:, keys], mask.select(queries, keys)
        return Scores(q, k, call.scale, mask), v


def measured_part(call: AttentionCall, b: int, queries: Tensor | None = None) -> MeasuredPart:
    """What is measured of sequence b: keys that some query attends to, and queries that attend to some key.

    In self-attention a key that no query attends to is padding, and so is its query.  `queries` (m,) boolean says which
    queries of cross-attention are no padding, if that is known.
    """
    mask, aligned = call.mask.index(b), call.kind == "self" and call.mask.m == call.mask.n
    keys = mask.attended_keys()
    if keys is not None and not bool(keys.any()):
        raise InputError(
            f"{call.site}: the mask of text {b} of the batch hides all of its {mask.n} keys, so there is no "
            "attention to measure; leave the text out"
        )
    if aligned and keys is not None:
        queries = keys
    empty = mask.empty_rows(call.q.device)
    if empty is not None and bool(empty.any()):
        alive = ~(empty.all(0) if empty.dim() > 1 else empty)  # of some head
        queries = alive if queries is None else queries & alive
    if queries is not None and bool(queries.all()):
        queries = None
    return MeasuredPart(b, queries, keys, _positions(mask, queries, keys, 0 if aligned else mask.ahead))


def _positions(mask: Mask, queries: Tensor | None, keys: Tensor | None, ahead: int | None) -> Tensor | None:
    """Where the queries stand among the keys that are left, if query i stands at key i + ahead; None: at 0, 1, ..."""
    if ahead is None or (queries is None and not ahead):
        return None
    places = torch.arange(mask.m) + ahead
    if queries is not None:
        places = places[queries.cpu()]
    if keys is None:
        return places
    return (keys.cumsum(0) - keys.long()).cpu()[places]  # the number of keys before it


def sequence(call: AttentionCall, b: int) -> tuple[Scores, Tensor]:
    """Scores and values of sequence b, as far as they are measured."""
    call = call.measurable
    return measured_part(call, b).cut(call)


class BlockTokens:
    """Which tokens of a block's hidden state are no padding, and on which axis they are, from its attention calls."""

    def __init__(self) -> None:
        self._layouts: dict[str | None, SequenceLayout] = {}
        self._kept: dict[str | None, list[Tensor | None]] = {}  # of each sequence, (m,) boolean; None: all

    def add(self, block: str | None, call: AttentionCall) -> None:
        """Note an attention call of the block."""
        self._layouts[block] = self._layouts[None] = layout = SequenceLayout.of(call)
        if call.kind == "self" and call.windows == 1 and call.mask.m == call.mask.n:
            self._kept[block] = [call.mask.index(b).attended_keys() for b in range(layout.sequences)]

    def queries(self, block: str | None, call: AttentionCall, b: int) -> Tensor | None:
        """The queries of a call that are no padding, from the self-attention of the same block; None: not known."""
        kept = self._kept.get(block, [])
        found = kept[b] if len(kept) == len(call.q) else None
        return found if found is not None and len(found) == call.mask.m else None

    def of(self, block: str, x: Tensor) -> list[Tensor] | None:
        """The hidden state x of a block as one (n, d) a sequence, without padding; None if it is not one of tokens."""
        layout = self._layouts.get(block, self._layouts.get(None))
        x_by_sequence = None if layout is None else layout.by_sequence(x)
        if x_by_sequence is None:
            return None
        kept = self._kept.get(block, [])
        if len(kept) != len(x_by_sequence):
            return list(x_by_sequence)
        return [
            one if keep is None or len(keep) != len(one) else one[keep]
            for one, keep in zip(x_by_sequence, kept, strict=True)
        ]


def _each(measure: Callable[[Tensor], dict[str, float]], x: list[Tensor] | None) -> list[dict[str, float]] | None:
    return None if x is None else [measure(one.cpu()) for one in x]


def _project(unprojected: list[_SiteMeasurement], weight: Tensor, shard: TextShard | None) -> None:
    for measured in unprojected:
        d = measured.output_gram.shape[-1]
        own = slice(None) if shard is None else slice(shard.heads.start * d, shard.heads.stop * d)
        measured.add_projection(weight[own])
    unprojected.clear()


@contextlib.contextmanager
def _output_projections(
    model: nn.Module, unprojected: list[_SiteMeasurement], answered: list[Tensor], shard: TextShard | None
) -> Iterator[None]:
    """Take the linear layer that is given the output of an attention call, heads side by side, for its W_O.

    If something else happens to the output first (a gate, a norm, a projection that is no module), there is none.
    """

    def before(module: Any, args: tuple) -> None:
        if not unprojected or not answered or not args or not isinstance(args[0], Tensor):
            return
        with torch._C.DisableTorchFunction():  # as in `observe`
            weight = module.weight if type(module).__name__ == "Conv1D" else module.weight.mT  # (in, out)
            h, d = answered[0].shape[1], answered[0].shape[-1]
            if args[0].shape[-1] == h * d == weight.shape[0] and _is_merged(args[0], answered[0]):
                _project(unprojected, weight, shard)
                answered.clear()

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                hooks.enter_context(module.register_forward_pre_hook(OwnHook(before)))
        yield


def _is_merged(x: Tensor, output: Tensor) -> bool:
    """Whether x has the rows of an attention output (b, h, m, d) with its heads side by side, by text or by token.

    Compared on COMPARED_ROWS evenly spaced rows: to compare all of them takes as long as a measure.
    """
    rows, (b, h, m, d) = x.flatten(0, -2), output.shape
    if rows.numel() != output.numel() or rows.shape[-1] != h * d:
        return False
    at = torch.linspace(0, len(rows) - 1, min(len(rows), COMPARED_ROWS), device=x.device).round().long()
    chosen = rows[at].float()
    places = ((at // m, at % m), (at % b, at // b))  # (text, token) of each row, in both orders
    merged = (output[text, :, token].flatten(1).float() for text, token in places)
    return any(torch.allclose(chosen, one, rtol=1e-2, atol=1e-6) for one in merged)


def _all_heads(parts: Sequence[_SiteMeasurement]) -> _SiteMeasurement:
    """One call, of which each process has measured some heads."""
    whole = copy.copy(parts[0])
    whole.profile, whole.sampled_rows = (torch.cat([getattr(x, y) for x in parts]) for y in ("profile", "sampled_rows"))
    whole.numbers = {name: torch.cat([x.numbers[name] for x in parts]) for name in whole.numbers}
    whole.spectral = {name: torch.cat([x.spectral[name] for x in parts]) for name in whole.spectral}
    width = max(x.leading.shape[-1] for x in parts)
    whole.leading = torch.cat([filled(x.leading, (0, width - x.leading.shape[-1])) for x in parts])
    whole.spectra_exact = all(x.spectra_exact for x in parts)
    return whole


def _measurement(
    b: int, sites: list[_SiteMeasurement], states: dict[str, list[dict[str, float]]], digest: str
) -> Measurement:
    numbers = {}
    for name in {name: None for measured in sites for name in measured.numbers}:
        # a measure that one site lacks, such as the contribution without an output projection, is NaN there
        numbers[name] = torch.cat(
            [x.numbers.get(name, torch.full((x.site.heads,), torch.nan, dtype=torch.float64)) for x in sites]
        )
    layers = [rows[b if len(rows) > b else 0] for rows in states.values()]
    width = max(x.leading.shape[-1] for x in sites)
    leading = torch.cat([filled(x.leading, (0, width - x.leading.shape[-1])) for x in sites])
    return Measurement(
        sites=[x.site for x in sites],
        lengths=[x.lengths for x in sites],
        numbers=numbers,
        profile=torch.cat([x.profile for x in sites]),
        redundancy=_redundancy([x.sampled_rows for x in sites]),
        layers={
            name: torch.tensor([row[name] for row in layers], dtype=torch.float64)
            for name in (layers[0] if layers else ())
        },
        blocks=list(states),
        spectral={name: torch.cat([x.spectral[name] for x in sites]) for name in sites[0].spectral},
        leading=leading if sites[0].spectral else None,
        spectra_exact=all(x.spectra_exact for x in sites),
        digest=digest,
    )


def block_of(call: AttentionCall, blocks: Iterable[str]) -> str | None:
    """The name of the block that makes the call."""
    return next((block for block in blocks if call.site == block or call.site.startswith(block + ".")), None)


def _site(call: AttentionCall, blocks: Iterable[str], states: Iterable[str]) -> ExaminedSite:
    block = block_of(call, blocks)
    uses = sum(name.partition("@")[0] == block for name in states)  # of the block, that have ended
    h, key_width, value_width = call.q.shape[1], call.q.shape[-1], call.v.shape[-1]
    block = f"{block}@{uses + 1}" if uses else block
    return ExaminedSite(call.site, call.kind, call.causal, h, call.groups, key_width, value_width, block)


def _redundancy(samples: list[Tensor]) -> Tensor:
    """Cosine between sampled rows of P, for every pair of heads on sequences of the same lengths."""
    total = sum(len(x) for x in samples)
    cosine = torch.full((total, total), torch.nan, dtype=torch.float32)
    starts = torch.tensor([0, *(len(x) for x in samples)]).cumsum(0).tolist()
    for shape in {x.shape[1:] for x in samples}:
        group = [i for i, x in enumerate(samples) if x.shape[1:] == shape]
        index = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in group])
        rows = torch.cat([samples[i].flatten(1) for i in group])
        gram = rows @ rows.mT
        length = gram.diagonal().sqrt().clamp(min=1e-12)
        cosine[index[:, None], index] = gram / length / length.unsqueeze(-1)
    return cosine
