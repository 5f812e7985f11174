"""A model of the OpenAI Agents SDK with a guard around it."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from agents.agent_output import AgentOutputSchemaBase
from agents.items import ModelResponse
from agents.model_settings import ModelSettings
from agents.models.interface import Model
from agents.usage import Usage as ReportedUsage
from openai.types.responses import Response, ResponseCompletedEvent, ResponseOutputMessage, ResponseOutputText

from runguard.calls.model_calls import ModelRequest, Permission, ToolUse
from runguard.calls.run import AgentRun, error_of
from runguard.core.decision import Trip
from runguard.engine.guard import Guard
from runguard.openai_agents.runs import Runs
from runguard.pricing.rates import Usage
from runguard.providers.messages import arguments, is_search
from runguard.providers.usage import fields, size_of
from runguard.termination.conditions import KEY as _ENDED
from runguard.termination.conditions import Ended


class GuardedModel(Model):
    """Asks the guard before each call of the inner model, and reports what it used."""

    def __init__(self, inner: Model, given: str | Model | None, guard: Guard, runs: Runs) -> None:
        """``given``: what the agent or ``RunConfig`` has as its model. It names the model for its price."""
        self._inner, self.given, self._guard, self._runs = inner, given, guard, runs
        self.name = given if isinstance(given, str) else name_of(inner)
        self._instead: GuardedModel | None = None

    def is_of(self, runs: Runs) -> bool:
        """Whether these runs are checked here."""
        return self._runs is runs

    def guard_instead(self, chosen: Model, run_config: Any) -> Model:
        """``chosen``, which ``RunConfig`` has put in the place of this model, with the same guard around it.

        The newest one is kept: the SDK remembers all models of a run, and asks for the model before each call.
        """
        if isinstance(chosen, GuardedModel) and chosen.is_of(self._runs):
            return chosen
        given = run_config.model if isinstance(run_config.model, str) else chosen
        made = self._instead
        if made is None or made._inner is not chosen or made.given != given:
            made = self._instead = GuardedModel(chosen, given, self._guard, self._runs)
        return made

    async def close(self) -> None:
        await self._inner.close()

    def get_retry_advice(self, request: Any) -> Any:
        return self._inner.get_retry_advice(request)

    async def _cleanup_on_run_end(self, owner: object) -> None:
        await self._inner._cleanup_on_run_end(owner)

    async def get_response(
        self,
        system_instructions: str | None,
        input: Any,  # noqa: A002 - the SDK's name
        model_settings: ModelSettings,
        tools: Any,
        output_schema: AgentOutputSchemaBase | None,
        handoffs: Any,
        tracing: Any,
        **kwargs: Any,
    ) -> ModelResponse:
        run, is_alone = self._run(input)
        try:
            permission = await run.ask(lambda: self._asked(system_instructions, input, model_settings, tools, handoffs))
            if not isinstance(permission, Permission):
                return ModelResponse([self._last_words(permission, output_schema)], ReportedUsage(), None)
            items, settings = permission.changed(_changed, (input, model_settings))
            if permission.last_after is not None:
                tools, handoffs = [], []
            try:
                response = await permission.during(
                    self._inner.get_response(
                        system_instructions, items, settings, tools, output_schema, handoffs, tracing, **kwargs
                    )
                )
            except BaseException as error:
                permission.fail(error)
                if (trip := permission.interrupted) is not None:
                    return ModelResponse([self._last_words(trip, output_schema)], ReportedUsage(), None)
                raise
            permission.read(lambda one, answer: settle_answer(one, answer, handoffs), response)
            return response
        finally:
            if is_alone:
                run.end()

    async def stream_response(
        self,
        system_instructions: str | None,
        input: Any,  # noqa: A002 - the SDK's name
        model_settings: ModelSettings,
        tools: Any,
        output_schema: AgentOutputSchemaBase | None,
        handoffs: Any,
        tracing: Any,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        run, is_alone = self._run(input)
        try:
            permission = await run.ask(lambda: self._asked(system_instructions, input, model_settings, tools, handoffs))
            if not isinstance(permission, Permission):
                yield _completed(self._last_words(permission, output_schema), self.name)
                return
            items, settings = permission.changed(_changed, (input, model_settings))
            if permission.last_after is not None:
                tools, handoffs = [], []
            streamed, final = 0, None
            try:
                stream: Any = self._inner.stream_response(
                    system_instructions, items, settings, tools, output_schema, handoffs, tracing, **kwargs
                )
                async with aclosing(permission.pieces(stream)) as events:
                    async for event in events:
                        if isinstance(event, ResponseCompletedEvent):
                            final = event.response
                        elif isinstance(delta := getattr(event, "delta", None), str):
                            streamed += len(delta.encode())
                        if final is not None:
                            permission.read(lambda one, answer: settle_answer(one, answer, handoffs), final)
                        yield event
                if final is None and (trip := permission.interrupted) is not None:
                    permission.fail(None, streamed, streaming=True)
                    yield _completed(self._last_words(trip, output_schema), self.name)
                    return
            except BaseException as error:
                permission.fail(error, streamed, streaming=True)
                if (trip := permission.interrupted) is None:
                    raise
                yield _completed(self._last_words(trip, output_schema), self.name)
                return
            permission.fail(None, streamed, streaming=True)  # the stream ended without its last event
        finally:
            if is_alone:
                run.end()

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _run(self, items: Any) -> tuple[AgentRun, bool]:
        """The run that asks, and whether it consists of this call alone."""
        run = self._runs.asking(items)
        return (run, False) if run is not None else (self._runs.alone(), True)

    def _asked(self, instructions: Any, items: Any, settings: ModelSettings, tools: Any, handoffs: Any) -> ModelRequest:
        declared = [[getattr(tool, "name", ""), getattr(tool, "description", ""), _schema(tool)] for tool in tools]
        declared += [[one.tool_name, one.tool_description, one.input_json_schema] for one in handoffs]
        return ModelRequest.of(self.name, [instructions, items, declared], settings.max_tokens)

    def _last_words(self, end: Trip | Ended, schema: AgentOutputSchemaBase | None) -> ResponseOutputMessage:
        """The message that ends the run. With structured output no text can end it, so the typed error is raised."""
        is_trip = isinstance(end, Trip)
        if (is_trip and self._guard.policy.on_stop == "raise") or (schema is not None and not schema.is_plain_text()):
            raise error_of(end)
        words, name = (self._guard.stop_text(end), end.id) if isinstance(end, Trip) else (end.reason, _ENDED)
        text = ResponseOutputText(type="output_text", text=words, annotations=[])
        return ResponseOutputMessage(
            id=f"runguard_{name}", type="message", role="assistant", status="completed", content=[text]
        )


def name_of(model: str | Model | None) -> str:
    """The name of a model, for its price."""
    if isinstance(model, GuardedModel):
        return model.name
    name = model if isinstance(model, str) else getattr(model, "model", "")
    return name if isinstance(name, str) else str(name)


def settle_answer(permission: Permission, response: Any, handoffs: Any) -> None:
    """Report the usage, the tool calls and the text of an answer."""
    output = response.output
    names = {one.tool_name for one in handoffs}
    calls = [item for item in output if getattr(item, "type", "") == "function_call" and item.name not in names]
    permission.settle(
        _usage_of(response.usage, response.output),
        calls=[ToolUse(call.call_id, call.name, arguments(call.arguments)) for call in calls],
        text="" if len(calls) < len(output) - len(_texts(output)) else "".join(_texts(output)),
        size=size_of(output),
    )


def _schema(tool: Any) -> Any:
    return getattr(tool, "params_json_schema", None)


def _texts(output: list[Any]) -> list[str]:
    return [
        part.text
        for item in output
        if isinstance(item, ResponseOutputMessage)
        for part in item.content
        if isinstance(part, ResponseOutputText)
    ]


def _changed(permission: Permission, request: tuple[Any, ModelSettings]) -> tuple[Any, ModelSettings]:
    """The request with a notice for the model, and with the output limit that the budget can pay."""
    items, settings = request
    if permission.notice:
        items = [*([{"role": "user", "content": items}] if isinstance(items, str) else items)]
        items.append({"role": "user", "content": permission.notice})
    if (limit := permission.max_output_tokens) is not None:
        settings = replace(settings, max_tokens=limit)
    if permission.last_after is not None:
        settings = replace(settings, tool_choice=None, parallel_tool_calls=None)
    return items, settings


def _usage_of(usage: Any, output: Any) -> Usage | None:
    if usage is None or not (usage.input_tokens or usage.output_tokens):
        return None
    inputs, outputs = usage.input_tokens_details, usage.output_tokens_details
    return Usage(
        input=usage.input_tokens,
        output=usage.output_tokens,
        cached=getattr(inputs, "cached_tokens", 0) or 0,
        cache_write=getattr(inputs, "cache_write_tokens", 0) or 0,
        thinking=getattr(outputs, "reasoning_tokens", 0) or 0,
        searches=sum(is_search(fields(item).get) for item in output),
    )


def _completed(message: ResponseOutputMessage, model: str) -> ResponseCompletedEvent:
    response = Response(
        id=message.id,
        created_at=0.0,
        model=model or "runguard",
        object="response",
        output=[message],
        parallel_tool_calls=False,
        tool_choice="none",
        tools=[],
    )
    return ResponseCompletedEvent(response=response, sequence_number=0, type="response.completed")
