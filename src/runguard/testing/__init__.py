"""Test your own policy on real ADK, and an adapter of your own against the conformance scenarios."""

from typing import TYPE_CHECKING

from runguard._lazy import lazy

if TYPE_CHECKING:
    from runguard.testing.adk_runs import (
        FakeClock,
        Recording,
        ScriptedModel,
        assert_calls_answered,
        assert_stopped,
        call,
        calls,
        run,
        text,
        transfer,
    )

__all__ = [
    "FakeClock",
    "Recording",
    "ScriptedModel",
    "assert_calls_answered",
    "assert_stopped",
    "call",
    "calls",
    "run",
    "text",
    "transfer",
]

__getattr__, __dir__ = lazy(__name__, dict.fromkeys(__all__, "runguard.testing.adk_runs"))
