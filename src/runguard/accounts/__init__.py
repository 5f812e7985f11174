"""The bill: what every model call may cost, what it did cost, and on whose account."""

from runguard.accounts.bill import Accounts
from runguard.accounts.spending import record_of

__all__ = ["Accounts", "record_of"]
