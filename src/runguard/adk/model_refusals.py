"""The answer to a refused model call, and the end of a loop that keeps asking."""

import asyncio
from typing import Final

from google.adk.models.llm_response import LlmResponse
from google.genai import types

from runguard.adk.call_accounts import CallAccount, call_off
from runguard.adk.context import HERE
from runguard.adk.paid_work import until_done
from runguard.adk.stop_events import Halt, refused_response
from runguard.core.decision import STOP_CODE, Trip, text_for_user
from runguard.core.errors import RunStoppedError
from runguard.engine.guard import Guard

# Rounds in which a stopped run may ask for a model before it is ended: a long list of documents is not an endless loop.
_SPINS: Final = 1_000


async def refuse(trip: Trip | str | None, guard: Guard, accounts: list[CallAccount]) -> LlmResponse:
    """Answer instead of the model. A loop that ignores the refusals is ended from outside."""
    call_off(accounts)  # another guard had admitted it
    if isinstance(trip, str):
        return _text_response(trip)
    if trip is None:  # beside a run that has given its answer: nothing is stopped
        return LlmResponse(error_code=STOP_CODE, error_message=text_for_user(""))
    run = guard.runs.get(trip.run_id)
    first = run is not None and not run.refusing
    if run is not None:
        run.refusing = True
    await asyncio.sleep(0)  # code that asks in a loop must not block the event loop
    if run is not None and first:  # calls that are refused together are one round
        run.refusing = False
        times, made = run.refused_at_border  # a model call in between starts the count anew
        run.refused_at_border = (times + 1 if made == run.spend.model_calls else 1, run.spend.model_calls)
        if run.refused_at_border[0] > _SPINS:
            if HERE.get().tool is not None and run.refused_at_border[0] <= 2 * _SPINS:
                raise RunStoppedError.of(trip)  # inside a tool: its call gets an answer, unless it swallows this
            await until_done(lambda: not run.slots.busy())
            raise Halt(trip)
    return refused_response(trip, guard.stop_text(trip))


def refuse_barely(trip: Trip | str | None, guard: Guard, accounts: list[CallAccount], fault: Exception) -> LlmResponse:
    """Refuse a call although ``refuse`` failed. A run that is stopped as a whole is ended."""
    guard.faults.note("refusing", fault)
    call_off(accounts)
    if isinstance(trip, str):
        return _text_response(trip)
    run = guard.runs.get(trip.run_id) if trip is not None else None
    if trip is not None and run is not None and run.stopped is not None and HERE.get().tool is None:
        raise Halt(trip)
    return LlmResponse(error_code=STOP_CODE, error_message="refused")


def _text_response(text: str) -> LlmResponse:
    return LlmResponse(content=types.Content(role="model", parts=[types.Part(text=text)]))
