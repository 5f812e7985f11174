"""Accounts of money, tokens and calls: reserve, settle, release, read, extend."""

from runguard.ledger.base import Account, Hold, Ledger, Refusal
from runguard.ledger.memory import MemoryLedger

__all__ = ["Account", "Hold", "Ledger", "MemoryLedger", "Refusal"]
