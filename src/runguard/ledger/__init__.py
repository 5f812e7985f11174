"""Accounts of money, tokens and calls: reserve, settle, release, read, extend."""

from runguard.ledger.base import Account, Hold, Ledger, Refusal, Stale
from runguard.ledger.identity import StoreReplacedError
from runguard.ledger.memory import MemoryLedger
from runguard.ledger.store import StoreError, StoreOutage

__all__ = ["Account", "Hold", "Ledger", "MemoryLedger", "Refusal", "Stale", "StoreError", "StoreOutage", "StoreReplacedError"]
