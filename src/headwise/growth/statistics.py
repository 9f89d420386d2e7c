"""The statistics behind growth, gathered batch by batch in bounded memory, and reduced over processes.

Per layer:
    folds      (f, h, d_q, d_k)  sums of M_h on f disjoint parts of the sequences, so that results can be validated
    gram_q     sum over query rows of x x^T
    gram_k     sum over query rows of sum_j (x_j - mean)(x_j - mean)^T, j the keys that the row attends to
    stored     the tokens of whole sequences, exact, up to a budget of bytes
    clusters   beyond the budget: at most `CLUSTERS` clusters of Gram matrices, each sequence added to its nearest
    probe      N(Z) of everything beyond the budget for one random Z, exact: to measure the error of `clusters`
Only query rows that the loss depends on count (a row whose gradient is zero may change freely).
"""

from __future__ import annotations

import itertools
import math
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.errors import NonFiniteError
from headwise.growth.layers.own_projections import OwnProjections
from headwise.growth.layers.watch import CHUNK, ObservedPass, augmented, score_gradients
from headwise.growth.normal_equations import GramCluster, NormalMap, TokenSequence, visible_rows
from headwise.operators.masks import Mask

CLUSTERS = 16


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """The number of processes that train together; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


@final
class LayerStatistics:
    """The running sums of one attention layer with h heads, queries d_q wide (bias included) and keys d_k wide.

    `rows`    query rows per sequence whose scores are differentiated, drawn at random; None for all of them
    `memory`  bytes of tokens stored exactly
    """

    def __init__(
        self,
        h: int,
        d_q: int,
        d_k: int,
        *,
        folds: int = 4,
        rows: int | None = 32,
        memory: int = 1 << 26,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.rows, self.memory = rows, memory
        sums = {"dtype": torch.promote_types(dtype, torch.float32), "device": device}
        self.folds = torch.zeros(folds, h, d_q, d_k, **sums)
        self.shares = torch.zeros(folds, dtype=torch.float64, device=device)
        self.gram_q = torch.zeros(d_q, d_q, dtype=torch.float64, device=device)
        self.gram_k = torch.zeros(d_k, d_k, dtype=torch.float64, device=device)
        self.weight = torch.zeros((), dtype=torch.float64, device=device)  # query rows behind the Gram matrices
        self.stored: list[TokenSequence] = []
        self.clusters: list[GramCluster] = []
        self.own: OwnProjections | None = None  # of layers whose weights are not read
        self.biased = False  # scores had an additive bias, which tokens alone do not reproduce
        self.sequence_count = 0
        self._generator = torch.Generator().manual_seed(0)
        self.z = torch.randn(d_q, d_k, generator=self._generator, dtype=torch.float64).to(device or "cpu")
        self.probe = torch.zeros_like(self.z)

    @torch.no_grad()
    def add(self, observed: ObservedPass, *, bias: bool, scale: float = 1.0) -> None:
        """Add one batch.  `bias`: queries have one; `scale`: the factor that the loss was multiplied by."""
        live = observed.rows_with_gradient()
        rows = live.any(0).nonzero().squeeze(-1)
        dealt = self._deal(len(observed.x))
        if observed.own is not None:
            self._add_own(observed, observed.own)
        if not len(rows):
            return
        if self.rows is not None and len(rows) > self.rows:
            chosen = torch.randperm(len(rows), generator=self._generator)[: self.rows].sort().values
            rows = rows[chosen.to(rows.device)]
        # unbiased: the sum over the chosen rows, scaled up to all rows with a gradient
        stretch = live.sum(1).double() / live.index_select(1, rows).sum(1).clamp(min=1).double()
        self._add_folds(observed, rows, stretch / scale, bias, dealt)
        self._add_grams(observed, rows, live, stretch, bias)
        self._add_sequences(observed, live, bias)

    def _add_own(self, observed: ObservedPass, own: tuple[Tensor, Tensor]) -> None:
        inputs, (q, k) = (observed.x, observed.context), own
        if self.own is None:
            sizes = (q.shape[1], k.shape[1]), (observed.x.shape[-1], observed.context.shape[-1])
            self.own = OwnProjections(*sizes, q.shape[-1], self.folds.device)
        self.own.add(inputs, own)

    @staticmethod
    def check(observed: ObservedPass, layer: str) -> None:
        """Raise NonFiniteError unless everything that the statistics are made of is finite."""
        parts = {
            "gradient": observed.gradient,
            "queries' input": observed.x,
            "keys' input": observed.context,
            "values": observed.values,
            "output": observed.outputs,
        }
        for what, x in parts.items():
            if not math.isfinite(float(x.sum(dtype=torch.float64))):
                raise NonFiniteError(
                    f"observe: the {what} of {layer}'s heads has {int((~x.isfinite()).sum())} non-finite of "
                    f"{x.numel()} entries; nothing was added; skip this batch or lower the loss scale"
                )

    def _deal(self, b: int) -> list[list[int]]:
        """Assign the sequences of a batch to folds, in turn across batches, and count them in `shares`."""
        f = len(self.shares)
        dealt = [[i for i in range(b) if (self.sequence_count + i) % f == fold] for fold in range(f)]
        self.sequence_count += b
        for fold, members in enumerate(dealt):
            self.shares[fold] += len(members) / b
        return dealt

    def _add_folds(
        self, observed: ObservedPass, rows: Tensor, weights: Tensor, bias: bool, dealt: list[list[int]]
    ) -> None:
        x = augmented(observed.x, bias).to(self.folds.dtype) * weights.to(self.folds)[:, None, None]
        for part, dx in score_gradients(observed, rows):
            queries = x.index_select(1, part)
            for fold, members in enumerate(dealt):
                if members:
                    # one product over all sequences of the fold: (d_q, b r) times (h, b r, d_k)
                    left, right = queries[members].flatten(0, 1), dx[members].transpose(0, 1).flatten(1, 2)
                    self.folds[fold] += left.mT @ right.to(left)

    def _add_grams(self, observed: ObservedPass, rows: Tensor, live: Tensor, stretch: Tensor, bias: bool) -> None:
        y = observed.context.to(self.folds.dtype)
        w = live.index_select(1, rows).to(y) * stretch.to(y)[:, None]  # (b, r): how many rows each stands for
        x = augmented(observed.x.index_select(1, rows), bias).to(y) * w.sqrt().unsqueeze(-1)
        x = x.flatten(0, 1)
        self.gram_q += (x.mT @ x).double()
        self.weight += live.sum()
        if visible_rows(observed.scores.mask, rows[:1]) is None:
            y = y - y.mean(1, keepdim=True)
            y = (y * w.sum(1).sqrt()[:, None, None]).flatten(0, 1)
            self.gram_k += (y.mT @ y).double()
            return
        b, n = y.shape[:2]
        columns, part = y.new_zeros(b, n), max(1, CHUNK // (b * n))
        for some, weights in zip(rows.split(part), w.split(part, 1), strict=True):
            visible = visible_rows(observed.scores.mask, some)
            assert visible is not None
            a = visible.any(-3).to(y) if visible.dim() > 2 else visible.to(y)  # of any head
            a = a.expand(b, len(some), n)
            columns += torch.einsum("br,brn->bn", weights, a)
            sums, counts = a @ y, a.sum(-1).clamp(min=1)
            sums = (sums * (weights / counts).sqrt().unsqueeze(-1)).flatten(0, 1)
            self.gram_k -= (sums.mT @ sums).double()
        y = (y * columns.sqrt().unsqueeze(-1)).flatten(0, 1)
        self.gram_k += (y.mT @ y).double()

    def _add_sequences(self, observed: ObservedPass, live: Tensor, bias: bool) -> None:
        mask = observed.scores.mask
        self.biased |= mask.attn_bias is not None
        visible = None if mask.visible is None else mask.visible.any(1)  # (b | 1, 1 | m, n): the keys of any head
        for i, rows in enumerate(x.nonzero().squeeze(-1) for x in live):
            if not len(rows):
                continue
            y, pairs = observed.context[i], None if visible is None else visible[i if len(visible) > 1 else 0]
            if pairs is not None and len(pairs) == 1 and not mask.causal:
                y, pairs = y[pairs[0]], None  # padding keys are dropped
            # tensors of the forward pass are referenced where possible: no copy, and queries are often the keys
            x, positions = (observed.x[i], None) if len(rows) == mask.m else (observed.x[i, rows], rows)
            self._store(TokenSequence(x, y, Mask(mask.m, len(y), mask.causal, None, pairs), positions, bias))

    def _store(self, tokens: TokenSequence) -> None:
        if self.used + tokens.bytes <= self.memory:
            self.stored.append(tokens)
            return
        self.probe += tokens.normal(self.z, centred=True)
        self._cluster(GramCluster(1, *tokens.grams(centred=True)))

    def _cluster(self, new: GramCluster) -> None:
        """Online clustering: join the nearest cluster, unless two others are nearer to each other than that."""
        clusters = self.clusters
        if len(clusters) < CLUSTERS:
            clusters.append(new)
            return
        nearest = min(range(CLUSTERS), key=lambda i: clusters[i].distance(new))
        pairs = itertools.combinations(range(CLUSTERS), 2)
        i, j = min(pairs, key=lambda p: clusters[p[0]].distance(clusters[p[1]]))
        if clusters[i].distance(clusters[j]) < clusters[nearest].distance(new):
            clusters[i] = clusters[i].merged(clusters.pop(j))
            clusters.append(new)
        else:
            clusters[nearest] = clusters[nearest].merged(new)

    @property
    def used(self) -> int:
        """Bytes of stored tokens."""
        return sum(t.bytes for t in self.stored)

    @property
    def bytes(self) -> int:
        """Bytes of everything."""
        sums = [self.folds, self.gram_q, self.gram_k, self.z, self.probe, *(self.own.tensors if self.own else ())]
        grams = (x for cluster in self.clusters for x in (cluster.a, cluster.c))
        return self.used + sum(x.numel() * x.element_size() for x in (*sums, *grams))

    @property
    def batches(self) -> float:
        return float(self.shares.sum())

    def compression_error(self) -> float:
        """||N~(Z) - N(Z)|| / ||N(Z)|| at a random Z, over the sequences beyond the budget; 0 while all fit."""
        if not self.clusters:
            return 0.0
        approximate = NormalMap((), self.clusters)(self.z)
        return float((approximate - self.probe).norm() / self.probe.norm())

    def means(self) -> tuple[Tensor, Tensor]:
        """G_q and G_k, averaged over query rows."""
        return self.gram_q / self.weight, self.gram_k / self.weight

    def normal(self) -> NormalMap:
        return NormalMap(self.stored, self.clusters)

    def reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Combine the statistics of all processes, bit for bit the same on each; nothing happens in one process.

        M is averaged like the gradients of data-parallel training, everything else is summed.
        """
        if world_size(group) == 1:
            return
        count = torch.tensor([self.sequence_count, int(self.biased)], device=self.folds.device)
        own = [] if self.own is None else self.own.tensors
        for x in (self.folds, self.shares, self.gram_q, self.gram_k, self.weight, self.probe, count, *own):
            dist.all_reduce(x, group=group)
        self.sequence_count, self.biased = int(count[0]), bool(count[1])
        parts: list[Any] = [None] * world_size(group)
        dist.all_gather_object(parts, ([t.packed() for t in self.stored], self.clusters), group=group)
        self.stored, self.clusters = [], []
        for stored, clusters in parts:
            for tokens in stored:
                self._store(tokens)
            for cluster in clusters:
                self._cluster(cluster)
