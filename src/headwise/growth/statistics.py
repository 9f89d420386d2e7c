"""What growth needs of the data, gathered batch by batch: streaming, bounded, mergeable, reducible over processes.

Per layer:
    folds     (f, h, d_q, d_k)  sums of M_h on f disjoint parts of the sequences, so that a finding can be checked
    gram_q    sum over query rows of x x^T
    gram_k    sum over query rows of sum_j (x_j - mean)(x_j - mean)^T, j what the row may see
    kept      the tokens of whole sequences, exact, up to a budget of bytes
    atoms     beyond the budget: at most `ATOMS` clusters of Gram matrices, each sequence added to its nearest
    probe     N(Z) of everything beyond the budget for one random Z, exact: what the error of `atoms` is measured with
Only query rows that the loss looks at count (a row whose gradient is zero may change freely).
"""

from __future__ import annotations

import itertools
import math
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.errors import NonFiniteError, ShapeError
from headwise.growth.normal_equations import Atom, NormalMap, Tokens
from headwise.growth.score_gradients import CHUNK, Call, allowed_rows, augmented, direct
from headwise.operators.softmax import Softmax

ATOMS = 16


@final
class LayerStatistics:
    """The running sums of one attention layer with h heads, queries d_q wide (bias included) and keys d_k wide.

    `rows`    query rows a sequence whose scores are differentiated, drawn at random; None for all of them
    `memory`  bytes of tokens kept exactly
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
        self.kept: list[Tokens] = []
        self.atoms: list[Atom] = []
        self.biased = False  # scores had an additive bias, which tokens alone do not reproduce
        self.sequences = 0
        generator = torch.Generator().manual_seed(0)
        self._draw = generator
        self.z = torch.randn(d_q, d_k, generator=generator, dtype=torch.float64).to(device or "cpu")
        self.probe = torch.zeros_like(self.z)

    @torch.no_grad()
    def add(self, call: Call, *, bias: bool, scale: float = 1.0) -> None:
        """One batch.  `scale` is what the loss was multiplied by (a gradient scaler's factor)."""
        assert isinstance(call.operator, Softmax)
        live = call.live()
        count = live.any(0).sum().item()
        rows = live.any(0).nonzero().squeeze(-1)
        if not count:
            self._share(live.shape[0])
            return
        if self.rows is not None and len(rows) > self.rows:
            chosen = torch.randperm(len(rows), generator=self._draw)[: self.rows].sort().values
            rows = rows[chosen.to(rows.device)]
        # unbiased: what the chosen rows say, scaled up to all live ones
        stretch = live.sum(1).double() / live.index_select(1, rows).sum(1).clamp(min=1).double()
        self._moments(call, rows, stretch / scale, bias)
        self._grams(call, rows, live, stretch, bias)
        self._remember(call, live, bias)

    @staticmethod
    def check(call: Call, layer: str) -> None:
        """A NonFiniteError unless the gradient is made of numbers."""
        if not math.isfinite(float(call.gradient.sum(dtype=torch.float64))):
            bad = int((~call.gradient.isfinite()).sum())
            raise NonFiniteError(
                f"observe: the gradient of {layer}'s heads has {bad} non-finite of {call.gradient.numel()} entries; "
                "nothing was added; skip this batch or lower the loss scale"
            )

    def _share(self, b: int) -> list[list[int]]:
        """Sequences of this batch by fold, dealt out in turn across batches; the folds' shares of a batch grow."""
        f = len(self.shares)
        dealt = [[i for i in range(b) if (self.sequences + i) % f == fold] for fold in range(f)]
        self.sequences += b
        for fold, members in enumerate(dealt):
            self.shares[fold] += len(members) / b
        return dealt

    def _moments(self, call: Call, rows: Tensor, weights: Tensor, bias: bool) -> None:
        dealt = self._share(len(call.x))
        x = augmented(call.x, bias).to(self.folds.dtype) * weights.to(self.folds)[:, None, None]
        for part, dx in direct(call, rows):
            asking = x.index_select(1, part)
            for fold, members in enumerate(dealt):
                if members:
                    # one product over all sequences of the fold: (d_q, b r) times (h, b r, d_k)
                    left, right = asking[members].flatten(0, 1), dx[members].transpose(0, 1).flatten(1, 2)
                    self.folds[fold] += left.mT @ right.to(left)

    def _grams(self, call: Call, rows: Tensor, live: Tensor, stretch: Tensor, bias: bool) -> None:
        assert isinstance(call.operator, Softmax)
        y = call.context.to(self.folds.dtype)
        w = live.index_select(1, rows).to(y) * stretch.to(y)[:, None]  # (b, r): how many rows each stands for
        x = augmented(call.x.index_select(1, rows), bias).to(y) * w.sqrt().unsqueeze(-1)
        x = x.flatten(0, 1)
        self.gram_q += (x.mT @ x).double()
        self.weight += live.sum()
        if allowed_rows(call.operator, rows[:1]) is None:
            y = y - y.mean(1, keepdim=True)
            y = (y * w.sum(1).sqrt()[:, None, None]).flatten(0, 1)
            self.gram_k += (y.mT @ y).double()
            return
        b, n = y.shape[:2]
        columns, part = y.new_zeros(b, n), max(1, CHUNK // (b * n))
        for some, weights in zip(rows.split(part), w.split(part, 1), strict=True):
            seen = allowed_rows(call.operator, some)
            assert seen is not None
            a = seen.any(1).to(y).expand(b, len(some), n)
            columns += torch.einsum("br,brn->bn", weights, a)
            sums, counts = a @ y, a.sum(-1).clamp(min=1)
            sums = (sums * (weights / counts).sqrt().unsqueeze(-1)).flatten(0, 1)
            self.gram_k -= (sums.mT @ sums).double()
        y = (y * columns.sqrt().unsqueeze(-1)).flatten(0, 1)
        self.gram_k += (y.mT @ y).double()

    def _remember(self, call: Call, live: Tensor, bias: bool) -> None:
        assert isinstance(call.operator, Softmax)
        s = call.operator.scores
        self.biased |= s.bias is not None
        b, every = len(call.x), live.all(1).tolist()
        keep = None if s.keep is None else s.keep.reshape(*(1,) * (4 - s.keep.dim()), *s.keep.shape).any(1)
        for i in range(b):
            places = live[i].nonzero().squeeze(-1)
            if not len(places):
                continue
            mask = None if keep is None else keep[i if len(keep) > 1 else 0]
            if mask is not None and mask.shape[0] > 1:
                mask = mask[places]
            y = call.context[i]
            if mask is not None and mask.shape[0] == 1 and s.ahead is None:
                y, mask = y[mask[0]], None  # padding: simply not there
            # references to what the forward pass made, where they will do: no copy, and queries are often the keys
            x = call.x[i] if every[i] else call.x[i, places]
            self._store(Tokens(x, y, mask, s.ahead, None if s.ahead is None else places, bias))

    def _store(self, tokens: Tokens) -> None:
        if self.used + tokens.bytes <= self.memory:
            self.kept.append(tokens)
            return
        self.probe += tokens.normal(self.z, centred=True)
        self._cluster(Atom(1, *tokens.grams(centred=True)))

    def _cluster(self, atom: Atom) -> None:
        """Online clustering: join the nearest, unless two others are nearer to each other than that."""
        if len(self.atoms) < ATOMS:
            self.atoms.append(atom)
            return
        nearest = min(range(ATOMS), key=lambda i: _distance(self.atoms[i], atom))
        pairs = itertools.combinations(range(ATOMS), 2)
        i, j = min(pairs, key=lambda p: _distance(self.atoms[p[0]], self.atoms[p[1]]))
        if _distance(self.atoms[i], self.atoms[j]) < _distance(self.atoms[nearest], atom):
            self.atoms[i] = self.atoms[i].with_one_more(self.atoms.pop(j))
            self.atoms.append(atom)
        else:
            self.atoms[nearest] = self.atoms[nearest].with_one_more(atom)

    @property
    def used(self) -> int:
        """Bytes of tokens kept."""
        return sum(t.bytes for t in self.kept)

    @property
    def bytes(self) -> int:
        """Bytes of everything."""
        sums = (self.folds, self.gram_q, self.gram_k, self.z, self.probe)
        atoms = (x for a in self.atoms for x in (a.a, a.c))
        return self.used + sum(x.numel() * x.element_size() for x in (*sums, *atoms))

    @property
    def batches(self) -> float:
        return float(self.shares.sum())

    def compression_error(self) -> float:
        """||N~(Z) - N(Z)|| / ||N(Z)|| at a random Z, over the sequences beyond the budget; 0 while all fit."""
        if not self.atoms:
            return 0.0
        approximate = NormalMap((), self.atoms)(self.z)
        return float((approximate - self.probe).norm() / self.probe.norm())

    def means(self) -> tuple[Tensor, Tensor]:
        """G_q and G_k, averaged over query rows."""
        return self.gram_q / self.weight, self.gram_k / self.weight

    def normal(self) -> NormalMap:
        return NormalMap(self.kept, self.atoms)

    def merge(self, other: LayerStatistics) -> None:
        """Add what `other` has seen."""
        if other.folds.shape != self.folds.shape:
            raise ShapeError(
                f"LayerStatistics: folds (f, h, d_q, d_k) must agree, but one has {tuple(self.folds.shape)} and the "
                f"other {tuple(other.folds.shape)}"
            )
        for name in ("folds", "shares", "gram_q", "gram_k", "weight", "probe"):
            getattr(self, name).add_(getattr(other, name))
        self.sequences += other.sequences
        self.biased |= other.biased
        self._take_over(other.kept, other.atoms)

    def _take_over(self, kept: list[Tokens], atoms: list[Atom]) -> None:
        for tokens in kept:
            self._store(tokens)
        for atom in atoms:
            self._cluster(atom)

    def reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """The statistics of all processes, the same on each, bit by bit; nothing where there is one process.

        M is averaged like the gradients of data-parallel training, everything else is summed.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
            return
        count = torch.tensor([self.sequences, int(self.biased)], device=self.folds.device)
        for x in (self.folds, self.shares, self.gram_q, self.gram_k, self.weight, self.probe, count):
            dist.all_reduce(x, group=group)
        self.sequences, self.biased = int(count[0]), bool(count[1])
        parts: list[tuple[list[Tokens], list[Atom]] | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, ([t.packed() for t in self.kept], self.atoms), group=group)
        self.kept, self.atoms = [], []
        for part in parts:
            assert part is not None
            self._take_over(*part)


def _distance(a: Atom, b: Atom) -> float:
    return float((a.a - b.a).square().sum() + (a.c - b.c).square().sum())
