"""What the end-to-end tests share: bounded runs and comparable event streams."""

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

from google.adk.events import Event

from runguard.adk import RunGuardPlugin
from runguard.core.decision import Decision
from runguard.testing import Recording, run

_UNIQUE = re.compile(r"\b(?:adk-|e-)?[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b")


async def play(root: Any, message: str = "go", *, seconds: float = 40, **options: Any) -> Recording:
    """One user turn that must end by itself."""
    async with asyncio.timeout(seconds):
        return await run(root, message, **options)


def told(events: list[Event]) -> list[Any]:
    """Events as they look without what differs between two runs of the same thing: ids are numbered as they appear."""
    lines = json.dumps(
        [
            event.model_dump(mode="json", exclude={"id", "timestamp", "invocation_id"}, exclude_none=True)
            for event in events
        ]
    )
    numbers: dict[str, str] = {}
    return list(json.loads(_UNIQUE.sub(lambda found: numbers.setdefault(found[0], f"#{len(numbers)}"), lines)))


def prompts(requests: list[Any]) -> list[Any]:
    """Requests as the model saw them, ids numbered."""
    lines = json.dumps(
        [[content.model_dump(mode="json", exclude_none=True) for content in request.contents] for request in requests]
    )
    numbers: dict[str, str] = {}
    return list(json.loads(_UNIQUE.sub(lambda found: numbers.setdefault(found[0], f"#{len(numbers)}"), lines)))


@dataclass(slots=True)
class Observed:
    """A run together with everything the guard said about it."""

    result: Recording
    plugin: RunGuardPlugin
    decisions: list[Decision]

    @property
    def rules(self) -> list[tuple[str, str]]:
        """What was decided, in order: (action, rule)."""
        return [
            (decision.action.word, decision.finding.rule) for decision in self.decisions if decision.finding is not None
        ]

    @property
    def answers(self) -> list[dict[str, Any]]:
        """What the tools' answers became in the stored session, in order."""
        return [
            response.response or {}
            for event in self.result.session.events
            for response in event.get_function_responses()
        ]


async def observe(
    root: Any,
    message: str = "go",
    *,
    plugin: RunGuardPlugin | None = None,
    play_with: dict[str, Any] | None = None,
    **policy: Any,
) -> Observed:
    """One bounded turn under a policy, with every decision on record."""
    decisions: list[Decision] = []
    plugin = plugin or RunGuardPlugin(on_decision=decisions.append, **policy)
    result = await play(root, message, plugins=[plugin], **(play_with or {}))
    assert plugin.flush()
    assert plugin.snapshot()["runs"] == []
    assert plugin.snapshot()["guard_errors"] == 0
    return Observed(result, plugin, decisions)
