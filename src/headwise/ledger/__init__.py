"""Claims that five texts make about attention, one file for each text, and the promises of a model (`model_audit`)."""

from headwise.ledger.audit import Audit, audit_weights
from headwise.ledger.entry import ClaimResult, Finding, LedgerEntry, Outcome, Source, check_claim
from headwise.ledger.model_audit.promise import ModelAudit, Promise, Standing
from headwise.ledger.verification import CLAIMS, SOURCES, Ledger, select, verify

__all__ = [
    "CLAIMS",
    "SOURCES",
    "Audit",
    "ClaimResult",
    "Finding",
    "Ledger",
    "LedgerEntry",
    "ModelAudit",
    "Outcome",
    "Promise",
    "Source",
    "Standing",
    "audit_weights",
    "check_claim",
    "select",
    "verify",
]
