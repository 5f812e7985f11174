"""What an adapter provides so that the scenarios of the conformance kit can play on it.

``testing/scenarios`` describes agents without any framework: a script in place of the model, plain functions as tools.
A ``Harness`` builds them with the real framework and a scripted model of the framework's own base class. Authors of
adapters import all of it from ``testing/conformance``.
"""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self, TypeVar

from runguard.engine.guard import Controls

MODEL = "scripted-1"  # the name that scripted models report
# How a user can start a turn: awaited, with the framework's synchronous entry in a plain thread, streamed, and awaited
# in a plain thread with an event loop of its own for each turn.
MODES: Final = ("async", "sync", "stream", "thread")
_T = TypeVar("_T")


class AskAgainError(Exception):
    """A scripted tool raises it to ask the model for another try, in the framework's own way where it has one."""


@dataclass(slots=True)
class Reply:
    """One answer of a scripted model. Either a text, tool calls, an error to raise, or a hand-off."""

    text: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    error: Exception | None = None
    hand_off: str = ""  # the agent that goes on
    waits: bool = False  # the call does not come back before it is cancelled, streamed or not
    cut: bool = False  # a streamed answer breaks off with an error after its first piece
    input_tokens: int = 1_000
    output_tokens: int = 100


# (number of this model's call, from 1; the newest text that the model sees: a notice, an answer or the user's message)
Script = Callable[[int, str], Reply]


@dataclass(slots=True)
class AgentSpec:
    """An agent, as a scenario describes it."""

    script: Script
    name: str = "agent"
    tools: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # their arguments are keywords
    agents: Sequence["AgentSpec"] = ()  # agents that it can call as tools named after them, with an argument "request"
    hand_offs: Sequence["AgentSpec"] = ()  # agents that it can hand off to; each can hand back
    structured: bool = False  # its result is the object {"answer": int}
    approvals: Sequence[str] = ()  # tools that a human must approve each time
    pooled: bool = False  # its agents are started by a tool in a thread pool of its own
    instruction: str = ""
    about: Mapping[str, str] = field(default_factory=dict)  # descriptions of tools, instead of their names


@dataclass(slots=True)
class TurnResult:
    """What one user turn left behind."""

    text: str = ""  # the final answer, "" if there is none
    error: BaseException | None = None  # what the framework raised
    events: list[tuple[str, str, str]] = field(default_factory=list)  # ("call" or "answer" or "text", tool, content)
    open_calls: list[str] = field(default_factory=list)  # ids of tool calls without an answer in the stored history
    waits: bool = False  # a human must approve a tool call
    spent: Mapping[str, Any] | None = None  # the bill of the run, as a user of the framework reads it


class Session(ABC):
    """A conversation with one agent. Its history is stored as the framework stores it."""

    @property
    @abstractmethod
    def model_calls(self) -> int:
        """Calls that reached any scripted model of this session's harness, in all turns."""

    @abstractmethod
    async def play(self, message: str | None, *, stream: bool) -> TurnResult:
        """Play one user turn in the framework's asynchronous way. None: approve all tool calls that wait.

        An exception of the framework is kept in the result. Cancellation is raised.
        """

    @abstractmethod
    def play_now(self, message: str | None) -> TurnResult:
        """``play`` with the framework's synchronous entry. It is called in a thread without an event loop."""

    @abstractmethod
    def moved(self, guard: Controls) -> "Session":
        """Return the same conversation on another worker: its stored history, new objects, and another guard."""

    async def turn(self, message: str | None, *, mode: str = "async", stream: bool = False) -> TurnResult:
        """Play one user turn in one of ``MODES``."""
        if mode == "sync":
            return await in_thread(lambda: self.play_now(message))
        if mode == "thread":
            return await in_thread(lambda: asyncio.run(self.play(message, stream=False)))
        return await self.play(message, stream=stream or mode == "stream")


async def in_thread(work: Callable[[], _T]) -> _T:
    """Return what ``work`` returns in a thread of its own, which begins without any context of this one."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(result) if error is None else done.set_exception(error)

    def run() -> None:
        try:
            result, error = work(), None
        except BaseException as raised:
            result, error = None, raised
        loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await done  # type: ignore[no-any-return]


class Harness(ABC):
    """Builds sessions of one framework."""

    name: ClassVar[str]
    # Scenarios that the framework makes impossible, each with the reason that the documentation shows. The key is the
    # name of a scenario, or "name:mode", or ":mode" for a mode that the framework does not have.
    impossible: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def guard(self, **settings: Any) -> Controls:
        """Return a guard of this adapter: a plugin, a middleware, a capability. ``app``, ``user`` as in ``RunInfo``.

        ``termination_condition``: ends the runs of sessions with this guard.
        """

    @abstractmethod
    def session(self, agent: AgentSpec, guard: Controls | None) -> Session:
        """Return a new conversation, guarded by ``guard`` or by nothing."""

    def reason(self, name: str, mode: str) -> str | None:
        """Why the framework makes a case impossible; None where it does not."""
        keys = (name, f"{name}:{mode}", f":{mode}")
        return next((self.impossible[key] for key in keys if key in self.impossible), None)


# ---- Playing a scenario.


class Stage:
    """A harness whose sessions play their turns in one mode."""

    def __init__(self, harness: Harness, mode: str) -> None:
        self._harness, self.mode = harness, mode
        self.guard = harness.guard

    def session(self, agent: AgentSpec, guard: Controls | None) -> "StagedSession":
        return StagedSession(self._harness.session(agent, guard), self.mode)


class StagedSession:
    """A session whose turns are played in one mode."""

    def __init__(self, session: Session, mode: str) -> None:
        self._session, self._mode = session, mode

    @property
    def model_calls(self) -> int:
        return self._session.model_calls

    async def turn(self, message: str) -> TurnResult:
        return await self._session.turn(message, mode=self._mode)

    async def approve(self) -> TurnResult:
        """Approve all tool calls that wait, and let the agent go on."""
        return await self._session.turn(None, mode=self._mode)

    def moved(self, guard: Controls) -> Self:
        """Return the same conversation on another worker."""
        return type(self)(self._session.moved(guard), self._mode)
