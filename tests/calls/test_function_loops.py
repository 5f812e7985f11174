"""``loop`` on raw provider answers: the same tool with slightly modified arguments and nothing new is a loop, a batch
is not.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from runguard import LoopDetectedError, PolicyError, guard, guard_async
from tests.kit.examples import each_row

LIMITS = {"repeats": 3, "max_cycle_len": 4}  # of the seed document
DENIED = {"error": "permission denied"}
Call = tuple[str, dict[str, Any]]
Result = Callable[[int, Call], Any]


class Chat:
    """OpenAI's chat completions, also as LiteLLM gives them."""

    name = "messages"

    def answer(self, n: int, calls: list[Call]) -> Any:
        asked = [
            {"id": f"c{n}.{i}", "type": "function", "function": {"name": tool, "arguments": json.dumps(args)}}
            for i, (tool, args) in enumerate(calls)
        ]
        return {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": asked}}]}

    def grow(self, messages: list[Any], answer: Any, results: list[Any]) -> None:
        message = answer["choices"][0]["message"]
        messages.append(message)
        for call, result in zip(message["tool_calls"], results, strict=True):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)})


class Responses(Chat):
    name = "input"

    def answer(self, n: int, calls: list[Call]) -> Any:
        return {
            "output": [
                {"type": "function_call", "call_id": f"c{n}.{i}", "name": t, "arguments": json.dumps(a)}
                for i, (t, a) in enumerate(calls)
            ]
        }

    def grow(self, messages: list[Any], answer: Any, results: list[Any]) -> None:
        messages += answer["output"]
        outputs = zip(answer["output"], results, strict=True)
        messages += [
            {"type": "function_call_output", "call_id": call["call_id"], "output": json.dumps(result)}
            for call, result in outputs
        ]


class Anthropic(Chat):
    def answer(self, n: int, calls: list[Call]) -> Any:
        return {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": f"c{n}.{i}", "name": t, "input": a} for i, (t, a) in enumerate(calls)
            ],
        }

    def grow(self, messages: list[Any], answer: Any, results: list[Any]) -> None:
        messages.append(answer)
        told = zip(answer["content"], results, strict=True)
        blocks = [
            {"type": "tool_result", "tool_use_id": b["id"], "content": [{"type": "text", "text": json.dumps(r)}]}
            for b, r in told
        ]
        messages.append({"role": "user", "content": blocks})


class Gemini(Chat):
    name = "contents"

    def answer(self, n: int, calls: list[Call]) -> Any:
        return {
            "candidates": [
                {
                    "content": {
                        "role": "model",
                        "parts": [{"function_call": {"name": tool, "args": args}} for tool, args in calls],
                    }
                }
            ]
        }

    def grow(self, messages: list[Any], answer: Any, results: list[Any]) -> None:
        content = answer["candidates"][0]["content"]
        messages.append(content)
        told = zip(content["parts"], results, strict=True)
        messages.append(
            {
                "role": "user",
                "parts": [{"function_response": {"name": p["function_call"]["name"], "response": r}} for p, r in told],
            }
        )


SHAPES = [Chat(), Responses(), Anthropic(), Gemini()]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__)


def search(n: int) -> list[Call]:
    return [("search", {"query": f"moon, attempt no. {n}"})]


def converse(
    shape: Chat, calls: Callable[[int], list[Call]], result: Result, loop: Any = LIMITS, steps: int = 60
) -> tuple[int, LoopDetectedError | None]:
    """An agent's own loop around a guarded provider: how many requests were paid, and what stopped it."""
    paid = 0

    def provider(**request: Any) -> Any:
        nonlocal paid
        paid += 1
        return shape.answer(paid, calls(paid))

    ask = guard(provider, loop=loop)
    messages: list[Any] = [{"role": "user", "content": "Find it."}]
    for n in range(1, steps + 1):
        try:
            answer = ask(**{shape.name: list(messages)})
        except LoopDetectedError as error:
            return paid, error
        shape.grow(messages, answer, [result(n, call) for call in calls(n)])
    return paid, None


@shapes
@pytest.mark.parametrize(
    "result",
    [
        DENIED,
        {"status": "error", "message": "network unreachable"},
        {"results": []},
        {"status": "pending"},
        "Error: malformed query",
    ],
    ids=lambda result: str(result)[:20],
)
def test_the_same_tool_with_modified_arguments_and_nothing_new_stops_at_the_limit(shape: Chat, result: Any) -> None:
    told = {"result": result} if isinstance(shape, Gemini) and isinstance(result, str) else result
    paid, error = converse(shape, search, lambda n, call: told)
    assert paid == 3
    assert error is not None
    assert (error.pattern, error.repeats, error.trip.rule) == (("search",), 3, "cycle")


@shapes
@pytest.mark.parametrize(
    "result",
    [
        lambda n, call: {"rows": [n]},  # news
        lambda n, call: {"status": "ok"},  # what a write reports
        lambda n, call: DENIED if n % 3 else {"rows": [n]},  # failures between which something is found
        lambda n, call: {"error": f"{call[1]['query']}: is locked"},  # a failure of that item alone
    ],
    ids=["news", "writes", "some fail", "each its own failure"],
)
def test_a_batch_over_different_items_is_left_alone(shape: Chat, result: Result) -> None:
    assert converse(shape, search, result) == (60, None)


@shapes
def test_a_circle_of_tools_that_brings_nothing_new_is_found(shape: Chat) -> None:
    def two(n: int) -> list[Call]:
        return [("search" if n % 2 else "fetch", {"query": f"moon {n}"})]

    paid, error = converse(shape, two, lambda n, call: DENIED)
    assert paid == 6
    assert error is not None
    assert error.pattern == ("search", "fetch")


@shapes
def test_several_calls_of_one_answer_are_one_step(shape: Chat) -> None:
    def both(n: int) -> list[Call]:
        return [*search(n), ("fetch", {"url": f"http://moon/{n}"})]

    paid, error = converse(shape, both, lambda n, call: DENIED)
    assert paid == 3
    assert error is not None
    assert error.pattern == ("fetch+search",)
    assert converse(shape, both, lambda n, call: DENIED if call[0] == "fetch" else {"rows": [n]}) == (60, None)


@shapes
def test_by_name_counts_every_call_of_a_tool(shape: Chat) -> None:
    paid, error = converse(shape, search, lambda n, call: {"rows": [n]}, {**LIMITS, "by": "name"})
    assert paid == 3
    assert error is not None
    assert error.pattern == ("search",)


@shapes
def test_by_call_compares_arguments(shape: Chat) -> None:
    assert converse(shape, search, lambda n, call: DENIED, {**LIMITS, "by": "call"}) == (60, None)
    paid, error = converse(shape, lambda n: search(1), lambda n, call: DENIED, {**LIMITS, "by": "call"})
    assert (paid, error is not None) == (3, True)


async def test_the_same_request_again_brings_nothing_new() -> None:
    """A caller that runs no tool and asks again: the model asks for the same tool, however it words its arguments."""
    paid = 0

    async def provider(messages: list[Any]) -> Any:
        nonlocal paid
        paid += 1
        return Chat().answer(paid, search(paid))

    ask = guard_async(provider, loop=LIMITS)
    for _ in range(3):
        await ask([{"role": "user", "content": "Find it."}])
    with pytest.raises(LoopDetectedError) as caught:
        await ask([{"role": "user", "content": "Find it."}])
    assert (paid, caught.value.pattern) == (3, ("search",))


def test_one_structured_answer_for_each_document_is_a_batch() -> None:
    ask = guard(
        lambda template, document: Chat().answer(1, [("classify", {"kind": f"letter to {document}"})]), loop=LIMITS
    )
    for n in range(60):
        ask("Classify this.", f"document {n}")


def test_a_request_sent_again_after_an_error_is_one_step() -> None:
    answers = iter([1, 0, 0, 0, 2, 0, 0, 3])

    def provider(messages: list[Any]) -> Any:
        if (n := next(answers)) == 0:
            raise ConnectionError("try again")
        return Chat().answer(n, search(n))

    ask = guard(provider, loop=LIMITS)
    messages: list[Any] = [{"role": "user", "content": "Find it."}]
    for _ in range(3):
        while True:
            try:
                answer = ask(messages)
                break
            except ConnectionError:
                continue
        Chat().grow(messages, answer, [DENIED])
    with pytest.raises(LoopDetectedError):
        ask(messages)


def test_an_answer_in_words_starts_a_new_count() -> None:
    turn = 0

    def provider(messages: list[Any]) -> Any:
        nonlocal turn
        turn += 1
        return (
            {"choices": [{"message": {"role": "assistant", "content": "I cannot."}}]}
            if turn % 3 == 0
            else Chat().answer(turn, search(turn))
        )

    ask = guard(provider, loop=LIMITS)
    messages: list[Any] = [{"role": "user", "content": "Find it."}]
    for n in range(60):
        answer = ask(messages)
        if answer["choices"][0]["message"].get("tool_calls"):
            Chat().grow(messages, answer, [DENIED])
        else:
            messages += [answer["choices"][0]["message"], {"role": "user", "content": f"Once more, {n}."}]


def test_results_that_the_function_returns_count_the_same_way() -> None:
    paid = 0

    def step() -> Any:
        nonlocal paid
        paid += 1
        return {"results": [("search", {"query": f"moon {paid}"}, DENIED)]}

    ask = guard(step, loop=LIMITS)
    for _ in range(3):
        ask()
    with pytest.raises(LoopDetectedError):
        ask()
    assert paid == 3


def test_an_own_sign_is_the_whole_identity() -> None:
    messages: list[Any] = [{"role": "user", "content": "Find it."}]
    turn = 0

    def provider(messages: list[Any]) -> Any:
        nonlocal turn
        turn += 1
        return {"sig": f"step {turn}", "response": Chat().answer(turn, search(turn))}

    ask = guard(provider, loop=LIMITS)
    for _ in range(60):
        Chat().grow(messages, ask(messages)["response"], [DENIED])


def test_outside_of_enforcement_nothing_is_stopped() -> None:
    paid = 0

    def provider(messages: list[Any]) -> Any:
        nonlocal paid
        paid += 1
        return Chat().answer(paid, search(paid))

    ask = guard(provider, loop=LIMITS, mode="shadow")
    messages: list[Any] = [{"role": "user", "content": "Find it."}]
    for _ in range(10):
        Chat().grow(messages, ask(messages), [DENIED])
    assert paid == 10
    assert [(trip.rule, trip.enforced) for trip in ask.trips] == [("cycle", False)]


@each_row("by", ["names", 3, None, ["name"]])
def test_an_unknown_way_to_compare_is_rejected(by: Any) -> None:
    with pytest.raises(PolicyError, match=r"loop\.by = .*'result', 'call', 'name'"):
        guard(print, loop={"by": by})
