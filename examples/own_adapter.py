"""A guard for an agent loop of your own: the adapter of a framework, in small.

    python examples/own_adapter.py

A script answers instead of a model: no key, no network. ``runguard.calls.run`` says in which order an adapter calls
what, and ``runguard.testing.conformance`` proves an adapter.
"""

import asyncio
from typing import Any

from runguard.calls.model_calls import ModelRequest, Permission
from runguard.calls.run import AgentRun, error_of
from runguard.calls.tool_calls import ToolUse
from runguard.engine.guard import Guard
from runguard.errors import RunStoppedError
from runguard.policy import Policy
from runguard.pricing.rates import Usage

MODEL = "gemini-2.5-flash"
OUTPUT = 200  # tokens


async def call_model(messages: list[str], max_output_tokens: int) -> dict[str, Any]:
    """Answer as a provider would: with a model that searches for the same thing again and again."""
    return {"tokens": (480, 60), "tool": "search", "args": {"query": "refund"}}


def search(query: str) -> str:
    return "no result"


async def agent(guard: Guard, question: str) -> None:
    """Run the loop of a framework. The lines with ``run`` are the adapter."""
    messages = [question]
    run = AgentRun.start(guard, "clerk", app="shop", user="ann")
    try:
        for number in range(1, 21):
            permission = await run.ask(lambda: ModelRequest.of(MODEL, messages, OUTPUT))
            if not isinstance(permission, Permission):  # a trip, or a termination condition that is met
                raise error_of(permission)
            if permission.notice:
                print(f"notice: {permission.notice}")
                messages.append(permission.notice)
            try:
                limit = permission.max_output_tokens or OUTPUT  # lower where a budget cannot pay for more
                answer = await permission.during(call_model(messages, limit))
            except BaseException as error:
                permission.fail(error)
                if permission.interrupted is not None:  # an operator has stopped the run
                    raise error_of(permission.interrupted) from None
                raise
            use = ToolUse(f"call-{number}", answer["tool"], answer["args"])
            permission.settle(Usage(*answer["tokens"]), calls=[use])

            said = await run.tools.check(use)  # a text: the model gets it instead of an answer
            if said is None:
                try:
                    with run.tools.inside(use):  # an agent that the tool starts joins this run
                        said = search(**use.args)
                except BaseException as error:
                    run.tools.raised(use, error)
                    raise
                said = run.tools.answered(use, said) or said
            print(f"step {number}: {said}")
            messages.append(said)
    finally:
        run.end()


async def main() -> None:
    guard = Guard(Policy.build(rules={"repetition": {"nudge": 2, "stop": 4}}, max_usd=0.10))
    try:
        await agent(guard, "Where is my refund?")
    except RunStoppedError as stop:
        print(stop.trip)


if __name__ == "__main__":
    asyncio.run(main())
