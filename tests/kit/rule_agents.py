"""Agents that break exactly one rule."""

from collections.abc import Callable, Sequence
from typing import Any

from google.adk.agents import LlmAgent

from runguard.testing import (
    ScriptedModel,
    call,
    text,
)


def agent(script: Any, *tools: Any, name: str = "worker", **options: Any) -> LlmAgent:
    model = script if isinstance(script, ScriptedModel) else ScriptedModel(script)
    return LlmAgent(name=name, description=f"does {name}", model=model, tools=list(tools), **options)


class Tool:
    """A tool that answers from a list (the last one repeats) or by a function of its count, and counts."""

    def __init__(self, name: str, answers: Sequence[Any] | Callable[[int], Any]) -> None:
        self.__name__ = name
        self.runs = 0
        self._answers = answers

    def __call__(self, q: int = 0) -> Any:
        """Does something with q."""
        self.runs += 1
        answer = (
            self._answers(self.runs)
            if callable(self._answers)
            else self._answers[min(self.runs, len(self._answers)) - 1]
        )
        if isinstance(answer, BaseException):
            raise answer
        return answer


def always(*steps: Any) -> Callable[[int, Any], Any]:
    """The same steps round and round."""
    return lambda n, _: steps[(n - 1) % len(steps)]


def ask_new(tool: str, until: int = 10**9) -> Callable[[int, Any], Any]:
    """The same tool with new arguments each time, then an answer."""
    return lambda n, _: call(tool, q=n) if n <= until else text("done")


def recover(tool: Any, args: Any, tool_context: Any, error: Exception) -> dict[str, Any]:
    """An agent's own on_tool_error callback."""
    return {"note": "something went wrong"}
