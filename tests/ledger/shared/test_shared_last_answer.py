"""Last answers on every store: two workers share one budget, and no cap is exceeded."""

import asyncio
from decimal import Decimal
from typing import Any

from google.genai import types

from runguard import Budget
from runguard.engine.final_answer import INSTRUCTION
from runguard.testing import ScriptedModel, call, run, text
from tests.kit.rule_agents import Tool, agent
from tests.kit.shared_stores import Make

CAP = Decimal("0.30")
SHORT = types.GenerateContentConfig(max_output_tokens=50)


def busy(n: int, request: Any) -> Any:
    is_last = any(part.text == INSTRUCTION for part in request.contents[-1].parts)
    return text("what I have") if is_last else call("work", q=n)


async def test_two_workers_end_with_answers_within_the_cap(worker: Make) -> None:
    limits: dict[str, Any] = {
        "budgets": [Budget(usd=CAP, per="user", window="1d")],
        "prices": {"scripted-1": {"input": 10, "output": 40}},
        "tokens": lambda request: 100,
        "min_output_tokens": 50,
        "max_wait_seconds": 0.2,
        "final_answer": True,
    }
    workers = [worker(**limits), worker(**limits)]

    async def work(n: int) -> list[str]:
        model = ScriptedModel(busy, prompt_tokens=100, output_tokens=50)
        root = agent(model, Tool("work", lambda n: {"done": n}), generate_content_config=SHORT)
        result = await run(root, plugins=[workers[n % 2]], user_id="alice", session_id=f"s{n}")
        return list(result.texts)

    said = await asyncio.gather(*(work(n) for n in range(4)))
    assert all(each.flush(10) for each in workers)
    (status,) = workers[0].budgets()
    assert status.spent <= CAP
    assert status.reserved == 0
    assert said == [["what I have"]] * 4
