"""The agents of ``runguard demo``, run without and with the guard.

``demo`` loads this module, which imports ADK, and prints what it measures. ``doctor`` uses ``defaults`` and ``quiet``.
"""

import asyncio
import json
import logging
import sys
import time
import warnings
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from importlib.util import find_spec
from typing import Any

from google.adk.agents import BaseAgent, LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.sessions import InMemorySessionService, Session
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.tool_context import ToolContext
from google.adk.version import __version__ as adk_version
from google.genai import types

from runguard._version import __version__
from runguard.adk.plugin import RunGuardPlugin
from runguard.cli.demo import defaults
from runguard.core.decision import Action, Decision, Trip
from runguard.core.identity import CHARS_PER_TOKEN
from runguard.core.money import to_usd
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Rates, Usage
from runguard.testing import Recording, ScriptedModel, assert_calls_answered, call, run, text, transfer

# ---- the agents of the demo; a story is a function of a ``WorkCounter``, which counts where work is done
# The scripted models ignore every notice, like a model that is stuck. Only the guard can end a runaway early.

PRICED_AS = "gemini-2.5-flash"  # the scripted models bill what this one would, at list price


@cache
def list_price() -> Rates:
    price = Pricing().rates(PRICED_AS, time.time())  # noqa: TID251 - the price of today
    assert isinstance(price, Rates), price
    return price


@dataclass(slots=True)
class WorkCounter:
    """The usage of one run, counted at the models and inside the tools, independently of the guard."""

    tool_calls: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    nano_usd: int = 0
    first_prompt: int = 0
    largest_prompt: int = 0
    models: list[ScriptedModel] = field(default_factory=list)

    @property
    def model_calls(self) -> int:
        return sum(model.calls for model in self.models)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def model(self, script: Callable[[int], types.Part], *, latency_s: float = 0.0) -> ScriptedModel:
        """Return a model that plays ``script`` (call number -> step) and bills what request and answer really weigh."""

        def answer(number: int, request: LlmRequest) -> LlmResponse:
            content = types.Content(role="model", parts=[script(number)])
            prompt = _characters(request) // CHARS_PER_TOKEN
            output = max(_weight(content) // CHARS_PER_TOKEN, 1)
            self.first_prompt = self.first_prompt or prompt
            self.largest_prompt = max(self.largest_prompt, prompt)
            self.prompt_tokens += prompt
            self.output_tokens += output
            self.nano_usd += list_price().cost(Usage(prompt, output))
            usage = types.GenerateContentResponseUsageMetadata(
                prompt_token_count=prompt, candidates_token_count=output, total_token_count=prompt + output
            )
            return LlmResponse(content=content, usage_metadata=usage)

        model = ScriptedModel(answer, latency_s=latency_s, model=PRICED_AS)
        self.models.append(model)
        return model


def _characters(request: LlmRequest) -> int:
    """Return everything that a provider would bill: instruction, tool declarations, history."""
    config = request.config
    total = len(str(config.system_instruction or ""))
    for tool in config.tools or []:
        if isinstance(tool, types.Tool):
            total += sum(
                len(declared.model_dump_json(exclude_none=True)) for declared in tool.function_declarations or []
            )
    return total + sum(_weight(content) for content in request.contents)


def _weight(content: types.Content) -> int:
    total = 0
    for part in content.parts or []:
        total += len(part.text or "")
        if part.function_call is not None:
            total += len(part.function_call.name or "") + len(json.dumps(part.function_call.args, default=str))
        if part.function_response is not None:
            total += len(part.function_response.name or "") + len(
                json.dumps(part.function_response.response, default=str)
            )
    return total


@dataclass(frozen=True, slots=True)
class DemoStory:
    """One agent to run, with its description."""

    key: str
    title: str
    about: str
    build: Callable[[WorkCounter], BaseAgent]
    message: str
    note: str = ""
    window: int | None = None  # number of latest events that the agents see; None: all
    turns: int = 1  # how often the user sends the message in one session


# ---- runaways


def stalled_loop(counter: WorkCounter) -> BaseAgent:
    """15 x 16 calls inside the loop and 16 around it: 256 model calls, 120 tool runs, nothing parsed."""

    def parse_document(fragment: str, hint: str) -> dict[str, Any]:
        """Parse one fragment of the document."""
        counter.tool_calls += 1
        return {"status": "partial_parse_error", "data": None}

    def extract(n: int) -> types.Part:
        return (
            call("parse_document", fragment="invoice, page 1", hint=f"hint {n}")
            if n % 2
            else text(f"Parsed in part only. I refine the hint (attempt {n // 2}).")
        )

    def classify(n: int) -> types.Part:
        return (
            call("extraction", request=f"Extract the invoice. Classification hint {n}.")
            if n <= 15
            else text("The invoice could not be extracted.")
        )

    extractor = LlmAgent(
        name="extractor",
        description="Extracts fields.",
        instruction="Extract the fields; retry.",
        model=counter.model(extract),
        tools=[parse_document],
    )
    loop = LoopAgent(
        name="extraction",
        description="Extracts a document, in up to eight rounds.",
        max_iterations=8,
        sub_agents=[extractor],
    )
    return LlmAgent(
        name="classifier",
        instruction="Classify the document and have it extracted.",
        model=counter.model(classify),
        tools=[AgentTool(loop)],
    )


def handoff_cycle(counter: WorkCounter) -> BaseAgent:
    """Each agent thinks that the other one is responsible."""
    refunds = LlmAgent(
        name="refunds",
        description="Refunds.",
        instruction="Pay refunds; all else is for billing.",
        model=counter.model(lambda n: transfer("billing")),
    )
    return LlmAgent(
        name="billing",
        description="Bills.",
        instruction="Explain bills; all else is for refunds.",
        model=counter.model(lambda n: transfer("refunds")),
        sub_agents=[refunds],
    )


def growing_history(counter: WorkCounter) -> BaseAgent:
    """60 model calls. After the third source nothing is new, yet every prompt carries all that was read before."""
    sources = ("annual report", "press release", "analyst note")

    def read_source(source: str) -> dict[str, str]:
        """Read one source."""
        counter.tool_calls += 1
        return {
            "source": source,
            "text": " ".join(
                f"Paragraph {k} of the {source} speaks of markets, products and people, not of the figure."
                for k in range(1, 21)
            ),
        }

    def research(n: int) -> types.Part:
        return (
            call("read_source", source=sources[(n - 1) % len(sources)])
            if n < 60
            else text("The figure is in none of the sources.")
        )

    return LlmAgent(
        name="researcher",
        instruction="Find the figure in the sources.",
        model=counter.model(research),
        tools=[read_source],
    )


def over_spawn(counter: WorkCounter) -> BaseAgent:
    """List 400 items where 8 were meant, because of a broken filter, and start an agent for each."""

    def list_items(query: str, tool_context: ToolContext) -> dict[str, int]:
        """Look up the items to work on."""
        counter.tool_calls += 1
        tool_context.state["items"] = 400
        return {"items": 400}

    def look_up(n: int) -> types.Part:
        return call("list_items", query="open invoices") if n == 1 else text("400 items found.")

    index = LlmAgent(name="index", instruction="List the items.", model=counter.model(look_up), tools=[list_items])
    worker = counter.model(lambda n: text("This item is done."), latency_s=0.01)
    return SequentialAgent(name="pipeline", sub_agents=[index, OneAgentPerItem(name="dispatch", worker=worker)])


class OneAgentPerItem(BaseAgent):
    """Builds a ParallelAgent of the size that the index reports, as dynamic pipelines do."""

    worker: Any
    prepare: Any = None  # called with the agent that it builds

    async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        items = int(ctx.session.state["items"])
        agents: list[BaseAgent] = [
            LlmAgent(name=f"item_{n}", instruction="Work on your item.", model=self.worker) for n in range(1, items + 1)
        ]
        workers = ParallelAgent(name="workers", sub_agents=agents)
        if self.prepare is not None:
            self.prepare(workers)
        async for event in workers.run_async(ctx):
            yield event


STORIES = (
    DemoStory(
        "stalled_loop",
        "stalled loop",
        "a LoopAgent retries a tool that never gets further; its caller re-submits the document 15 times",
        stalled_loop,
        "Extract this invoice.",
        "The guard counts the call of the inner agent as a tool call too; the table counts the tool alone.",
    ),
    DemoStory(
        "handoff_cycle",
        "hand-off cycle",
        "two agents transfer to each other without end",
        handoff_cycle,
        "Where is my money?",
        "The agents see the latest 24 events only; with the whole history, what is spent without the guard "
        "would be far more.",
        window=24,
    ),
    DemoStory(
        "growing_history",
        "growing history",
        "60 calls over the same three sources, each prompt larger than the one before",
        growing_history,
        "What was the figure?",
        "By default growth alone only warns; the stop came because nothing new was read.",
    ),
    DemoStory(
        "over_spawn",
        "400-way fan-out",
        "an index returns 400 items instead of 8, and each gets a parallel agent",
        over_spawn,
        "Work on the open invoices.",
    ),
)


# ---- healthy look-alikes


def polling(counter: WorkCounter) -> BaseAgent:
    def check_job(job: str) -> dict[str, Any]:
        """Ask how far a job is."""
        counter.tool_calls += 1
        return (
            {"status": "RUNNING", "progress": 8 * counter.tool_calls} if counter.tool_calls < 12 else {"status": "DONE"}
        )

    model = counter.model(lambda n: call("check_job", job="j-1") if n <= 12 else text("The job is done."))
    return LlmAgent(name="operator", model=model, tools=[check_job])


def paging(counter: WorkCounter) -> BaseAgent:
    def list_orders(cursor: int) -> dict[str, Any]:
        """One page of orders."""
        counter.tool_calls += 1
        return {"orders": [f"order {cursor + k}" for k in range(1, 6)], "next": cursor + 5 if cursor < 70 else None}

    model = counter.model(lambda n: call("list_orders", cursor=5 * (n - 1)) if n <= 15 else text("75 orders."))
    return LlmAgent(name="lister", model=model, tools=[list_orders])


def batch(counter: WorkCounter) -> BaseAgent:
    def send_invoice(number: int) -> dict[str, str]:
        """Send one invoice."""
        counter.tool_calls += 1
        return {"status": "ok"}

    model = counter.model(lambda n: call("send_invoice", number=n) if n <= 30 else text("All 30 are sent."))
    return LlmAgent(name="sender", model=model, tools=[send_invoice])


def edit_test_edit(counter: WorkCounter) -> BaseAgent:
    """Fail a test in the same way seven times, each time after another edit, which is work."""

    def edit_file(path: str, line: int) -> dict[str, Any]:
        """Change one line."""
        counter.tool_calls += 1
        return {"status": "ok", "changed": line}

    def run_tests() -> dict[str, Any]:
        """Run the tests."""
        counter.tool_calls += 1
        return {"status": "failed", "error": "test_total: 3 != 4"} if counter.tool_calls < 16 else {"status": "passed"}

    def work(n: int) -> types.Part:
        if n > 16:
            return text("The tests pass.")
        return call("edit_file", path="total.py", line=10 + n // 2) if n % 2 else call("run_tests")

    return LlmAgent(name="coder", model=counter.model(work), tools=[edit_file, run_tests])


def return_to_parent(counter: WorkCounter) -> BaseAgent:
    def find_order(number: int) -> dict[str, Any]:
        """Look up an order."""
        counter.tool_calls += 1
        return {"order": number, "state": "delivered"}

    orders = LlmAgent(
        name="orders",
        description="Knows the orders.",
        model=counter.model(lambda n: call("find_order", number=7) if n == 1 else transfer("desk")),
        tools=[find_order],
    )
    return LlmAgent(
        name="desk",
        model=counter.model(lambda n: transfer("orders") if n == 1 else text("Order 7 was delivered.")),
        sub_agents=[orders],
    )


def fan_out(counter: WorkCounter) -> BaseAgent:
    model = counter.model(lambda n: text("This part is done."), latency_s=0.01)
    return ParallelAgent(name="crowd", sub_agents=[LlmAgent(name=f"part_{n}", model=model) for n in range(1, 31)])


LOOK_ALIKES = (
    DemoStory(
        "polling", "polling that moves", "12 polls of one job, each a little further", polling, "Wait for the job."
    ),
    DemoStory("paging", "paging", "15 pages of one list", paging, "Count the orders."),
    DemoStory("batch", "a batch of 30", "30 different items, 30 times the answer ok", batch, "Send the invoices."),
    DemoStory(
        "edit_test_edit",
        "edit, test, edit",
        "the same test fails seven times, with an edit before each",
        edit_test_edit,
        "Fix the total.",
    ),
    DemoStory(
        "return_to_parent",
        "return to the parent",
        "a sub-agent does its part and hands back",
        return_to_parent,
        "Where is order 7?",
    ),
    DemoStory("fan_out", "a fan-out of 30", "30 parallel branches, one call each", fan_out, "Do all parts."),
)


# ---- each story run twice in parallel, without and with the guard, and both measured

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
    with defaults():
        plugin = RunGuardPlugin(on_decision=pair.guarded.decisions.append)  # on_decision only listens
    without, guarded = pair.without, pair.guarded
    await asyncio.gather(play_story(pair.story, without, []), play_guarded(pair.story, guarded, plugin, [plugin]))
    return pair


async def play_guarded(story: DemoStory, side: Side, plugin: RunGuardPlugin, plugins: list[RunGuardPlugin]) -> None:
    """Run a story and note how ``plugin`` ended it. ``plugins`` are those of the runner."""
    recording = await play_story(story, side, plugins)
    plugin.flush()
    side.billed = plugin.spend()["usd"]
    side.trip = next(iter(plugin.trips), None)
    try:
        assert_calls_answered(recording.session)
    except AssertionError:
        side.answered = False


async def play_story(story: DemoStory, side: Side, plugins: list[RunGuardPlugin]) -> Recording:
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


# ---- environment


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
