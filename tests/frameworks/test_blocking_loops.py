"""``langgraph dev`` makes every blocking call on an event loop an error: a guard still works there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("blockbuster")

_BEGIN = """
import asyncio, sys
import langchain.agents, runguard.calls.functions, runguard.langchain
from blockbuster import BlockBuster
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from runguard import guard_async
from runguard.langchain import RunGuardMiddleware

async def call(**request):
    return {"model": "gpt-4o", "usage": {"prompt_tokens": 10, "completion_tokens": 5}}

def function(**settings):
    return guard_async(call, budget={"max_usd": 1}, **settings)

async def use(guarded):
    for _ in range(2):
        await guarded(model="gpt-4o", messages=[{"role": "user", "content": "hello"}])
    spent = await asyncio.to_thread(guarded.spend)
    assert (str(spent["usd"]), spent["calls"], spent["estimated_calls"]) == ("0.00015", 2, 0), spent
    assert guarded.__runguard__.guard.guard_errors == 0

async def use_agent(guard):
    usage = {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}
    model = GenericFakeChatModel(messages=iter([AIMessage(content="hi", usage_metadata=usage)]))
    agent = langchain.agents.create_agent(model, tools=[], middleware=[guard])
    assert (await agent.ainvoke({"messages": [("user", "hello")]}))["messages"][-1].content == "hi"
    assert (await asyncio.to_thread(guard.spend))["calls"] == 1
    assert guard.guard.guard_errors == 0

def run(main):
    BlockBuster().activate()
    asyncio.run(main())
"""
_ENDS = {
    "made before": "made = function()\nrun(lambda: use(made))",
    "made on the loop": "async def main(): await use(function())\nrun(main)",
    "genai-prices": "async def main(): await use(function(prices_source='genai-prices'))\nrun(main)",
    "a store": "async def main(): await use(function(store='sqlite:///accounts.db'))\nrun(main)",
    "an agent": """
async def main():
    await use_agent(RunGuardMiddleware(max_usd=1, on_unpriced={"input": 1, "output": 1}))
run(main)""",
    "a policy file": """
open("runguard.toml", "w").write("max_model_calls = 7")
async def main():
    guard = RunGuardMiddleware()
    assert guard.guard.policy.max_model_calls == 7
    await use_agent(guard)
run(main)""",
}


# Each in a process of its own, forked from one that has imported the framework, in a folder of its own.
_EACH = """
import os
for name, end in {ends!r}.items():
    os.mkdir(name)
    if (child := os.fork()) == 0:
        os.chdir(name)
        exec(end)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
print("all")
"""


def test_a_guard_works_where_blocking_the_loop_is_an_error(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RUNGUARD")}
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + _EACH.format(ends=_ENDS)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "all\n"), done.stderr[-3_000:]
