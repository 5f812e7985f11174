"""One call of ``Runner.run``: which guarded agent is at work in it, and the runs of its guards.

``runner`` begins and ends a turn. ``agents``, ``models`` and ``tools`` ask for its run.
"""

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from agents import Agent, RunContextWrapper
from agents.exceptions import ModelBehaviorError

from runguard.calls.run import AgentRun, Spent, asked_of
from runguard.calls.surroundings import SURROUNDINGS
from runguard.calls.tool_calls import ToolUse
from runguard.core.decision import Trip
from runguard.core.events import Outcome
from runguard.openai_agents.answers import answer_in, call_in
from runguard.providers.usage import fields

if TYPE_CHECKING:
    from runguard.openai_agents.agents import AgentGuard, GuardedAgent

TURN: Final[ContextVar["Turn | None"]] = ContextVar("runguard_openai_turn", default=None)


class Turn:
    """One call of ``Runner.run``. Agents in it work one after the other."""

    def __init__(
        self, context: Any, pending: Sequence[ToolUse] = (), asked: object = None, *, goes_on: bool = False
    ) -> None:
        """``pending``: the calls that the turn waited for, where it goes on after an approval.

        ``asked``: what the user asks, ``goes_on`` in a conversation.
        """
        self._asked, self._goes_on = asked, goes_on
        self.context = context if isinstance(context, RunContextWrapper) else RunContextWrapper(context)
        self.starting: Agent[Any] | None = None  # that the SDK begins with
        self.agent: GuardedAgent[Any] | None = None  # at work now
        self.run: AgentRun | None = None  # that the newest model call belongs to
        self.errors: dict[str, BaseException] = {}  # by tool call, until its answer is known
        self.models: dict[tuple[int, Any], Any] = {}  # guarded ones, as the SDK remembers all models of a run
        # by identity: the tool, what it held, and the guarded copy
        self.tools: dict[int, tuple[Any, tuple[Any, ...], Any]] = {}
        self._pending = {use.id: use for use in pending}
        self._keys = tuple(self._pending)
        self._place = SURROUNDINGS.get().place
        self._runs: dict[tuple[AgentGuard, ...], AgentRun] = {}
        self._lock = asyncio.Lock()
        # the tools of the agent at work, each with the arguments that its function receives; None: any
        self.offered: dict[str, frozenset[str] | None] = {}
        self.bill = Bill()

    @property
    def is_here(self) -> bool:
        """Whether the code around is the turn itself, and not one of its tools."""
        return SURROUNDINGS.get().place is self._place

    async def work(self, agent: "GuardedAgent[Any]", context: Any) -> None:
        """``agent`` makes the next model call, or has called a tool: begin its run, or hand the run over to it."""
        before, self.agent, self.context = self.agent, agent, context
        is_new = before is None or before.name != agent.name
        if before is not None and is_new and self.run is not None:
            self.run.hand_off(agent.name)
        self.run = run = await self.run_of(agent.runguard_all, agent.name)
        if is_new and not (self._keys and before is None):
            run.enter()

    async def run_of(self, guards: "Sequence[AgentGuard]", agent: str) -> AgentRun:
        """Return the run that all these guards watch, the outermost first. It begins with its first call."""
        run: AgentRun | None = None
        if not self._keys:
            run = self._begun(guards, agent)
        else:
            async with self._lock:
                for number, guard in enumerate(guards, 1):
                    known = self._runs.get(tuple(guards[:number]))
                    if known is None:
                        known = await AgentRun.resume(guard.guard, agent, self._keys, **self._whom(guard, run))
                        self._add(guards[:number], known)
                    run = known
        assert run is not None, "an agent or a model without a guard asks for no run"
        run.agent = run.tools.agent = agent
        return run

    def _begun(self, guards: "Sequence[AgentGuard]", agent: str) -> AgentRun | None:
        run: AgentRun | None = None
        for number, guard in enumerate(guards, 1):
            known = self._runs.get(tuple(guards[:number]))
            if known is None:
                asked = asked_of(guard.guard, agent, self._asked, goes_on=self._goes_on)
                known = AgentRun.start(guard.guard, agent, **asked, **self._whom(guard, run))
                self._add(guards[:number], known)
            run = known
        return run

    def _whom(self, guard: "AgentGuard", around: AgentRun | None) -> dict[str, Any]:
        return {**guard.whom.of(guard.guard, self.context), "condition": guard.condition, "around": around}

    def _add(self, guards: "Sequence[AgentGuard]", run: AgentRun) -> None:
        self._runs[tuple(guards)] = run
        self.bill.add(guards[-1], run)

    def around(self) -> AgentRun | None:
        """Return the run of the newest model call, or of the first one to come: an agent begins before it."""
        guards = getattr(self.starting, "runguard_all", ())
        if self.run is None and self.starting is not None and guards and not self._keys:
            return self._begun(guards, self.starting.name)
        return self.run

    def see_answers(self, run: AgentRun, items: Any) -> None:
        """Report answers that no guarded tool has given: of unknown and of unguarded tools, and of refusals."""
        waiting = run.tools.waiting
        known, pending, self._pending = run.tools.asked, self._pending, {}
        waiting |= {name: (use, False) for name, use in pending.items() if name not in known}
        if not waiting or isinstance(items, str):
            return
        for item in reversed(items):
            if not waiting:
                return
            found = answer_in(item)
            if found is None or found[0] not in waiting:
                continue
            (name, value, outcome), is_function = found, fields(item).get("type") == "function_call_output"
            use, is_checked = waiting.pop(name)
            if is_checked:
                run.tools.answered(use, value)
                continue
            if self.agent is not None and use.tool not in self.offered and is_function:
                outcome = Outcome.UNKNOWN_TOOL
            # A guarded function that was executed was checked. Other tools have no place for a check.
            executed = self.context.is_tool_approved(use.tool, name) is not False
            run.tools.saw(use, value, outcome, executed=executed and (self.agent is None or not is_function))

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        """End the call of ``Runner.run``, which returned or failed. Keep a turn that waits for a human."""
        pending = [name for item in getattr(result, "interruptions", None) or () if (name := call_id_of(item))]
        for run in reversed(self._runs.values()):
            run.guard.faults.attempt("adapter", self._settle_tools, run, pending, error)
            if pending:
                run.pause(pending)
            elif run.is_unfinished and getattr(result, "final_output", None) is None:
                run.pause(list(run.tools.asked), waits=False)  # it can go on from its state
            else:
                run.end()
        self.bill.close()

    def _settle_tools(self, run: AgentRun, pending: list[str], error: BaseException | None) -> None:
        open_calls = [(use, name) for name, (use, is_checked) in run.tools.waiting.items() if is_checked]
        for use, name in open_calls:
            if name in pending:
                run.tools.deferred(use)
            elif (found := self.errors.get(name)) is not None:
                run.tools.raised(use, found)
            elif isinstance(error, Exception) and len(open_calls) == 1:
                run.tools.raised(use, error.__cause__ or error)


class Bill:
    """What a turn has cost, by guard, and what has stopped it. Results of the SDK carry it, and can be copied."""

    def __init__(self, sums: "dict[int, Spent] | None" = None, trip: Trip | None = None) -> None:
        self._sums, self._trip = sums or {}, trip
        self._runs: dict[int, AgentRun] = {}

    def __deepcopy__(self, memo: Any) -> "Bill":
        return Bill(self._now(), self.trip)

    def __reduce__(self) -> Any:
        return Bill, (self._now(), self.trip)

    @property
    def trip(self) -> Trip | None:
        """What has stopped the turn."""
        stops = (stop for run in self._runs.values() if (stop := run.stopped) is not None)
        return next(stops, self._trip)

    def add(self, guard: "AgentGuard", run: AgentRun) -> None:
        self._runs.setdefault(id(guard), run)

    def _now(self) -> dict[int, Spent]:
        return self._sums | {guard: run.spent for guard, run in self._runs.items()}

    def of(self, guard: "AgentGuard") -> Spent | None:
        return self._now().get(id(guard))

    def close(self) -> None:
        """Keep the figures and the stop alone."""
        self._sums, self._trip, self._runs = self._now(), self.trip, {}


def call_id_of(item: Any) -> str:
    """Return the id of the tool call that an approval is for."""
    found = fields(getattr(item, "raw_item", item))
    return str(found.get("call_id") or found.get("id") or "")


def pending_of(state: Any) -> list[ToolUse]:
    """Return the tool calls that a run waits for: those to be approved, or those of its newest response."""
    waiting = [getattr(item, "raw_item", item) for item in state.get_interruptions()]
    if found := [call_in(item) or ToolUse(call_id_of(item), "") for item in waiting if call_id_of(item)]:
        return found
    responses = getattr(state, "_model_responses", None) or ()
    output = responses[-1].output if responses else ()
    return [use for item in output if (use := call_in(item)) is not None and use.id]


def as_failure(error: BaseException, output: object) -> BaseException | None:
    """Return how a tool has failed; None: the model gave wrong arguments, so that the tool did not fail."""
    if isinstance(error, ModelBehaviorError):
        return None
    return error if isinstance(error, Exception) else TimeoutError(str(output))
