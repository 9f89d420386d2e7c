"""Claims that five texts make about attention, each as a check that can be run: one file for each text."""

from headwise.ledger.audit import Audit, audit_weights
from headwise.ledger.entry import ClaimResult, Finding, LedgerEntry, Outcome, Source, check_claim
from headwise.ledger.verification import CLAIMS, SOURCES, Ledger, select, verify

__all__ = [
    "CLAIMS",
    "SOURCES",
    "Audit",
    "ClaimResult",
    "Finding",
    "Ledger",
    "LedgerEntry",
    "Outcome",
    "Source",
    "audit_weights",
    "check_claim",
    "select",
    "verify",
]
