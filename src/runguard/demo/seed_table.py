"""The four failure modes of the seed, run live: without a guard, with the seed's values, and with the defaults.

The seed is the article that RunGuard's names come from. It ends with a table of what a breaker saves. Here each row of
that table is an agent on real ADK, built after the words of the article, and measured.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Final

from google.adk.agents import BaseAgent, LlmAgent, LoopAgent
from google.adk.tools.tool_context import ToolContext
from google.adk.version import __version__ as adk_version
from google.genai import types

from runguard._version import __version__
from runguard.demo.play import Pair, play_with, play_without, quiet
from runguard.demo.stories import PRICED_AS, DemoStory, WorkCounter, over_spawn
from runguard.testing import call, text

SEED_VALUES: Final = {
    "max_identical_tool_results": 3,
    "max_delegation_depth": 5,
    "max_event_cost_ratio": 3.0,
    "cost_baseline_events": 5,
    "max_concurrent_agents": 20,
    "max_reentries": 1,  # the seed trips at the first re-entry
}
_LEVELS: Final = 6
_TURNS: Final = 40


def _words(tokens: int, about: str) -> str:
    """A text of about that many tokens."""
    sentence = f"This sentence is a part of {about}. "
    return sentence * (4 * tokens // len(sentence))


def non_progress(counter: WorkCounter) -> BaseAgent:
    """Eight iterations; the parser reports the same partial failure in each, with any hint."""
    fragment = _words(600, "the invoice")

    def parse_document_fragment(fragment: str, hint: str = "") -> dict[str, Any]:
        """Parse one fragment of the document."""
        counter.tool_calls += 1
        return {"status": "partial_parse_error", "data": None, "retry_hint": "E42"}

    def extract(n: int) -> types.Part:
        if n % 2:
            return call("parse_document_fragment", fragment=fragment, hint=f"refinement {n}")
        return text(f"Attempt {n // 2} parsed a part only. I refine the hint and try again.")

    agent = LlmAgent(
        name="extraction_agent",
        instruction="Extract the fields; retry.",
        model=counter.model(extract),
        tools=[parse_document_fragment],
    )
    return LoopAgent(name="document_loop", max_iterations=8, sub_agents=[agent])


def back_delegation(counter: WorkCounter) -> BaseAgent:
    """Six levels: each agent dispatches to the other one with a routing tool, and the sixth answers."""

    def route_to_specialist(agent: str, task: str, tool_context: ToolContext) -> dict[str, str]:
        """Dispatch the task to the agent in charge."""
        counter.tool_calls += 1
        tool_context.actions.transfer_to_agent = agent
        return {"routed_to": agent}

    def route(n: int) -> types.Part:
        if n == _LEVELS:
            return text("I give up.")
        return call(
            "route_to_specialist",
            agent="research_specialist" if n % 2 else "orchestrator",
            task=f"Level {n}: " + _words(500, "the task"),
        )

    model = counter.model(route)  # one for both: its call number is the level
    specialist = LlmAgent(
        name="research_specialist",
        description="Researches.",
        instruction="Research.",
        model=model,
        tools=[route_to_specialist],
    )
    return LlmAgent(
        name="orchestrator",
        instruction="Coordinate the research.",
        model=model,
        tools=[route_to_specialist],
        sub_agents=[specialist],
    )


def inflation(counter: WorkCounter) -> BaseAgent:
    """Each user turn adds 600 tokens to a prompt of 3,300: the five latest prompts pass three times the first five at
    turn 22.
    """
    model = counter.model(lambda n: text(_words(500, f"answer {n:02}")))
    return LlmAgent(name="researcher", instruction=_words(3_300, "the instruction"), model=model)


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the seed's table, and why RunGuard differs on purpose."""

    story: DemoStory
    without: str
    guarded: str
    saved: int  # percent
    differs: str


CLAIMS: Final = (
    Claim(
        DemoStory(
            "non_progress",
            "non-progress",
            "LoopAgent, eight iterations of partial_parse_error",
            non_progress,
            _words(800, "the document"),
        ),
        "$4.20, 8 iterations",
        "$0.90, 3 iterations",
        79,
        "The default nudges the model at the third equal failure and stops at the sixth: three equal failures "
        "also happen in runs that succeed.",
    ),
    Claim(
        DemoStory(
            "back_delegation",
            "back-delegation",
            "two agents route to each other, six levels deep",
            back_delegation,
            _words(100, "the question"),
        ),
        "$5.80, 6 levels",
        "$0.95, 2 levels",
        84,
        "By default A to B to A is not a cycle, because ADK returns to a parent this way; the sixth equal "
        "hand-off without new results stops.",
    ),
    Claim(
        DemoStory(
            "inflation",
            "inflation",
            "one session of 40 user turns with a growing history",
            inflation,
            _words(100, "the question"),
            turns=_TURNS,
        ),
        "$9.40, 40 turns",
        "$3.20, 22 turns",
        66,
        "By default growth warns and does not stop, because a long healthy conversation grows in the same way.",
    ),
    Claim(
        DemoStory(
            "over_spawn",
            "over-spawn",
            "an index returns 400 items instead of 8, one parallel agent each",
            over_spawn,
            "Work on the open invoices.",
        ),
        "$380.00, 400 agents",
        "$7.60, 20 agents",
        98,
        "Paying for 20 of 400 agents saves 95 % (the seed's $7.60 is the price of 8); the default refuses more "
        "than 100 branches before the first is paid.",
    ),
)


@dataclass(slots=True)
class Row:
    """One failure mode, measured without a guard and with both guards."""

    claim: Claim
    seed_values: Pair
    defaults: Pair

    def to_dict(self) -> dict[str, Any]:
        claim = self.claim
        return {
            "mode": claim.story.key,
            "about": claim.story.about,
            "seed": {"without": claim.without, "with": claim.guarded, "saved_percent": claim.saved},
            "without": self.defaults.without.to_dict(),
            **{name: _guarded(pair) for name, pair in self.pairs().items()},
            "differs": claim.differs,
        }

    def pairs(self) -> dict[str, Pair]:
        return {"seed_values": self.seed_values, "defaults": self.defaults}


def _guarded(pair: Pair) -> dict[str, Any]:
    data = pair.to_dict()
    return {
        **data["with"],
        **{key: data[key] for key in ("saved_percent", "stopped_by", "message", "warnings", "calls_answered")},
        "settings": pair.settings,
    }


@dataclass(slots=True)
class SeedTable:
    rows: list[Row]
    seconds: float

    @property
    def ok(self) -> bool:
        """With the seed's values every mode is stopped, and no run ends with an error."""
        return all(row.seed_values.stopped and not row.defaults.guarded.error for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "runguard": __version__,
            "google_adk": adk_version,
            "priced_as": PRICED_AS,
            "seconds": round(self.seconds, 2),
            "modes": [row.to_dict() for row in self.rows],
        }


async def play_row(claim: Claim) -> Row:
    with_seed_values = Pair(claim.story, settings=SEED_VALUES)
    with_defaults = Pair(claim.story, without=with_seed_values.without)
    await asyncio.gather(play_without(with_defaults), play_with(with_seed_values), play_with(with_defaults))
    return Row(claim, with_seed_values, with_defaults)


def play_table() -> SeedTable:
    async def all_of_them() -> list[Row]:
        return [await play_row(claim) for claim in CLAIMS]

    began = time.perf_counter()
    with quiet():
        rows = asyncio.run(all_of_them())
    return SeedTable(rows, time.perf_counter() - began)
