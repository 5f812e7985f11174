"""One turn of LangChain is one run: a root invocation with everything in it, before and after its pauses.

A callback handler for the whole process sees where each chain, graph, node and tool begins and ends, and what it is
part of. So nothing lives in a graph's state, and a client of the app cannot choose a run. ``middleware`` and
``chat_model`` find the run of a call with ``Runs``.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook
from langgraph.errors import GraphInterrupt
from langgraph.runtime import get_runtime
from langgraph.types import Command

from runguard.background import FINALIZED
from runguard.calls import surroundings
from runguard.calls.run import AgentRun, Spent, Whom, asked_of
from runguard.calls.surroundings import SURROUNDINGS, RunContext, drive
from runguard.core.errors import RunStoppedError
from runguard.engine.guard import Guard
from runguard.termination.conditions import TerminationCondition

_NODE_TAG: Final = "graph:step:"  # LangGraph's tag of the runs of nodes, which their children do not inherit
_KEPT: Final = "langchain"  # the name under which a block of ``runguard.run()`` keeps a turn

# ---- What LangChain runs, and what belongs together.


class Scope:
    """One run in LangChain's terms: of a chain, a graph, a node or a tool."""

    __slots__ = ("agent", "has_ended", "is_graph", "is_resumed", "name", "parent", "place", "turn")

    def __init__(self, turn: "Turn", parent: "Scope | None", name: str, inputs: object) -> None:
        self.turn, self.parent, self.name = turn, parent, name
        self.agent = self  # the graph, chain or tool whose model calls follow each other in one lane
        self.place = SURROUNDINGS.get().place  # the tool call in which it began
        self.is_graph = self.has_ended = False
        # what LangGraph takes to go on with a thread, if this is a graph
        self.is_resumed = inputs is None or (isinstance(inputs, Command) and inputs.resume is not None)

    @property
    def outermost(self) -> "Scope":
        """The outermost graph around this code, or the root where there is none."""
        found = scope = self
        while scope.parent is not None:
            scope = scope.parent
            if scope.is_graph or not found.is_graph:
                found = scope
        return found


_Key = tuple[Guard, object, object]  # of an agent: its guard, its graph or worker, and the block around


class Turn:
    """A root invocation, or a block of ``runguard.run()`` that calls models by hand. Safe to use from many threads."""

    def __init__(self, inputs: object = None) -> None:
        """Begin a turn whose root got ``inputs``."""
        self.inputs = inputs
        self.block = RunContext()  # shares one run of each guard between all agents of the turn
        self.waits = False  # for an answer from outside
        self.has_steps = False  # a graph is in it, and not only a chain
        self.around = SURROUNDINGS.get().run  # the block of ``runguard.run()`` in which it began
        self.agents: dict[_Key, AgentRun] = {}
        self._first: dict[Guard, tuple[AgentRun, tuple[str, ...]]] = {}
        self._seen: dict[Guard, set[str]] = {}
        self._lock, self.is_over = threading.RLock(), False

    def others(self, key: _Key) -> list[AgentRun]:
        """Return what other guards have begun for the same agent."""
        with self._lock:
            return [run for known, run in self.agents.items() if known[1:] == key[1:] and known[0] is not key[0]]

    def is_tool_of(self, agent: "Scope", place: object) -> bool:
        """Whether a place is a tool call of this agent, which one of its guards has allowed."""
        layers = getattr(place, "layers", ())
        return any(all(one in layers for one in run.layers) for key, run in self.agents.items() if key[1] is agent)

    def first(self, guard: Guard) -> AgentRun | None:
        """Return the agent that began the run of a guard in this turn."""
        found = self._first.get(guard)
        return found[0] if found is not None else None

    def add(self, key: _Key, run: AgentRun, keys: tuple[str, ...], *, is_new: bool) -> "Found":
        """Keep an agent until the turn ends, unless another thread was faster. ``keys``: for the next resume."""
        with self._lock:
            if self.is_over:
                return Found(run, self, is_new=is_new, is_alone=True)
            known = self.agents.setdefault(key, run)
            self._first.setdefault(key[0], (known, keys))
        if known is not run:
            run.end()
        return Found(known, self, is_new=is_new and known is run)

    def is_news(self, guard: Guard, name: str) -> bool:
        """Whether the answer to a tool call is shown to a guard for the first time in this turn."""
        with self._lock:
            seen = self._seen.setdefault(guard, set())
            known = len(seen)
            seen.add(name)
            return len(seen) > known

    def leave(self, agent: Scope) -> None:
        """Leave a graph or a tool that has ended. The agents that began a run keep it open."""
        with self._lock:
            first = {run for run, _ in self._first.values()}
            gone = [key for key, run in self.agents.items() if key[1] is agent and run not in first]
            runs = [self.agents.pop(key) for key in gone]
        for run in runs:
            run.end()

    def end(self, *, failed: bool = False) -> None:
        """End the turn with its root. A run in a thread may go on, with a resume or from a static breakpoint."""
        with self._lock:
            self.is_over = True
            agents, self.agents = list(self.agents.values()), {}
            first, self._first = dict(self._first), {}
        waits = self.waits or (not failed and any(run.is_unfinished for run in agents))
        began = {run for run, _ in first.values()}
        for run in agents:
            if run not in began:
                run.end()
        for run, keys in first.values():
            if keys:
                run.pause(keys, waits=waits and run.stopped is None)
            else:
                run.end()
        self.block.end()


class _Handler(BaseCallbackHandler):
    """Keeps the scopes of one root invocation, which LangChain hands on to all that runs in it.

    Names of runs tell apart what belongs to one root alone: a client of the app may choose that of a root.
    """

    run_inline = True  # else an async call would wait for a thread

    ignore_llm = ignore_chat_model = ignore_retriever = ignore_retry = ignore_custom_event = True

    def __init__(self) -> None:
        self.scopes: dict[UUID, Scope] = {}

    def on_chain_start(
        self,
        serialized: Any,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        scope = self._open(run_id, parent_run_id, str(kwargs.get("name") or ""), inputs)
        if scope.parent is None:
            return
        scope.agent = scope.parent.agent
        for tag in tags or ():
            if tag.startswith(_NODE_TAG):
                scope.parent.is_graph, scope.agent, scope.turn.has_steps = True, scope.parent, True

    def on_tool_start(
        self, serialized: Any, input_str: str, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        self._open(run_id, parent_run_id, "tool", "")

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._close(run_id, None)

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        if isinstance(error, GeneratorExit):  # a stream is dropped, perhaps by the collector
            FINALIZED.put(partial(self._close, run_id, error))
        else:
            self._close(run_id, error)

    on_tool_end, on_tool_error = on_chain_end, on_chain_error  # type: ignore[assignment]

    def _open(self, run_id: UUID, parent_run_id: UUID | None, name: str, inputs: object) -> Scope:
        # a parent may be a trace of another library's, so what is around this code counts then
        parent = (self.scopes.get(parent_run_id) if parent_run_id is not None else None) or scope_here()
        scope = self.scopes[run_id] = Scope(parent.turn if parent is not None else Turn(inputs), parent, name, inputs)
        return scope

    def _close(self, run_id: UUID, error: BaseException | None) -> None:
        scope = self.scopes.pop(run_id, None)
        if scope is None:
            return
        scope.has_ended = True
        if isinstance(error, GraphInterrupt):
            scope.turn.waits = True
        if scope.parent is None or scope.turn is not scope.parent.turn:
            scope.turn.end(failed=error is not None)
        elif scope.agent is scope or scope.is_graph:
            scope.turn.leave(scope)

    def __copy__(self) -> "_Handler":
        return self

    def __deepcopy__(self, memo: Any) -> "_Handler":
        return self

    def __reduce__(self) -> Any:
        return _Handler, ()


class _OneForEachRoot:
    """For LangChain, a variable that gives a new handler to each root. What runs inside of it has the root's."""

    get = _Handler


_lock: Final = threading.Lock()
_is_watching = False


def watch() -> None:
    """See every root invocation from now on. Safe to call again."""
    global _is_watching
    FINALIZED.ready()
    with _lock:
        if not _is_watching:
            _is_watching = True
            register_configure_hook(_OneForEachRoot(), inheritable=True, handle_class=_Handler)  # type: ignore[arg-type]
            surroundings.carry(_ScopeAround())  # type: ignore[arg-type]


def scope_here(manager: Any = None) -> Scope | None:
    """Return the scope that a run manager is part of, else the one around this code; None outside of everything."""
    around: Any = (var_child_runnable_config.get() or {}).get("callbacks")
    for one in (manager, around):
        parent: Any = getattr(one, "parent_run_id", None)
        for handler in one.handlers if parent is not None else ():
            if isinstance(handler, _Handler) and (scope := handler.scopes.get(parent)) is not None:
                return scope
    carried = _CARRIED.get()
    return carried if carried is not None and not carried.turn.block.ended else None


# In a thread that LangChain does not follow: the scope that has started it.
_CARRIED: Final[ContextVar[Scope | None]] = ContextVar("runguard_scope", default=None)


class _ScopeAround:
    """For threads, a variable whose value is the scope around the code that starts one.

    LangChain's own variable is not carried: streams and traces would show more than without a guard.
    """

    def get(self) -> Scope | None:
        return scope_here()

    def set(self, scope: Scope | None) -> Token[Scope | None]:
        return _CARRIED.set(scope)

    def reset(self, token: Token[Scope | None]) -> None:
        _CARRIED.reset(token)


# ---- The runs of one guard.


class Found(NamedTuple):
    """The agent that makes a call. ``with found:`` around the call ends its run, if nothing else will."""

    run: AgentRun
    turn: Turn | None
    is_new: bool = False  # its agent begins to work
    is_alone: bool = False  # nothing else will end it

    def leave(self) -> None:
        if self.is_alone:
            self.run.end()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is GeneratorExit:  # a coroutine is thrown away, perhaps by the collector
            FINALIZED.put(self.leave)
        else:
            self.leave()


@contextmanager
def _where_it_began(scope: Scope | None) -> Iterator[None]:
    """Restore what surrounds the agent of a scope, where this code has lost it, or is in a tool call of the agent.

    A web server reads a synchronous stream in a thread pool, each piece in a context of its own. A turn that goes on
    begins with a tool call: then another guard of the agent has let it in already.
    """
    around = SURROUNDINGS.get()
    if scope is not None:
        is_inside = around.place is not None and scope.turn.is_tool_of(scope.agent, around.place)
        place = scope.agent.place if is_inside else around.place
        around = around._replace(run=around.run or scope.turn.around, place=place)
    token = SURROUNDINGS.set(around)
    try:
        yield
    finally:
        with suppress(ValueError):  # a coroutine that is thrown away ends in another context
            SURROUNDINGS.reset(token)


class Runs:
    """The runs of one guard, by turn."""

    def __init__(self, guard: Guard, whom: Whom, condition: TerminationCondition | None, agent: str = "") -> None:
        """``agent``: the name of each that makes calls. Without one, agents have names of their own and are entered."""
        self.guard, self._whom, self._condition, self._agent = guard, whom, condition, agent
        # with the policy, it tells guards apart that share a store
        self._kind = f"{agent or 'middleware'} {guard.policy.digest}"
        watch()

    async def of(self, scope: Scope | None) -> Found:
        """Return the agent that makes the calls of a scope, with the run of its turn."""
        turn, key = self._turn(scope)
        if turn is None:
            whom = self._whom.of(self.guard, _runtime(), session="")
            run = AgentRun.start(self.guard, self._agent or _agent_name(), condition=self._condition, **whom)
            found = Found(run, None, is_new=True, is_alone=True)
        elif (known := turn.agents.get(key)) is not None:
            return Found(known, turn)
        else:
            with _where_it_began(scope):
                agent = self._agent or _agent_name()
                keys, more, goes_on = self._given(scope, turn, key, agent)
                if not goes_on:
                    run = AgentRun.start(self.guard, agent, **more)
                else:
                    run = await AgentRun.resume(self.guard, agent, keys[:1], otherwise=keys[1:], **more)
            found = turn.add(key, run, keys, is_new=not goes_on)
        if found.is_new and not self._agent and (trip := found.run.enter()) and self.guard.policy.on_stop == "raise":
            raise RunStoppedError.of(trip)
        return found

    def of_now(self, scope: Scope | None) -> Found:
        """``of`` for callers without an event loop."""
        turn, key = self._turn(scope)
        if turn is not None and (known := turn.agents.get(key)) is not None:
            return Found(known, turn)
        with _where_it_began(scope):
            waits = self.guard.shares_store and scope is not None and scope.outermost.is_resumed
            return drive(partial(self.of, scope), waits, Found.leave)

    def _turn(self, scope: Scope | None) -> tuple[Turn | None, _Key]:
        """Return the turn around this code, and the agent in it; None where each call is a run of its own."""
        block = SURROUNDINGS.get().run or (scope.turn.around if scope is not None else None)
        while block is not None and block.ended:
            block = block.outer
        if scope is not None:
            if scope.agent.turn.is_over and not scope.agent.has_ended:  # in the background, it has outlived its root
                scope.agent.turn = Turn()
            return scope.agent.turn, (self.guard, scope.agent, block)
        turn = block.kept.setdefault(_KEPT, Turn()) if block is not None else None
        return turn if isinstance(turn, Turn) else None, (self.guard, _worker(), block)

    def _given(
        self, scope: Scope | None, turn: Turn, key: _Key, agent: str
    ) -> tuple[tuple[str, ...], dict[str, Any], bool]:
        """Return the keys of a run that begins now, what it is given, and whether it goes on after a pause."""
        thread = str((var_child_runnable_config.get() or {}).get("configurable", {}).get("thread_id") or "")
        keys, first = self._keys(scope, thread), turn.first(self.guard)
        more = self._whom.of(self.guard, _runtime(), session=thread)
        more |= {"condition": self._condition, "within": turn.block if scope is not None else None}
        more["others"] = turn.others(key)
        if first is not None:
            return keys, {**more, "ending": first.ending}, False
        more |= asked_of(self.guard, agent, asked_in(turn.inputs), goes_on=bool(thread))
        goes_on = bool(keys) and scope is not None and scope.outermost.is_resumed
        return keys, more if goes_on else {**more, "keys": keys[:1]}, goes_on

    def _keys(self, scope: Scope | None, thread: str) -> tuple[str, ...]:
        """Under what the run is kept between the invocations of a turn: LangGraph resumes a thread of a graph.

        The name tells graphs apart that have one guard and threads of the same name. A caller may give each invocation
        another one (``run_name``), so the thread alone counts, too.
        """
        if scope is None or not thread or scope.agent.turn is not scope.outermost.turn:  # nothing resumes what is left
            return ()
        return tuple(f"langchain\0{self._kind}\0{name}\0{thread}" for name in (scope.outermost.name, ""))

    def bill(self) -> Spent | None:
        """Return what the run around this code has used so far; None where none has begun."""
        turn, _ = self._turn(scope_here())
        run = turn.first(self.guard) if turn is not None else None
        return run.spent if run is not None else None


def _agent_name() -> str:
    metadata = (var_child_runnable_config.get() or {}).get("metadata") or {}
    return str(metadata.get("lc_agent_name") or "agent")


def asked_in(inputs: object) -> object:
    """Return what the user asks in the input of a root: the newest message, or the input itself."""
    messages = inputs.get("messages") if isinstance(inputs, dict) else inputs
    newest = messages[-1] if isinstance(messages, list) and messages else messages
    if isinstance(newest, tuple) and len(newest) == 2:
        return newest[1]
    if isinstance(newest, dict):
        return newest.get("content")
    return getattr(newest, "content", newest if isinstance(newest, str) else None)


def _runtime() -> object:
    """LangGraph's ``Runtime``, for a function that names the user; None outside of graphs."""
    try:
        return get_runtime()
    except (RuntimeError, KeyError):
        return None


def _worker() -> object:
    """Return the task or thread of a loop that is written by hand: its model calls follow each other."""
    try:
        return asyncio.current_task() or threading.get_ident()
    except RuntimeError:  # no event loop
        return threading.get_ident()
