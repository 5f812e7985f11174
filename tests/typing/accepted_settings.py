"""What a type checker must accept."""

from decimal import Decimal
from typing import Any

import runguard
from runguard import Budget, GuardedLlm, ModelLimits, Price, ToolRule
from runguard.adk import RunGuardPlugin


def call_model(prompt: str) -> dict[str, Any]:
    return {"usd": 0.01, "response": prompt}


async def call_model_later(prompt: str) -> dict[str, Any]:
    return {"usd": 0.01, "response": prompt}


RunGuardPlugin(max_usd=0.5, budgets=[Budget(usd=5, per="user", window="1d")], mode="shadow")
RunGuardPlugin(
    max_usd="0.50",
    tools={"look": ToolRule(polling=True), "page_*": {"paging": True}},
    rules={"stall": False, "cycle": {"stop": 3}},
)
RunGuardPlugin(max_usd=Decimal("0.5"), prices={"mine-1": {"input": 1, "output": 2}}, on_unpriced="tokens", alerts="log")
RunGuardPlugin(
    prices={"mine-1": Price(input=Decimal(1), output=Decimal(2))},
    models={"mine-1": ModelLimits(context_window=100_000)},
)
runguard.install(max_usd=1, store="sqlite:///guard.db", on_outage="open")
GuardedLlm("gemini-2.5-flash", max_usd=1.50)

answer: dict[str, Any] = runguard.guard(call_model, budget={"max_usd": 2.0, "per_day": 10}, loop={"repeats": 3})(
    "hello"
)
runguard.guard_async(call_model_later, budget={"max_usd": 2.0}, context={"max_context_tokens": 100_000})


@runguard.guard(budget={"max_calls": 5}, breaker=True, cost=lambda result: result["usd"])
def decorated(prompt: str) -> str:
    return prompt


class Writer:
    @runguard.guard(budget={"max_usd": 1})
    def write(self, prompt: str) -> str:
        return prompt

    @runguard.guard_async(budget={"max_usd": 1})
    async def write_later(self, prompt: str) -> str:
        return prompt


async def written() -> str:
    return await Writer().write_later("hello")


text: str = decorated("hello")
text = Writer().write("hello")
spent: dict[str, Any] = decorated.spend()
spent = Writer().write.spend()
decorated.extend(usd=1)
decorated.reset()
rules: list[str] = [trip.rule for trip in decorated.trips]
with runguard.run(user="alice", budget={"max_usd": 1}):
    decorated("hello")
