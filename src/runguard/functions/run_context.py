"""Which run the guarded calls belong to."""

import secrets
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from runguard.engine.runs import Run
from runguard.functions.no_progress import NoProgress

if TYPE_CHECKING:
    from runguard.functions.caller import Caller


@dataclass(slots=True, eq=False)
class RunState:
    """What one caller knows about one run."""

    run: Run
    lock: threading.Lock = field(default_factory=threading.Lock)
    until: float | None = None  # when the period of the budget that stopped the run ends
    progress: NoProgress | None = None  # None: loops are not compared by results


class RunContext:
    """``with runguard.run(...)``: the owner of the run, and what the callers know about it until it ends."""

    def __init__(
        self,
        app: str = "",
        user: str = "",
        session: str = "",
        labels: Mapping[str, str] | None = None,
        caller: "Caller | None" = None,
    ) -> None:
        self.id = secrets.token_hex(8)
        self.app, self.user, self.session, self.labels, self.caller = app, user, session, labels, caller
        self.outer: RunContext | None = None
        self.states: dict[Caller, RunState] = {}
        self.ended = False

    def end(self) -> None:
        self.ended = True
        for caller, state in list(self.states.items()):
            caller.guard.faults.attempt("end of run", caller.guard.end, state.run.info.run)
        self.states.clear()


class Surroundings(NamedTuple):
    """What surrounds a guarded call."""

    run: RunContext | None = None
    # The guard directly inside the one that calls now. It is removed when it is called: the runs around both have
    # already admitted that call, but not a second attempt of a retry between the two.
    inner: "list[Caller] | None" = None
    place: object = None  # the tool call of a guarded agent around it: a ``runguard.adapters.layers.Place``


_NONE: Final = Surroundings()
SURROUNDINGS: Final[ContextVar[Surroundings]] = ContextVar("runguard_surroundings", default=_NONE)
