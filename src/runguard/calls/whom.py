"""For whom a run is, and what it was asked: the app, user and session that its budgets count by, and its input.

``calls/run`` asks when a run begins. The adapters keep a ``Whom`` with what their users have set.
"""

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from runguard.calls.surroundings import SURROUNDINGS, RunContext
from runguard.calls.tool_calls import OUTERMOST, current_place
from runguard.core.errors import PolicyError
from runguard.core.identity import input_fingerprint
from runguard.core.money import Per, shown
from runguard.engine.guard import Guard
from runguard.providers.usage import size_of

_log: Final = logging.getLogger("runguard")
Named = str | Callable[[Any], str | None]
_EXAMPLES: Final = {"app": "shop", "user": "ann", "session": "chat-7"}


def check_whom(**whom: object) -> None:
    """Reject an app, user or session that is no text: budgets could not be kept for it."""
    for name, value in whom.items():
        if not isinstance(value, str):
            raise PolicyError(f"{name} = {shown(value)}: give a text, such as {name}='{_EXAMPLES[name]}'")


@dataclass(frozen=True, slots=True)
class Whom:
    """What an adapter was told: texts, or functions of what its framework knows of a run."""

    app: str = ""
    user: Named = ""
    session: Named = ""

    def __post_init__(self) -> None:
        check_whom(app=self.app)
        for name, value in (("user", self.user), ("session", self.session)):
            if not callable(value):
                check_whom(**{name: value})

    def of(self, guard: Guard, given: object, **otherwise: str) -> dict[str, Any]:
        """Return the app, user, session and labels of a run that begins now.

        ``with runguard.run(user=…)`` around it wins over what the adapter was told. ``given``: what the framework
        knows of the run, for the functions. ``otherwise``: what it names by itself, such as a thread as the session.
        A function that fails raises ``PolicyError``: nobody would pay. In shadow mode it is logged. An agent that joins
        the run around it is not asked about: whoever began that run pays.
        """
        place = guard.faults.attempt("adapter", current_place) or OUTERMOST
        if any(layer.guard is guard for layer in place.layers):
            return {"app": self.app}
        found: dict[str, Any] = {"app": self.app, "user": "", "session": ""}
        blocks = list(live_blocks())
        for name in found:
            stated = next((text for block in blocks if (text := getattr(block, name))), "")
            found[name] = stated or self._told(guard, name, given) or otherwise.get(name, "")
        labels: dict[str, str] = {}
        for block in reversed(blocks):
            labels |= block.labels or {}
        found["labels"] = labels or None
        if any(block.automatic for block in blocks):
            found["is_automatic"] = True
        return found

    def _told(self, guard: Guard, name: str, given: object) -> str:
        value = getattr(self, name)
        if not callable(value):
            return str(value)
        try:
            named = value(given)
            if named is None or isinstance(named, str):
                return named or ""
            problem = f"gave {shown(named)}, not a text"
        except Exception as error:
            problem = f"raised {type(error).__name__}: {error}"
        if guard.policy.mode == "enforce":
            raise PolicyError(f"{name}= {problem}, so nobody is known to pay for this run; let it return a text")
        _log.warning("runguard.unnamed: %s= %s", name, problem)
        return ""


_LONG_ENOUGH: Final = 40  # characters of a message that says by itself what is asked


def asked_of(guard: Guard, agent: str, asked: object, *, goes_on: bool) -> dict[str, Any]:
    """Return what a user asks of an agent, for the ``RunInfo``: its ``input``, and its words as the ``message``.

    By its words a message is known that a program has written. ``goes_on``: as for ``input_of``.
    """
    words = guard.faults.attempt("adapter", _words_in, asked) or ""
    return {"input": input_of(guard, agent, asked, goes_on=goes_on), "message": words[:_WORDS_KEPT]}


def _words_in(asked: object, depth: int = 4) -> str:
    """Return the texts in a message, or in its parts."""
    if isinstance(asked, str):
        return asked
    if depth and isinstance(asked, Mapping):
        return _words_in(asked.get("text") or asked.get("content"), depth - 1)
    if depth and isinstance(asked, list | tuple):
        return " ".join(filter(None, [_words_in(part, depth - 1) for part in asked[:_PARTS_READ]]))
    return ""


_PARTS_READ: Final = 64
_WORDS_KEPT: Final = 2_048  # characters, for as long as the run lives


def input_of(guard: Guard, agent: str, asked: object, *, goes_on: bool) -> bytes:
    """Return the identity of what a user asks of an agent, by which the rule ``resubmission`` knows it again.

    ``goes_on``: a conversation. A short message in the middle of one, such as "continue", has no identity: its meaning
    depends on what was said before.
    """
    found: Any = guard.faults.attempt("adapter", _input_of, agent, asked, goes_on)
    return found or b""


def _input_of(agent: str, asked: object, goes_on: bool) -> bytes:
    return b"" if goes_on and size_of(asked) < _LONG_ENOUGH else input_fingerprint(agent, asked)


def live_blocks() -> "list[RunContext]":
    """Return the blocks of ``runguard.run()`` around this code that have not ended, the innermost first."""
    found, block = [], SURROUNDINGS.get().run
    while block is not None:
        if not block.ended:
            found.append(block)
        block = block.outer
    return found


_unnamed: Final[weakref.WeakSet[Guard]] = weakref.WeakSet()  # guards in shadow mode that have warned


def check_named(guard: Guard, *, user: str = "", session: str = "", **_: Any) -> None:
    """Reject a budget per user or session where none is named: all users would share one account."""
    if (user and session) or guard.policy.mode == "off":
        return
    kinds: Mapping[str, str] = {"user": user, "session": session}
    for budget in guard.policy.budgets:
        kind = next((kind for kind, _ in Per.parse(budget.per).parts if not kinds.get(kind, kind)), "")
        if not kind:
            continue
        text = f"a Budget with per = '{budget.per}' needs a {kind}: without one, all share an account; {_HOW[kind]}"
        if guard.policy.mode == "enforce":
            raise PolicyError(text)
        if guard not in _unnamed:
            _unnamed.add(guard)
            _log.warning("runguard.unnamed: %s", text)
        return


_HOW: Final = {
    "user": "make the call inside 'with runguard.run(user=…)', give user= to the guard, or count per='app'",
    "session": "make the call inside 'with runguard.run(session=…)', give session= to the guard "
    "(LangChain: a thread_id in the config), or count per='app'",
}
