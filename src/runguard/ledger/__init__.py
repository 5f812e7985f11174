"""Accounts of money, tokens and calls: reserve, settle, release, read, extend."""

from runguard.ledger.base import NEVER, Account, Hold, Ledger, Refusal
from runguard.ledger.memory import MemoryLedger

__all__ = ["NEVER", "Account", "Hold", "Ledger", "MemoryLedger", "Refusal"]
