"""Model calls under termination conditions: a call is made unless a condition around it has fired."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse

from runguard.adk.context import HERE
from runguard.adk.estimate import project
from runguard.adk.stream import note_fault
from runguard.adk.termination_watch import PaidAnswer, Watched
from runguard.core.decision import METADATA_KEY
from runguard.providers.usage import CallBill, CallUsage
from runguard.termination.conditions import KEY


async def asked_first(
    call: AsyncGenerator[LlmResponse, None],
    watched: tuple[Watched, ...],
    request: LlmRequest,
    call_off: Callable[[], None],
) -> AsyncGenerator[LlmResponse, None]:
    """Make a model call unless a condition around it has fired. Then the answer has no content."""
    task, stream, is_ended = asyncio.current_task(), HERE.get().stream, False
    around: list[Watched] = []
    for one in watched:
        try:
            if not one.is_left:
                around.append(one)
                one.asks(task)
                await one.see([])
                is_ended = is_ended or one.reason is not None
        except Exception as error:
            note_fault(error, stream)
    if is_ended:
        try:
            call_off()
        except Exception as error:
            note_fault(error, stream)
        await call.aclose()
        await asyncio.sleep(0)  # code that asks in a loop must not block the event loop
        try:
            for one in around:
                if one.is_over:  # a loop that never yields would ask for ever
                    one.end_wait()
        except Exception as error:
            note_fault(error, stream)
        yield LlmResponse(custom_metadata={METADATA_KEY: {KEY: {"refused": True}}})
        return
    usage: CallUsage | None = None
    model, is_answered = "", False
    for one in around:
        one.in_flight += 1
    try:
        async with aclosing(call) as answers:
            async for response in answers:
                try:
                    usage = usage or CallUsage()
                    usage.add(response)
                    model = response.model_version or model
                    if not response.partial and not is_answered:
                        is_answered = True
                        for one in around:
                            one.in_flight -= 1
                        bill = _billed(usage, request)
                        for one in around:
                            one.answered(
                                PaidAnswer(task, response.usage_metadata, bill, model, time.monotonic()), stream
                            )
                except Exception as error:
                    note_fault(error, stream)
                yield response
    finally:
        if not is_answered:
            for one in around:
                one.in_flight -= 1
            try:
                taken = usage.bill(0).usage if usage is not None and usage.reported is not None else None
                for one in around:
                    one.cut_off(taken, model)
            except Exception as error:
                note_fault(error, stream)


def _billed(usage: CallUsage, request: LlmRequest) -> CallBill:
    """The usage of a call. The request is measured only where its size was not reported."""
    bill = usage.bill(0)
    if not bill.estimated:
        return bill
    size = project(request, None)
    return usage.bill(size.upper, size.audio)
