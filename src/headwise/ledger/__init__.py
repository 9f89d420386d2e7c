"""Every claim of the five sources as a test that can be run: `LEDGER`, in the order of the sources.

S0  on the loss of rank            S3  a mathematical view of attention
S1  on growing attention           S4  on attention and convolution
S2  on linear attention
"""

from headwise.errors import InputError
from headwise.ledger import attention_as_convolution as s4
from headwise.ledger import complexity_tables as tables
from headwise.ledger import growing_networks as s1
from headwise.ledger import linear_attention as s2
from headwise.ledger import mathematical_view as s3
from headwise.ledger import rank_collapse as s0
from headwise.ledger import rank_collapse_questions as s0_questions
from headwise.ledger.entry import Entry, Finding, Outcome, Result, examine

LEDGER: tuple[Entry, ...] = (
    *s0.ENTRIES,
    *s0_questions.ENTRIES,
    *tables.S0_ENTRIES,
    *s1.ENTRIES,
    *s2.ENTRIES,
    *tables.S2_ENTRIES,
    *s3.ENTRIES,
    *s4.ENTRIES,
)

__all__ = ["LEDGER", "Entry", "Finding", "Outcome", "Result", "examine", "select"]


def select(*, source: str | None = None, claim: str | None = None) -> list[Entry]:
    """All entries, those of one source, or one claim by its id."""
    if claim is not None:
        found = [entry for entry in LEDGER if entry.id == claim]
        if not found:
            near = [entry.id for entry in LEDGER if claim.split(".")[0] == entry.source] or ["S0 … S4"]
            raise InputError(f"there is no claim {claim!r}; of that source there are {', '.join(near)}")
        return found
    found = [entry for entry in LEDGER if source in (None, entry.source)]
    if not found:
        raise InputError(f"there is no source {source!r}; the sources are S0, S1, S2, S3 and S4")
    return found
