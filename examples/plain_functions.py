"""A guard around any function that calls a model: no framework.

    python examples/plain_functions.py "Where is the invoice?"

With OPENAI_API_KEY set (and the package openai) it is OpenAI that answers, else a script: no key, no network.
"""

import os
import sys
from typing import Any

import runguard


def scripted(messages: list[dict[str, str]], **_: Any) -> dict[str, Any]:
    """Answer as a provider would: with an agent that looks for the same thing again and again."""
    return {
        "model": "gpt-4o-mini",
        "usage": {"prompt_tokens": 400 + 80 * len(messages), "completion_tokens": 40},
        "choices": [
            {
                "message": {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "search", "arguments": '{"query": "invoice"}'}}],
                }
            }
        ],
    }


def provider() -> Any:
    if not os.environ.get("OPENAI_API_KEY"):
        return scripted
    from openai import OpenAI

    return OpenAI().chat.completions.create


ask: Any = runguard.guard(
    provider(),
    budget={"max_usd": 0.10, "per_day": 1.00},  # of this run, and of a day
    loop={"repeats": 3},  # the same tool call three times
)


def main(question: str) -> None:
    messages = [{"role": "user", "content": question}]
    try:
        for step in range(1, 21):
            answer = ask(model="gpt-4o-mini", messages=messages, max_tokens=200)
            print(f"step {step}: ${ask.spend()['usd']:.6f} so far")
            if not isinstance(answer, dict):  # OpenAI's own object: say it and be done, there are no tools here
                print(answer.choices[0].message.content)
                return
            messages.append({"role": "tool", "content": "3 hits, none of them an invoice"})
    except runguard.LoopDetectedError as error:
        print(f"stopped: {' → '.join(error.pattern)} {error.repeats} times over. {error.trip.resume}")
    except runguard.BudgetExceededError as error:
        print(f"stopped: {error.scope} has ${error.spent} of ${error.limit} spent")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "Where is the invoice?")
