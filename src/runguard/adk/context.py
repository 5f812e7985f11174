"""Where running code is: which tool call, Runner and model call it works for.

ADK gives its hooks a context object, but not the calls that it makes past the hooks: an AgentTool's own Runner, a tool
that calls a model, a compaction. Context variables connect those. asyncio copies them when a task starts, so what a
task sets reaches the work inside it and nothing else. RunGuard has five, and a test counts them:

- ``HERE`` (this file): the tool call, the Runner, the guarded models, the termination conditions and the model call
  around the running code, in one immutable record.
- ``ANNOUNCED`` (this file): model calls that a hook admitted and that have not reached their model yet.
- ``adk/budget_plugin.py``: the run whose token budget pays.
- ``engine/charges.py`` ``OWNERS``: the charges around a call, so that nested guards do not hold money twice.
- ``calls/function_state.py``: the run of ``runguard.run``, the guarded function around a call, and the tool call of
  another framework.

An async generator runs in the context of the code that iterates over it. So a generator that sets a field does it for
each step, and undoes it before it yields. To undo is to restore that one field, because the step may have changed
others; ``HERE.reset(token)`` comes first, because it raises in a foreign context, where there is nothing to undo::

    token = HERE.set(HERE.get()._replace(layers=layers))
    try: ...
    finally:
        now = HERE.get()
        HERE.reset(token)
        HERE.set(now._replace(layers=HERE.get().layers))

Nothing of this calls a function of RunGuard: where such a function could fail, no code is left to handle it.
"""

import itertools
from collections.abc import Callable
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from runguard.adk.invocation_state import Invocation, ModelInFlight
from runguard.core.decision import Trip
from runguard.engine.guard import Guard

if TYPE_CHECKING:
    from runguard.adk.invocations import Invocations


class EnclosingTool(NamedTuple):
    """The tool call that the running code is inside of."""

    guard: Guard
    invocation: Invocation
    call_id: str
    name: str
    lane: str
    depth: int
    path: tuple[str, ...]
    outer: "EnclosingTool | None" = None  # the tool call around it: of another guard, or of the caller
    stream: "RunnerStream | None" = None  # the Runner that made the call


@dataclass(slots=True)
class RunnerStream:
    """A Runner at work: the registry of its guard, and the invocations that it started."""

    registry: "Invocations | None"
    outer: "RunnerStream | None" = None  # the Runner inside of which this one works
    app: str = ""
    user: str = ""
    session: str = ""
    guarded: dict[Any, Any] = field(default_factory=dict)  # what each guarded model knows of this run
    ends: list[tuple[Guard, str, Callable[[], None]]] = field(default_factory=list)  # runs that end with it, and how
    fault: Exception | None = None  # a failure of RunGuard before the run started
    invocation_ids: list[str] = field(default_factory=list)
    halted: tuple[str, Trip, str] | None = None  # the invocation that a Halt ends, its trip, the text for the user
    number: int = field(default_factory=itertools.count(1).__next__)
    context: Any = None  # ADK's context of the invocation, where this version of ADK offers it
    agent: str = ""  # the Runner's root agent


@dataclass(slots=True)
class ModelLayer:
    """A guarded model around the model that is called."""

    guard: Guard
    invocation: Invocation
    lane: str
    agent: str


class Here(NamedTuple):
    """What is around the running code, innermost only."""

    tool: EnclosingTool | None = None
    stream: RunnerStream | None = None
    layers: tuple[ModelLayer, ...] = ()
    conditions: tuple[Any, ...] = ()  # termination conditions, from the outermost to the innermost
    model_call: Any = None  # the call that passes through ``model_calls`` now


# They make a record from a tuple of all fields. Every step makes some, and the class itself and ``_replace`` cost
# Python calls.
here_of: Final[Callable[[tuple[Any, ...]], Here]] = partial(tuple.__new__, Here)
enclosing_of: Final[Callable[[tuple[Any, ...]], EnclosingTool]] = partial(tuple.__new__, EnclosingTool)

HERE: Final[ContextVar[Here]] = ContextVar("runguard_here", default=Here())  # noqa: B039 - immutable
# One entry per guard: guard, invocation, call.
ANNOUNCED: Final[ContextVar[tuple[tuple[Guard, Invocation, ModelInFlight], ...]]] = ContextVar(
    "runguard_announced", default=()
)


def adopt(context: Context) -> None:
    """Take RunGuard's variables from another context: a thread does not inherit them from the code that starts it."""
    for variable, value in context.items():
        if variable.name.startswith("runguard_"):
            variable.set(value)


def enclosing_tool(guard: Guard) -> EnclosingTool | None:
    """The innermost tool call of this guard around the running code. None when its run has ended."""
    tool = HERE.get().tool
    while tool is not None and tool.guard is not guard:
        tool = tool.outer
    if tool is None or guard.runs.get(tool.invocation.run.info.run) is not tool.invocation.run:
        return None
    return tool


def runners_inside(tool: EnclosingTool) -> int:
    """How many Runners without a guard are at work inside a tool call, one inside the other.

    The tool started the outermost of them.
    """
    inside, stream = 0, HERE.get().stream
    while stream is not None and stream is not tool.stream:
        inside, stream = inside + 1, stream.outer
    return inside if stream is tool.stream else 0
