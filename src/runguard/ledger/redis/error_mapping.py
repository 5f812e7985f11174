"""Redis errors as store errors: an outage may pass by itself, an error needs a repair."""

import re
from typing import Final

from runguard.core.errors import RunGuardError
from runguard.ledger.store import StoreError, StoreOutage

_TRANSIENT: Final = re.compile(
    r"\b(OOM|READONLY|MISCONF|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|LOADING|BUSY|TRYAGAIN|UNBLOCKED|UNKILLABLE)\b"
)
_OURS: Final = re.compile(r"RUNGUARD (\w+)(?:: ([^@]*?))?(?: script: .*)?$")


class OtherIdentityError(StoreOutage):
    """A script found another identity than the one this process has seen. It changed nothing."""


def is_read_only(error: Exception) -> bool:
    """Whether the server has become a replica."""
    from redis import exceptions

    return isinstance(error, exceptions.ReadOnlyError) or (
        isinstance(error, exceptions.ResponseError) and "READONLY" in str(error)
    )


def store_error_of(error: Exception, name: str, prefix: str) -> RunGuardError:
    """The store error for an error of the server or of the connection to it."""
    from redis import exceptions

    text = str(error)
    ours = _OURS.search(text)
    if ours is not None:
        return _refusal_of_script(name, prefix, ours[1], ours[2] or "")
    if isinstance(
        error,
        exceptions.AuthenticationError
        | exceptions.AuthorizationError
        | exceptions.AuthenticationWrongNumberOfArgsError,
    ):
        return StoreError(f"{name}: the server refuses the user name or password of the URL, or wants one")
    if isinstance(error, exceptions.NoPermissionError):
        return StoreError(f"{name}: {text}; this user needs the keys ~{prefix}* and +@read +@write +@scripting +info")
    if isinstance(error, exceptions.MovedError):
        return StoreError(f"{name}: a cluster, and {error.node_addr} has this namespace; give the address of that node")
    transient = (
        exceptions.ReadOnlyError
        | exceptions.OutOfMemoryError
        | exceptions.ClusterDownError
        | exceptions.TryAgainError
        | exceptions.AskError
    )
    if isinstance(error, transient) or (isinstance(error, exceptions.ResponseError) and _TRANSIENT.search(text)):
        return StoreOutage(f"{name}: {text}")
    if (
        isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | exceptions.InvalidResponse | OSError)
        or "Protocol error" in text
    ):
        return StoreOutage(f"{name}: {text or type(error).__name__}")
    if "WRONGTYPE" in text:
        return StoreError(
            f"{name}: a key that begins with {prefix} is not of the right type: something else uses "
            "it; choose another ?namespace=name"
        )
    if "unknown command" in text.lower():
        return StoreError(f"{name}: {text}; a server with Lua scripts is needed: Redis 6.2 or later, or Valkey")
    if isinstance(error, UnicodeDecodeError):
        return StoreError(
            f"{name}: a key that begins with {prefix} holds bytes that are not text: something else uses it; "
            "choose another ?namespace=name"
        )
    return StoreError(f"{name}: {text}")


def _refusal_of_script(name: str, prefix: str, kind: str, text: str) -> RunGuardError:
    match kind:
        case "schema":
            return StoreError(
                f"{name}: the version of its schema changed while it was in use: a newer RunGuard "
                "works with it. Upgrade runguard-agents"
            )
        case "identity":
            return OtherIdentityError(f"{name}: another store answers here")
        case "damaged":
            return StoreError(
                f"{name}: an account or a hold is damaged: something else writes keys that begin with {prefix}"
            )
        case "amount":
            return StoreError(f"{name}: an amount was refused: {text}")
    return StoreError(f"{name}: refused by a script: {kind} {text}".rstrip())
