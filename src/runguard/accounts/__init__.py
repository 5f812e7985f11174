"""The bill: what every model call may cost, what it did cost, and on whose account."""

from runguard.accounts.bill import Accounts

__all__ = ["Accounts"]
