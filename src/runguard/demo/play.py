"""Run each story twice in parallel, without and with the guard, and measure both."""

import asyncio
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from importlib.util import find_spec
from typing import Any

from google.adk.events import Event
from google.adk.sessions import InMemorySessionService, Session
from google.adk.version import __version__ as adk_version

from runguard._version import __version__
from runguard.adk.plugin import RunGuardPlugin
from runguard.core.decision import Action, Decision, Trip
from runguard.core.money import to_usd
from runguard.demo.stories import LOOK_ALIKES, PRICED_AS, STORIES, DemoStory, WorkCounter
from runguard.testing import Recording, assert_calls_answered, run

_CLIENTS = {"google.adk.models.anthropic_llm": "anthropic", "google.adk.models.lite_llm": "litellm"}


@dataclass(slots=True)
class Side:
    """One run of a story: its counter while it runs, and how it ended."""

    counter: WorkCounter = field(default_factory=WorkCounter)
    done: bool = False
    events: int = 0
    seconds: float = 0.0
    error: str = ""
    trip: Trip | None = None
    decisions: list[Decision] = field(default_factory=list)
    comparable_events: list[str] = field(default_factory=list)
    answered: bool = True
    billed: Decimal | None = None  # according to the guard

    @property
    def interventions(self) -> list[Decision]:
        """All interventions in the run; a warning only informs the operator."""
        return [decision for decision in self.decisions if decision.action >= Action.NUDGE]

    @property
    def warnings(self) -> list[Decision]:
        return [decision for decision in self.decisions if decision.action is Action.WARN]

    def to_dict(self) -> dict[str, Any]:
        counter = self.counter
        return {
            "model_calls": counter.model_calls,
            "tool_calls": counter.tool_calls,
            "prompt_tokens": counter.prompt_tokens,
            "output_tokens": counter.output_tokens,
            "tokens": counter.tokens,
            "usd": str(to_usd(counter.nano_usd)),
            "first_prompt_tokens": counter.first_prompt,
            "largest_prompt_tokens": counter.largest_prompt,
            "max_in_flight": max((model.max_in_flight for model in counter.models), default=0),
            "events": self.events,
            "seconds": round(self.seconds, 3),
            "error": self.error or None,
        }


@dataclass(slots=True)
class Pair:
    """A story and its two runs."""

    story: DemoStory
    without: Side = field(default_factory=Side)
    guarded: Side = field(default_factory=Side)
    settings: dict[str, Any] = field(default_factory=dict)  # of the guard; empty: its defaults
    started: bool = False

    @property
    def done(self) -> bool:
        return self.without.done and self.guarded.done

    @property
    def stopped(self) -> bool:
        return self.guarded.trip is not None and self.guarded.trip.enforced and not self.guarded.error

    @property
    def saved(self) -> float:
        """Share of the tokens that were not spent, in percent."""
        before = self.without.counter.tokens
        return 100 * (before - self.guarded.counter.tokens) / before if before else 0.0

    @property
    def untouched(self) -> bool:
        """No intervention, no error, and the same events with the guard as without."""
        return (
            not self.guarded.interventions
            and not self.guarded.error
            and not self.without.error
            and self.guarded.comparable_events == self.without.comparable_events
        )

    def to_dict(self) -> dict[str, Any]:
        trip = self.guarded.trip
        return {
            "story": self.story.key,
            "about": self.story.about,
            "without": self.without.to_dict(),
            "with": self.guarded.to_dict(),
            "saved_percent": round(self.saved, 1),
            "interventions": len(self.guarded.interventions),
            "warnings": len(self.guarded.warnings),
            "decisions": [_decision(decision) for decision in self.guarded.decisions],
            "same_events": self.guarded.comparable_events == self.without.comparable_events,
            "calls_answered": self.guarded.answered,
            "stopped_by": trip.rule if trip is not None else None,
            "message": trip.message if trip is not None else None,
        }


def _decision(decision: Decision) -> dict[str, Any]:
    finding = decision.finding
    assert finding is not None
    return {
        "action": decision.action.word,
        "rule": finding.rule,
        "observed": float(finding.observed),
        "limit": float(finding.limit),
        "unit": finding.unit,
    }


@dataclass(slots=True)
class Report:
    """All results of the demo. They fill up while the stories run, so that a display can follow."""

    runaways: list[Pair]
    healthy: list[Pair]
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(pair.stopped for pair in self.runaways) and all(pair.untouched for pair in self.healthy)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "runguard": __version__,
            "google_adk": adk_version,
            "policy": "defaults",
            "priced_as": PRICED_AS,
            "seconds": round(self.seconds, 2),
            "stories": [{**pair.to_dict(), "stopped": pair.stopped} for pair in self.runaways],
            "look_alikes": [{**pair.to_dict(), "untouched": pair.untouched} for pair in self.healthy],
        }


def new_report(stories: Sequence[DemoStory] = STORIES, look_alikes: Sequence[DemoStory] = LOOK_ALIKES) -> Report:
    return Report([Pair(story) for story in stories], [Pair(story) for story in look_alikes])


def play(report: Report, on_change: Callable[[Pair], None] = lambda pair: None) -> Report:
    """Run every pair of the report; call ``on_change`` at each beginning and end."""

    async def all_of_them() -> None:
        for pair in (*report.runaways, *report.healthy):
            pair.started = True
            on_change(pair)
            await play_pair(pair)
            on_change(pair)

    began = time.perf_counter()
    with quiet():
        asyncio.run(all_of_them())
    report.seconds = time.perf_counter() - began
    return report


async def play_pair(pair: Pair) -> Pair:
    """Run both runs of one story in parallel in one event loop."""
    await asyncio.gather(play_without(pair), play_with(pair))
    return pair


async def play_without(pair: Pair) -> None:
    await _run(pair.story, pair.without, [])


async def play_with(pair: Pair) -> None:
    side = pair.guarded
    with defaults():
        plugin = RunGuardPlugin(on_decision=side.decisions.append, **pair.settings)  # on_decision only listens
    recording = await _run(pair.story, side, [plugin])
    plugin.flush()
    side.billed = plugin.spend()["usd"]
    side.trip = next(iter(plugin.trips), None)
    try:
        assert_calls_answered(recording.session)
    except AssertionError:
        side.answered = False


async def _run(story: DemoStory, side: Side, plugins: list[RunGuardPlugin]) -> Recording:
    began = time.perf_counter()
    history = RecentHistory(story.window) if story.window else InMemorySessionService()
    agent = story.build(side.counter)
    events: list[Event] = []
    for _ in range(story.turns):
        recording = await run(agent, story.message, plugins=plugins, session_service=history, catch=True)
        events += recording.events
    side.seconds = time.perf_counter() - began
    side.events = len(events)
    side.comparable_events = _comparable(events)
    side.error = type(recording.error).__name__ if recording.error is not None else ""
    side.done = True
    return recording


def _comparable(events: list[Event]) -> list[str]:
    """Return the events without ids, times and the order of parallel branches, which differ between equal runs."""
    lines = []
    for event in events:
        parts = event.content.parts or [] if event.content is not None else []
        facts: list[Any] = [event.author, event.error_code]
        for part in parts:
            called, answered = part.function_call, part.function_response
            facts += [part.text, called and [called.name, called.args], answered and [answered.name, answered.response]]
        lines.append(json.dumps(facts, default=str))
    return sorted(lines)


class RecentHistory(InMemorySessionService):
    """A session that shows agents only the user's message and the latest events, as applications with long runs do.

    It keeps the hand-off story short: from the whole history ADK needs most of a minute to build 500 prompts.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    async def append_event(self, session: Session, event: Event) -> Event:
        appended = await super().append_event(session, event)
        if event.get_function_responses():  # split between a call's answer and the next call
            del session.events[1 : -self.window]
        return appended


# ---- environment ----------------------------------------------------------------------------------------------------


@contextmanager
def defaults() -> Iterator[None]:
    """Run without the local policy file and environment variables."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("RUNGUARD_")}
    os.environ["RUNGUARD_POLICY"] = os.devnull
    try:
        yield
    finally:
        del os.environ["RUNGUARD_POLICY"]
        os.environ.update(kept)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide logs and warnings, and look for missing model clients only once.

    Some versions of ADK try to import them before every request.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    absent = [module for module, client in _CLIENTS.items() if module not in sys.modules and find_spec(client) is None]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        for name in absent:
            del sys.modules[name]
