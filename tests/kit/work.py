"""Counts what RunGuard's own code does: figures that the load of the machine does not move."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import runguard
from runguard.engine.guard import Controls
from runguard.testing.conformance import AgentSpec, Harness, Reply

_ROOT = str(Path(runguard.__file__).parent) + os.sep


class Work:
    """Python calls, bytecode instructions and distinct functions of RunGuard in this thread, of a block."""

    def __init__(self) -> None:
        self.calls = self.instructions = 0
        self.codes: set[CodeType] = set()
        self._is_on = False

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self._is_on or not frame.f_code.co_filename.startswith(_ROOT):
            return None
        self.calls += 1
        self.codes.add(frame.f_code)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._count

    def _count(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.instructions += event == "opcode" and self._is_on
        return self._count

    def begin(self) -> None:
        self._is_on = True
        sys.settrace(self._enter)

    def end(self) -> None:
        sys.settrace(None)
        self._is_on = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()


async def work_of_steps(harness: Harness, at: tuple[int, ...], guard: Controls) -> dict[int, Work]:
    """Return what RunGuard does in a step, from one model call to the next, after so many tool calls of one run."""
    found: dict[int, Work] = {}
    counting: list[Work] = []

    def script(number: int, _: str) -> Reply:
        if counting:
            counting.pop().end()
        if number > max(at) + 1:
            return Reply("done")
        if number - 1 in at:
            counting.append(found.setdefault(number - 1, Work()))
            counting[0].begin()
        return Reply(calls=[("look_up", {"page": number})])

    tools = {"look_up": lambda page: f"page {page} says {page * 7919}"}
    result = await harness.session(AgentSpec(script, tools=tools), guard).turn("Look everything up.")
    assert (result.error, result.text) == (None, "done")
    return found
