"""Models with a guard around them, and the SDK's default runner, in which turns begin and end.

The SDK calls it for every run. A run of agents without a guard goes on as before.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from agents import Agent, RunConfig, RunState
from agents.items import ModelResponse
from agents.models.interface import Model, ModelProvider
from agents.models.multi_provider import MultiProvider
from agents.run import AgentRunner, get_default_agent_runner, set_default_agent_runner
from agents.usage import Usage as ReportedUsage
from openai.types.responses import (
    ResponseCompletedEvent,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
    ResponseOutputMessage,
)

from runguard.calls.model_calls import Permission
from runguard.calls.run import AgentRun, last_words
from runguard.calls.tool_calls import current_place
from runguard.core.decision import Trip
from runguard.openai_agents.turns import TURN, Asked, Turn, cut_off, message, pending_of, settle_answer, sharing, spoken
from runguard.termination.conditions import KEY as _ENDED
from runguard.termination.conditions import Ended

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
            given._current_agent = guarded_by((*around, *own), current)
    return guarded_by(around, agent)


def guarded_by(guards: Any, agent: Any) -> Any:
    """Return the agent, guarded by all of these. The first one is the outermost."""
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


# ---- Models and model providers with a guard around them. They stay instances of their own classes.


def guarded_model(model: Model, given: str | None = None, guards: "Sequence[AgentGuard]" = ()) -> "GuardedModel":
    """Return ``model`` with a guard around it: those of the agent at work, and ``guards``.

    ``given``: the name that an agent or ``RunConfig`` has for it. It names the model for its price.
    """
    if isinstance(model, GuardedModel):
        found = (*guards, *(guard for guard in model.runguard_own if guard not in guards))
        if found == model.runguard_own:
            return model
        given, guards, model = model.runguard_given, found, model.runguard_inner
    return sharing(GuardedModel, model, runguard_inner=model, runguard_given=given, runguard_own=tuple(guards))


class GuardedModel(Model):
    """Asks the guard before each call of the inner model, and reports what it used."""

    __slots__ = ()
    runguard_inner: Model
    runguard_given: str | None
    runguard_own: "tuple[AgentGuard, ...]"

    def __deepcopy__(self, memo: Any) -> "GuardedModel":
        return guarded_model(copy.deepcopy(self.runguard_inner, memo), self.runguard_given, self.runguard_own)

    async def get_response(
        self,
        system_instructions: str | None,
        input: Any,  # noqa: A002 - the SDK's name
        model_settings: Any,
        tools: Any,
        output_schema: Any,
        handoffs: Any,
        tracing: Any,
        **kwargs: Any,
    ) -> ModelResponse:
        inner = self.runguard_inner.get_response
        given = (system_instructions, input, model_settings, tools, output_schema, handoffs, tracing)
        run, alone = await self._run(input)
        if run is None:
            return await inner(*given, **kwargs)
        asked = Asked(name_of(self), given, kwargs)
        try:
            permission = await run.ask(partial(asked.request, run.prompts))
            if not isinstance(permission, Permission):
                return ModelResponse([_last_words(run, permission, asked)], ReportedUsage(), None)
            sent = permission.changed(lambda one, request: request.changed(one), asked)
            try:
                response = await permission.during(inner(*sent.given, **kwargs))
            except BaseException as error:
                permission.fail(error, cut_off(error, sent.settings))
                if (trip := permission.interrupted) is not None:
                    return ModelResponse([_last_words(run, trip, asked)], ReportedUsage(), None)
                raise
            permission.read(lambda one, answer: settle_answer(one, answer, asked), response)
            return response
        finally:
            if alone is not None:
                alone.end()

    async def stream_response(
        self,
        system_instructions: str | None,
        input: Any,  # noqa: A002 - the SDK's name
        model_settings: Any,
        tools: Any,
        output_schema: Any,
        handoffs: Any,
        tracing: Any,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        inner: Any = self.runguard_inner.stream_response
        given = (system_instructions, input, model_settings, tools, output_schema, handoffs, tracing)
        run, alone = await self._run(input)
        if run is None:
            async with aclosing(inner(*given, **kwargs)) as events:
                async for event in events:
                    yield event
            return
        asked = Asked(name_of(self), given, kwargs)
        try:
            permission = await run.ask(partial(asked.request, run.prompts))
            if not isinstance(permission, Permission):
                for event in spoken(_last_words(run, permission, asked), asked.model):
                    yield event
                return
            sent = permission.changed(lambda one, request: request.changed(one), asked)
            streamed, final, cut = 0, None, None
            try:
                async with aclosing(permission.pieces(inner(*sent.given, **kwargs))) as events:
                    async for event in events:
                        if isinstance(event, ResponseCompletedEvent):
                            final = event.response
                        elif isinstance(event, ResponseIncompleteEvent | ResponseFailedEvent):  # the SDK will raise
                            final = event.response if event.response.usage is not None else None
                            cut = permission.last_after  # the run ends with its stop
                            if final is None:
                                permission.fail(None, streamed, streaming=True)
                        elif isinstance(delta := getattr(event, "delta", None), str):
                            streamed += len(delta.encode())
                        if final is not None:
                            permission.read(lambda one, answer: settle_answer(one, answer, asked), final)
                        if cut is not None:
                            break
                        yield event
                trip = cut or (permission.interrupted if final is None else None)
                permission.fail(None, streamed, streaming=True)  # the stream ended without its last event
            except BaseException as error:
                permission.fail(error, streamed, streaming=True)
                if (trip := permission.interrupted) is None:
                    raise
            if trip is not None:
                for event in spoken(_last_words(run, trip, asked), asked.model):
                    yield event
        finally:
            if alone is not None:
                alone.end()

    async def _run(self, items: Any) -> tuple[AgentRun | None, Turn | None]:
        """Return the run that asks, and the turn that consists of this call alone. None: no guard is around."""
        turn, own = TURN.get(), self.runguard_own
        if turn is None or not turn.is_here:  # a call by your own code
            if not own:
                return None, None
            turn = Turn(None)
            return await turn.run_of(own, "model"), turn
        guards = turn.agent.runguard_all if turn.agent is not None else ()
        guards = (*guards, *(guard for guard in own if guard not in guards))
        if not guards:
            return None, None
        turn.run = run = await turn.run_of(guards, turn.agent.name if turn.agent is not None else "model")
        run.guard.faults.attempt("adapter", turn.see_answers, run, items)
        return run, None


def name_of(model: str | Model | None) -> str:
    """Return the name of a model, for its price."""
    if isinstance(model, GuardedModel):
        return model.runguard_given or name_of(model.runguard_inner)
    name = model if isinstance(model, str) else getattr(model, "model", "")
    return name if isinstance(name, str) else str(name)


def _last_words(run: AgentRun, end: Trip | Ended, asked: Asked) -> ResponseOutputMessage:
    words = last_words(run.guard, end, takes_text=not asked.is_structured)
    return message(words, end.id if isinstance(end, Trip) else _ENDED)


class GuardedProvider(ModelProvider):
    """Finds the models that the inner provider finds. Those of a guarded agent are guarded."""

    __slots__ = ()
    runguard_inner: ModelProvider

    def get_model(self, model_name: str | None) -> Model:
        """Return the model of this name, for the agent at work."""
        model, turn = self.runguard_inner.get_model(model_name), TURN.get()
        if turn is None or turn.agent is None:
            return model
        key = (id(model), model_name)
        if key not in turn.models:
            turn.models[key] = guarded_model(model, model_name)
        found: Model = turn.models[key]
        return found


def guarded_provider(provider: ModelProvider) -> ModelProvider:
    """Return ``provider`` with a guard around the models that it finds."""
    if isinstance(provider, GuardedProvider) or not isinstance(provider, ModelProvider):
        return provider
    return sharing(GuardedProvider, provider, runguard_inner=provider)
