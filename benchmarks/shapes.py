"""Small made-up runs: what they are made of.

``made_up.py`` collects the loops and the healthy work that looks like them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Steps = Iterator[dict[str, Any]]
Declared = dict[str, dict[str, bool]]
WORDS = [
    *("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron"),
    *("inlet", "juniper", "kelp", "lagoon", "maple", "nectar", "onyx", "pebble"),
]


@dataclass(frozen=True, slots=True)
class Shape:
    """One made-up run. ``tools`` are the declarations that a user of such tools would make; only
    RunGuard reads them.
    """

    name: str
    kind: str
    steps: Callable[[], Steps]
    tools: Declared = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        return {"id": self.name, "steps": list(self.steps())}


class Shapes(dict[str, Shape]):
    """Shapes by name, each added by the function that makes its steps."""

    def of(self, kind: str, tools: Declared | None = None) -> Callable[[Callable[[], Steps]], Callable[[], Steps]]:
        def add(make: Callable[[], Steps]) -> Callable[[], Steps]:
            name = make.__name__.replace("_", " ")
            self[name] = Shape(name, kind, make, tools or {})
            return make

        return add


def user(text: str) -> dict[str, Any]:
    return {"kind": "message", "agent": "user", "text": text}


def turn(
    *calls: tuple[str, dict[str, Any], Any],
    text: str = "",
    agent: str = "agent",
    raised: bool = False,
    at: float | None = None,
    prompt: int | None = None,
) -> Steps:
    """One model response with its calls ``(tool, args, answer)`` and their answers.

    ``prompt``: the tokens that the model was sent. A smaller number than before shows that the history was compacted.
    """
    tokens = {} if prompt is None else {"input_tokens": prompt, "output_tokens": 50}
    yield {"kind": "model", "agent": agent, "text": text, "ts": at, **tokens}
    for number, (tool, args, _) in enumerate(calls):
        yield {"kind": "tool_call", "agent": agent, "tool": tool, "args": args, "call_id": str(number), "ts": at}
    for number, (tool, _, answer) in enumerate(calls):
        yield {
            "kind": "error" if raised else "tool_result",
            "agent": agent,
            "tool": tool,
            "result": answer,
            "call_id": str(number),
            "ts": at,
        }


def work(count: int, start: int = 0) -> Steps:
    """Healthy work that brings news with every call."""
    for n in range(start, start + count):
        yield from turn(("read", {"path": f"src/part_{n}.py"}, f"def part_{n}(): return {n * n}"))


def page(topic: object, words: int = 120) -> str:
    """A long text about a topic: the same for the same topic, and with few words in common with any other."""
    return " ".join(f"{topic}-{n * n % 97}" if n % 3 else f"line {n}" for n in range(words))
