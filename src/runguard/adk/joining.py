"""An ADK Runner inside a tool of an agent of another framework: its model calls belong to the run of that agent.

Every guard of another framework around the call is asked first, and pays. ADK's own guard judges the call as always.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from google.adk.models.base_llm import BaseLlm
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard.adk.call_accounts import call_off
from runguard.adk.context import ANNOUNCED, HERE
from runguard.adk.estimate import project
from runguard.adk.patching import IN_USE
from runguard.adk.stop_events import stop_response
from runguard.adk.unannounced_calls import announced_accounts
from runguard.calls.model_calls import ModelRequest, Permission
from runguard.calls.run import AgentRun
from runguard.core.decision import METADATA_KEY, Trip
from runguard.engine.charges import OWNERS
from runguard.providers.usage import CallUsage
from runguard.termination.conditions import KEY, Ended


def joined(answers: Any, llm: BaseLlm, request: LlmRequest, stream: bool) -> Any:
    """``answers``, paid by the run of another framework whose tool makes this call."""
    here = HERE.get()
    own = {guard for plugin in IN_USE.plugins if (guard := getattr(plugin, "guard", None)) is not None}
    name = here.stream.agent if here.stream is not None else ""
    run = AgentRun.join(name or "model", own | set(IN_USE.of_models))
    return answers if run is None else _paid_by(run, answers, llm, request, stream)


async def _paid_by(
    run: AgentRun, answers: Any, llm: BaseLlm, request: LlmRequest, stream: bool
) -> AsyncGenerator[LlmResponse, None]:
    usage, config = CallUsage(), request.config
    try:
        held = (flight.charge for _, _, flight in ANNOUNCED.get() if flight.request() is request)
        token = OWNERS.set((*OWNERS.get(), *(charge for charge in held if charge is not None)))
        try:  # what ADK's guard holds in the same store is not held again
            permission = await run.ask(lambda: _asked(llm, request))
        finally:
            OWNERS.reset(token)
        if not isinstance(permission, Permission):
            call_off(announced_accounts(request))
            yield _last_response(run, permission)
            return
        permission.changed(_cap, request)
        capped = request.config
        try:
            async with aclosing(permission.pieces(answers)) as pieces:
                async for response in pieces:
                    run.guard.faults.attempt("adapter", usage.add, response)
                    yield response
        except BaseException as error:
            permission.fail(error, streaming=stream)
            raise
        finally:
            if request.config is capped:
                request.config = config  # the caller may use the request again
        if (trip := permission.interrupted) is not None:
            permission.fail(None, streaming=stream)
            yield _last_response(run, trip)
            return
        permission.read(_settle, usage)
    finally:
        run.end()


def _last_response(run: AgentRun, end: Trip | Ended) -> LlmResponse:
    if isinstance(end, Ended):  # as where a condition of ADK's own has fired
        return LlmResponse(custom_metadata={METADATA_KEY: {KEY: {"refused": True}}})
    return stop_response(end, run.guard.stop_text(end))


def _cap(permission: Permission, request: LlmRequest) -> LlmRequest:
    """A budget can pay only for a shorter answer. A notice is not added: ADK's guard gives its own."""
    if (limit := permission.max_output_tokens) is not None:
        config = request.config or types.GenerateContentConfig()
        request.config = config.model_copy(update={"max_output_tokens": limit})
    return request


def _asked(llm: BaseLlm, request: LlmRequest) -> ModelRequest:
    projection = project(request, None)
    limit = request.config.max_output_tokens if request.config is not None else None
    upper, likely = projection.upper, projection.likely
    return ModelRequest(request.model or llm.model, upper, likely, limit, projection.audio)


def _settle(permission: Permission, usage: CallUsage) -> None:
    permission.settle(usage.reported)
