"""What ``Runner.run``, ``run_sync`` and ``run_streamed`` do: the SDK's default runner, in which turns begin and end.

The SDK calls it for every run. A run of agents without a guard goes on as before.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from agents import Agent, RunConfig, RunState
from agents.models.interface import Model
from agents.models.multi_provider import MultiProvider
from agents.run import AgentRunner, get_default_agent_runner, set_default_agent_runner

from runguard.calls.tool_calls import current_place
from runguard.openai_agents.models import guarded_model, guarded_provider
from runguard.openai_agents.sharing import sharing
from runguard.openai_agents.turns import TURN, Turn, pending_of

if TYPE_CHECKING:
    from runguard.openai_agents.agents import AgentGuard

GUARDS: Final[WeakValueDictionary[int, "AgentGuard"]] = WeakValueDictionary()  # by the identity of their ``Guard``


def install() -> None:
    """Let the SDK's default runner begin and end turns. Safe to call again."""
    runner = get_default_agent_runner()
    if not isinstance(runner, GuardedRunner):
        set_default_agent_runner(sharing(GuardedRunner, runner))


class GuardedRunner(AgentRunner):
    """The default runner of before, with a turn around each run."""

    __slots__ = ()

    async def run(self, starting_agent: Any, input: Any, **kwargs: Any) -> Any:  # noqa: A002 - the SDK's name
        if not GUARDS:
            return await super().run(starting_agent, input, **kwargs)
        with _around(starting_agent), _as(_turn(input, kwargs)) as turn:
            agent = turn.starting = _guarded(starting_agent, input)
            kwargs["run_config"], own = _config(kwargs.get("run_config"))
            try:
                result = await super().run(agent, input, **kwargs)
            except BaseException as error:
                turn.end(error=error)
                raise
            finally:
                if own is not None:
                    await _close(own)
            _finish(turn, result)
            return result

    def run_streamed(self, starting_agent: Any, input: Any, **kwargs: Any) -> Any:  # noqa: A002 - the SDK's name
        if not GUARDS:
            return super().run_streamed(starting_agent, input, **kwargs)
        with _around(starting_agent), _as(_turn(input, kwargs)) as turn:
            agent = turn.starting = _guarded(starting_agent, input)
            kwargs["run_config"], own = _config(kwargs.get("run_config"))
            result = super().run_streamed(agent, input, **kwargs)
        vars(result)["runguard"] = turn.bill
        task: Any = result.run_loop_task
        task.add_done_callback(partial(_streamed, turn, result, own))
        return result


_CONVERSATIONS: Final = ("session", "previous_response_id", "conversation_id")


def _turn(given: Any, kwargs: dict[str, Any]) -> Turn:
    context = kwargs.get("context")
    if not isinstance(given, RunState):
        items = given if isinstance(given, list) else []
        goes_on = len(items) > 1 or any(kwargs.get(name) is not None for name in _CONVERSATIONS)
        return Turn(context, asked=items[-1:] if items else given, goes_on=goes_on)
    return Turn(getattr(given, "_context", None) if context is None else context, pending_of(given))


@contextmanager
def _as(turn: Turn) -> Iterator[Turn]:
    token = TURN.set(turn)
    try:
        yield turn
    finally:
        with suppress(ValueError):  # a coroutine that is thrown away ends in another context
            TURN.reset(token)


def _around(agent: Any) -> Any:
    """Return a block that makes this run a part of the turn around it, where no tool call does that."""
    outer = TURN.get()
    run = outer.around() if outer is not None and outer.is_here else None
    if run is None:
        return nullcontext()
    return run.tools.around(str(getattr(agent, "name", "")))


def _guarded(agent: Any, given: Any) -> Any:
    """Return the agent with the guards of the tool call around it."""
    around = [guard for layer in current_place().layers if (guard := GUARDS.get(id(layer.guard))) is not None]
    if isinstance(given, RunState):
        own, current = getattr(agent, "runguard_all", ()), getattr(given, "_current_agent", None)
        # A state that was stored may name an agent without its guard. Approvals belong to an agent, so others stay.
        if isinstance(current, Agent) and not hasattr(current, "runguard_all"):
            given._current_agent = _by((*around, *own), current)
    return _by(around, agent)


def _by(guards: Any, agent: Any) -> Any:
    if isinstance(agent, Agent):
        for guard in reversed(guards):
            agent = guard.guarded(agent)
    return agent


def _config(given: Any) -> tuple[Any, Any]:
    """Return the run's configuration with guarded models, and a provider that is to be closed with the run."""
    own = None
    if given is None:
        given = RunConfig()
        own = given.model_provider
    if isinstance(given, dict):
        found = dict(given)
        if "model_provider" not in found:
            own = found["model_provider"] = MultiProvider()
        found["model_provider"] = guarded_provider(found["model_provider"])
        if isinstance(found.get("model"), Model):
            found["model"] = guarded_model(found["model"])
        return found, own
    model = guarded_model(given.model) if isinstance(given.model, Model) else given.model
    return replace(given, model=model, model_provider=guarded_provider(given.model_provider)), own


async def _close(provider: Any) -> None:
    """Close what the SDK would have created for the run and closed after it."""
    if (close := getattr(provider, "aclose", None)) is not None:
        await asyncio.shield(_quietly(close))


async def _quietly(close: Any) -> None:
    try:
        await close()
    except Exception:  # as the SDK does
        return


def _finish(turn: Turn, result: Any) -> None:
    if hasattr(result, "__dict__"):
        vars(result)["runguard"] = turn.bill
    turn.end(result)


_closing: Final[set["asyncio.Task[None]"]] = set()  # the loop itself keeps no reference


def _streamed(turn: Turn, result: Any, own: Any, task: "asyncio.Task[Any]") -> None:
    error = None if task.cancelled() else task.exception()
    turn.end(result, error)
    if own is not None and not task.get_loop().is_closed():
        closing = task.get_loop().create_task(_close(own))
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)
