"""The four failure modes of the article that RunGuard's names come from, here called the seed, run on real ADK.

    python benchmarks/seed_table.py

Each mode is an agent built after the words of the seed. It runs without a guard, with ``ADKCostBreaker`` on each agent,
with the seed's ``install()``, and with RunGuard's defaults. Scripted models: no network, no key. The output is the
table of ``docs/contributing/seed-table.md``.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Any, Final

from google.adk.agents import BaseAgent, LlmAgent, LoopAgent
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from runguard.adk.cost_breaker import ADKCostBreaker
from runguard.adk.plugin import RunGuardPlugin
from runguard.cli.demo import defaults
from runguard.cli.stories import (
    DemoStory,
    OneAgentPerItem,
    Side,
    WorkCounter,
    over_spawn,
    play_guarded,
    play_story,
    quiet,
)
from runguard.testing import call, text

CLASS, INSTALL, DEFAULTS = "`ADKCostBreaker`", "`install(...)`", "defaults"
SEED_VALUES: Final[dict[str, Any]] = {
    "max_identical_tool_results": 3,
    "max_delegation_depth": 5,
    "max_event_cost_ratio": 3.0,
    "max_concurrent_agents": 20,
}
# With it the ratio is met at the seed's turn 22. The seed names no sizes.
INSTRUCTION_TOKENS = 3_300
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
    return LlmAgent(name="researcher", instruction=_words(INSTRUCTION_TOKENS, "the instruction"), model=model)


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
        "The class trips at the first re-entry, as the seed's does. install() and the defaults do not, because ADK "
        "returns to a parent this way; the sixth equal hand-off without new results stops. max_reentries=1 makes "
        "install() as strict.",
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
    """One failure mode, measured without a guard and with three guards."""

    claim: Claim
    without: Side
    guarded: dict[str, Side]  # by the guard's name in the table

    def saved(self, guard: str) -> float:
        """Return the share of the tokens that were not spent, in percent."""
        before = self.without.counter.tokens
        return 100 * (before - self.guarded[guard].counter.tokens) / before


async def play_class(story: DemoStory, side: Side) -> None:
    """Run a story with the seed's class on each agent."""
    with defaults():
        breaker = ADKCostBreaker(on_stop="stop", on_decision=side.decisions.append, **SEED_VALUES)
    attached = replace(story, build=lambda counter: attach(breaker, story.build(counter)))
    await play_guarded(attached, side, breaker._plugin, [])


async def play_plugin(story: DemoStory, side: Side, settings: dict[str, Any]) -> None:
    """Run a story with the plugin, as ``install(**settings)`` would add it."""
    with defaults():
        plugin = RunGuardPlugin(on_decision=side.decisions.append, **settings)
    await play_guarded(story, side, plugin, [plugin])


def attach(breaker: ADKCostBreaker, agent: BaseAgent) -> BaseAgent:
    """Attach a breaker to every agent of a tree, also to those that it builds while it works."""
    breaker.install_on_agent(agent)
    if isinstance(agent, OneAgentPerItem):
        agent.prepare = lambda built: attach(breaker, built)
    for below in agent.sub_agents:
        attach(breaker, below)
    return agent


async def play_row(claim: Claim) -> Row:
    story, row = claim.story, Row(claim, Side(), {name: Side() for name in (CLASS, INSTALL, DEFAULTS)})
    await asyncio.gather(
        play_story(story, row.without, []),
        play_class(story, row.guarded[CLASS]),
        play_plugin(story, row.guarded[INSTALL], SEED_VALUES),
        play_plugin(story, row.guarded[DEFAULTS], {}),
    )
    return row


def play_table() -> list[Row]:
    async def all_of_them() -> list[Row]:
        return [await play_row(claim) for claim in CLAIMS]

    with quiet():
        return asyncio.run(all_of_them())


def lines(row: Row) -> list[str]:
    """Return the lines of one mode as the page shows them."""
    before, found = row.without.counter, []
    for guard, side in row.guarded.items():
        after = side.counter
        calls, tokens = f"{before.model_calls} → {after.model_calls}", f"{before.tokens:,} → {after.tokens:,}"
        saved = f"{row.saved(guard):.1f} % | {row.claim.saved} %"
        found.append(f"| {row.claim.story.title} | {guard} | {calls} | {tokens} | {saved} |")
    return found


if __name__ == "__main__":
    print("| failure mode | guard | model calls | tokens | saved | seed |", "|---|---|---|---|---|---|", sep="\n")
    for played in play_table():
        print(*lines(played), sep="\n")
