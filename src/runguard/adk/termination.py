"""Termination conditions on ADK: for a run of a Runner, or for one agent inside of it."""

from collections.abc import AsyncGenerator
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from google.adk.agents import BaseAgent, LlmAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event
from google.adk.plugins.base_plugin import BasePlugin

from runguard.adk import patching
from runguard.adk.context import HERE
from runguard.adk.stream import note_fault
from runguard.adk.termination_watch import Watched, until
from runguard.core.errors import PolicyError
from runguard.termination.conditions import KEYWORD, LOOP_KEYWORD, TerminationCondition, checked

if TYPE_CHECKING:
    from google.adk.agents import LoopAgent

_OWN: Final = "__runguard_termination__"
_RUN: Final = "_run_async_impl"
_CONDITION: Final = "__runguard_condition__"
SCOPES: Final = ("loop", "run")


class TerminationPlugin(BasePlugin):
    """Ends the runs of its App or Runner when a condition fires:

    ``App(..., plugins=[TerminationPlugin(TextMentionTermination("DONE"))])``.
    """

    def __init__(self, condition: TerminationCondition, *, name: str = "runguard_termination") -> None:
        super().__init__(name=name)
        self.condition = checked(condition)
        patching.watch(self)  # the wrapped Runner sees every event and can end any topology


def terminate(agent: Any, condition: TerminationCondition, *, scope: str = "loop") -> Any:
    """Let a condition end this agent, and nothing around it. Returns the agent: a LoopAgent, any other agent, or a
    Runner's Workflow.

    ``scope="run"`` ends the whole run with it.
    """
    from google.adk.workflow import Workflow  # loads ADK's web server, which most programs do not need

    checked(condition)
    if scope not in SCOPES:
        raise PolicyError(f"scope = {scope!r}: 'loop' ends the agent alone, 'run' the whole run")
    if not isinstance(agent, BaseAgent | Workflow):
        raise PolicyError(f"terminate({agent!r}, …): give an agent or a Workflow of google-adk")
    if isinstance(agent, LlmAgent | Workflow):  # at the root, agents that they hand over to are not inside of them
        agent.__dict__[_OWN] = condition, scope
    if isinstance(agent, BaseAgent):
        agent.__dict__[_RUN] = _run_until(type(agent)._run_async_impl, condition, scope)
    patching.watch_conditions(end_runs=scope == "run")
    return agent


def condition_of(root: Any) -> tuple[TerminationCondition | None, str]:
    """The condition of a Runner's root agent that applies to the whole run, and its scope."""
    found: tuple[TerminationCondition | None, str] = getattr(root, "__dict__", {}).get(_OWN, (None, "loop"))
    return found


def _run_until(original: Any, condition: TerminationCondition, scope: str) -> Any:
    """The agent's run method, ended when its condition fires.

    The agent comes from the context: a clone shares this function.
    """

    @wraps(original)
    def run_until(ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        events: AsyncGenerator[Event, None] = original(ctx.agent, ctx)
        if any(one.of_root is condition and one.stream is HERE.get().stream for one in HERE.get().conditions):
            return events  # the wrapped Runner applies it
        try:
            watched, name = Watched(condition), getattr(ctx.agent, "name", "")
        except Exception as error:
            note_fault(error, HERE.get().stream)
            return events

        async def finish(*_: Any) -> list[Event]:
            ends_run = False
            try:
                ends_run = scope == "run" and watched.end_run()
            except Exception as error:
                note_fault(error, HERE.get().stream)
            return watched.last_events(name, ctx.invocation_id, ctx.branch, escalate=scope == "run" and not ends_run)

        return until(events, watched, finish)

    setattr(run_until, _CONDITION, condition)
    return run_until


# ---- under install(): a keyword of ADK ------------------------------------------------------------------------------


def _get_condition(loop: "LoopAgent") -> TerminationCondition | None:
    return getattr(loop.__dict__.get(_RUN), _CONDITION, None)


def _set_condition(loop: "LoopAgent", condition: TerminationCondition | None) -> None:
    if condition is not None:
        terminate(loop, condition)
    elif _get_condition(loop) is not None:
        del loop.__dict__[_RUN]


_PROPERTY: Final = property(
    _get_condition, _set_condition, doc="The condition that ends this loop, or None. Added by runguard.install()."
)


class LoopTermination:
    """``LoopAgent.termination_condition`` as a keyword and an attribute, for as long as a guard is installed."""

    def put_on(self) -> None:
        from google.adk.agents import LoopAgent

        if KEYWORD in LoopAgent.model_fields:
            return  # this ADK has it
        LOOP_KEYWORD.put_on()
        LOOP_KEYWORD.accept = terminate
        setattr(LoopAgent, KEYWORD, _PROPERTY)

    def take_off(self) -> None:
        from google.adk.agents import LoopAgent

        LOOP_KEYWORD.take_off()
        if LoopAgent.__dict__.get(KEYWORD) is _PROPERTY:
            delattr(LoopAgent, KEYWORD)


LOOP_TERMINATION: Final = LoopTermination()
