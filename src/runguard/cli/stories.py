"""The agents of the demo. A story is a function of a ``WorkCounter``, which counts where the work is really done.

The scripted models ignore every notice, like a model that is stuck. Only the guard can end a runaway early.
"""

import json
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from google.adk.agents import BaseAgent, LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

from runguard.core.identity import CHARS_PER_TOKEN
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Rates, Usage
from runguard.testing import ScriptedModel, call, text, transfer

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
        """A model that plays ``script`` (call number -> step) and bills what the request
        and the answer really weigh.
        """

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


# ---- runaways -------------------------------------------------------------------------------------------------------


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
    """The index should have listed 8 items; a broken filter lists 400, and every item gets its own agent."""

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

    async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        items = int(ctx.session.state["items"])
        agents: list[BaseAgent] = [
            LlmAgent(name=f"item_{n}", instruction="Work on your item.", model=self.worker) for n in range(1, items + 1)
        ]
        async for event in ParallelAgent(name="workers", sub_agents=agents).run_async(ctx):
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


# ---- healthy look-alikes --------------------------------------------------------------------------------------------


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
    """The test fails in the same way seven times: each time after another edit, which is work."""

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
