"""What RunGuard does in a step late in a run beside an early one: counts, which the load of the machine does not move.

    python benchmarks/growth.py [--quick] [--json]                        guarded functions, ADK
    .venv-frameworks/bin/python benchmarks/growth.py [--quick] [--json]   all frameworks

Counted are the Python calls and the bytecode instructions of RunGuard's own code, after so many tool calls in the
prompt. A cost that does not depend on the history shows the same figures in every column.
"""

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import runguard
from runguard.testing.conformance import MODEL

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.kit.work import Work, work_of_steps

TOOL_CALLS = (10, 50, 200)
PRICES = {MODEL: {"input": 1.0, "output": 4.0}}
CAPS: dict[str, Any] = {"max_usd": 1_000, "max_model_calls": 1_000, "prices": PRICES}
HARNESSES = {
    "ADK": ("adk", "AdkHarness"),
    "LangChain": ("langchain", "LangChainHarness"),
    "OpenAI Agents": ("openai", "OpenAIAgentsHarness"),
    "Pydantic AI": ("pydantic", "PydanticAIHarness"),
    "Strands": ("strands", "StrandsHarness"),
    "Agent Framework": ("agent_framework", "AgentFrameworkHarness"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    ", tokens=": {"tokens": lambda _: 1_000},
    ", a tool once": {"tools": {"look_up": {"once": True}}},
}
Row = tuple[str, dict[int, Work]]


def conversation(tool_calls: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"role": "system", "content": "You look things up."}]
    found.append({"role": "user", "content": "Begin."})
    for n in range(tool_calls):
        function = {"name": "look_up", "arguments": json.dumps({"page": n})}
        call = {"id": f"c{n}", "type": "function", "function": function}
        found.append({"role": "assistant", "content": None, "tool_calls": [call]})
        found.append({"role": "tool", "tool_call_id": f"c{n}", "content": json.dumps({"page": n, "items": ["a", "b"]})})
    return found


def functions() -> Iterator[Row]:
    asked = 0

    def ask(**_: Any) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        function = {"name": "look_up", "arguments": json.dumps({"page": asked})}
        message = {"role": "assistant", "tool_calls": [{"id": f"k{asked}", "type": "function", "function": function}]}
        usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
        return {"object": "chat.completion", "model": "gpt-4o", "choices": [{"message": message}], "usage": usage}

    settings: dict[str, dict[str, Any]] = {
        "guard, cost known": {"cost": 0.001},
        "guard, priced completion": {},
        "guard, tokens=": {"tokens": lambda **_: 1_000},
        "guard, context=": {"context": {"max_context_tokens": 10**9}},
        "guard, loop=": {"loop": {"repeats": 10**6}},
    }
    for name, more in settings.items():
        found = {}
        for number in (0, *TOOL_CALLS, 400):
            guarded = runguard.guard(ask, budget={"max_usd": 10**6}, **more)
            request = {"model": "gpt-4o", "messages": conversation(number), "max_tokens": 100}
            for _ in range(20):
                guarded(**request)
            found[number] = Work()
            with found[number].counted():
                guarded(**request)
        yield name, found


def measure(quick: bool) -> Iterator[Row]:
    yield from functions()
    for name, (module, harness) in HARNESSES.items():
        try:
            made = getattr(import_module(f"tests.frameworks.{module}_harness"), harness)()
        except ImportError:
            continue
        for more, settings in SETTINGS.items():
            if not (quick and more):
                at = TOOL_CALLS[:2] if quick else TOOL_CALLS
                yield f"{name}{more}", asyncio.run(work_of_steps(made, at, made.guard(**CAPS, **settings)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter runs, without further settings")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    options = parser.parse_args()
    logging.getLogger("runguard").setLevel(logging.ERROR)
    figures = {}
    for name, row in measure(options.quick):
        figures[name] = {at: [work.calls, work.instructions, len(work.codes)] for at, work in row.items()}
        if not options.json:
            counts = (f"{at:3}: {work.calls:3} calls {work.instructions:6,}" for at, work in row.items())
            print(f"{name:26} {'  '.join(counts)}", flush=True)
    if options.json:
        print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
