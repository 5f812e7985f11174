"""The boundary to a store: every exception that comes out of it is a ``StoreOutage`` or a ``StoreError``.

The stores translate the errors that they know, with a message that says what to do. What is left is unforeseen: a
damaged row, an answer of the wrong shape, a defect in a client library. It must not look like a fault of the guard,
because ``on_guard_error="allow"`` would let the call through.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from runguard.core.errors import PolicyError
from runguard.ledger.store import StoreError, StoreOutage

_TRANSIENT: Final = (OSError, EOFError)
_LONGEST: Final = 300


class UnforeseenError(StoreError):
    """An exception that the code of the store did not expect.

    Another attempt may succeed: a connection in a strange state is replaced.
    """


@contextmanager
def store_faults(name: str, kinds: type[BaseException] = Exception) -> Iterator[None]:
    """Run code that talks to the store ``name``.

    On a thread of ours ``kinds`` is ``BaseException``: no other code handles exceptions there.
    """
    try:
        yield
    except kinds as error:
        fault = fault_of(name, error)
        if fault is error:
            raise
        raise fault from error


def fault_of(name: str, error: BaseException) -> StoreError | StoreOutage:
    """Return the error itself if it is a store fault, otherwise a store fault in its place."""
    if isinstance(error, StoreError | StoreOutage):
        return error
    if isinstance(error, PolicyError):  # settings that only connecting could prove wrong; it names the store
        return StoreError(str(error))
    found = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST].removesuffix(": ")
    if isinstance(error, _TRANSIENT):
        return StoreOutage(f"{name}: {found}")
    return UnforeseenError(
        f"{name}: the store gave an answer that cannot be used ({found}); its data may be damaged. Check it "
        "with: runguard doctor"
    )
