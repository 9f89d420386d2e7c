"""`verify`: check published claims against the recorded outcomes, or the promises of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final, overload

from torch import nn

from headwise.errors import InputError
from headwise.ledger import (
    attention_as_convolution,
    growing_networks,
    linear_attention,
    low_rank_sketches,  # noqa: F401  registers claims of two sources
    mathematical_view,
    rank_collapse,
)
from headwise.ledger.entry import ClaimResult, LedgerEntry, check_claim
from headwise.ledger.model_audit.audit_model import audit_model
from headwise.ledger.model_audit.promise import ModelAudit
from headwise.progress import Progress, reported

SOURCES = (
    rank_collapse.SOURCE,
    growing_networks.SOURCE,
    linear_attention.SOURCE,
    mathematical_view.SOURCE,
    attention_as_convolution.SOURCE,
)
CLAIMS: tuple[LedgerEntry, ...] = tuple(entry for source in SOURCES for entry in source.entries)
"""Every claim, in the order of the sources."""


@final
@dataclass(frozen=True, repr=False)
class Ledger:
    """The results of checked claims; `print(ledger)` lists them."""

    results: tuple[ClaimResult, ...]

    @property
    def different(self) -> tuple[str, ...]:
        """Ids of the claims whose outcome is not the recorded one."""
        return tuple(result.entry.id for result in self.results if not result.as_recorded)

    @property
    def summary(self) -> str:
        """The number of claims with each outcome, such as '7 HOLDS, 2 CORRECTED'."""
        counts = Counter(result.finding.outcome.value for result in self.results)
        return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())

    def to_json(self) -> dict[str, Any]:
        """A dict for `outputs.json_text`."""
        return {
            "schema": 1,
            "sources": {source.id: f"{source.authors}, {source.title}" for source in SOURCES},
            "claims": [result.to_json() for result in self.results],
            "different": list(self.different),
        }

    def __str__(self) -> str:
        width = max((len(result.entry.id) for result in self.results), default=0)
        lines = [
            f"{result.entry.id:<{width}}  {result.finding.outcome.value:<18}  {result.entry.statement}"
            for result in self.results
        ]
        different = f"; different from the record: {', '.join(self.different)}" if self.different else ""
        return "\n".join([*lines, self.summary + different])

    def __repr__(self) -> str:
        return f"Ledger({len(self.results)} claims: {self.summary}; {len(self.different)} different from the record)"


@overload
def verify(
    model: None = None,
    *,
    source: str | None = None,
    claim: str | None = None,
    timing: bool = False,
    progress: Progress | bool | None = None,
) -> Ledger: ...
@overload
def verify(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    texts: Sequence[str] | None = None,
    tokenizer: Any = None,
    length: int | None = None,
    causal: bool | None = None,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> ModelAudit: ...
def verify(
    model: nn.Module | None = None,
    batches: Iterable[Any] | None = None,
    *,
    texts: Sequence[str] | None = None,
    tokenizer: Any = None,
    length: int | None = None,
    causal: bool | None = None,
    seed: int = 0,
    source: str | None = None,
    claim: str | None = None,
    timing: bool = False,
    progress: Progress | bool | None = None,
) -> Ledger | ModelAudit:
    """Check by computation whether a model keeps its promises; without a model, published claims about attention.

    model     a torch module, which is afterwards as it was; the result is then a `ModelAudit`
    batches   what it takes, a list of tensors, tuples or dicts; default: tokens drawn from its vocabulary
    texts     instead of batches, with their tokenizer
    length    tokens of a sequence, if they are drawn or cut
    causal    whether no output may depend on a later token; default: what its config says
    seed      of the tokens

    source    only the claims of one text, S0 ... S4 (`headwise.ledger.SOURCES`)
    claim     only one claim, by its id
    timing    also measure times, on which no verdict depends
    progress  True for bars on standard error, or a function of (what, done, total)

    >>> verify(claim="S1.bias")
    Ledger(1 claims: 1 HOLDS; 0 different from the record)
    >>> import torch
    >>> verify(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), [torch.randn(2, 6, 8)]).violated
    ()
    """
    if model is not None:
        if source is not None or claim is not None or timing:
            raise InputError("source, claim and timing are about published claims; leave them out for a model")
        return audit_model(
            model,
            batches,
            texts=texts,
            tokenizer=tokenizer,
            length=length,
            causal=causal,
            seed=seed,
            progress=progress,
        )
    if any(x is not None for x in (batches, texts, tokenizer, length, causal)):
        raise InputError("batches, texts, tokenizer, length and causal are about a model; give one")
    entries, results = select(source=source, claim=claim), []
    with reported(progress) as report:
        for entry in entries:
            results.append(check_claim(entry, timing=timing))
            report("checking claims", len(results), len(entries))
    return Ledger(tuple(results))


def select(*, source: str | None = None, claim: str | None = None) -> list[LedgerEntry]:
    """All claims, those of one source, or one claim by its id."""
    if claim is not None:
        entries = [entry for entry in CLAIMS if entry.id == claim]
        if not entries:
            near = [entry.id for entry in CLAIMS if entry.source == claim.split(".")[0]] or ["S0 … S4"]
            raise InputError(f"there is no claim {claim!r}; the claims of that source are {', '.join(near)}")
        return entries
    entries = [entry for entry in CLAIMS if source in (None, entry.source)]
    if not entries:
        names = ", ".join(f"{each.id} ({each.authors})" for each in SOURCES)
        raise InputError(f"there is no source {source!r}; the sources are {names}")
    return entries
