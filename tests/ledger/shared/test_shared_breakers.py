"""Forks, breakers, side effects and records over several workers."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

from google.adk.apps import App
from google.adk.models.llm_request import LlmRequest
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types

from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, assert_calls_answered, call, run, text
from tests.kit.processes import Process
from tests.kit.shared_stores import ALICE, CALL, Make, _in_flight, balance, ledger, play
from tests.kit.shared_worker import agent, steps
from tests.kit.stores import Place
from tests.kit.tools import step
from tests.kit.waiting import eventually

# ---- processes that fork, loops and threads -------------------------------------------------------------------------


def test_a_fork_in_the_middle_leaves_two_workers_whose_calls_all_count(
    place: Place, process: Callable[[], Process]
) -> None:
    """Ids that collide would replace each other's amounts: the sum tells."""
    parent = process()
    parent.do("open", url=place.url, usd="10")
    parent.do("run", session="long", calls=2, latency=1.2, wait=False)
    assert eventually(lambda: parent.do("made", session="long") == 1)
    both = parent.do("fork", calls=7)
    assert (both["parent"]["calls"], both["parent"]["texts"]) == (7, ["done"])
    assert both["child"].get("texts") == ["done"], both["child"]
    assert (both["child"]["calls"], both["child"]["flushed"]) == (7, True)
    assert both["child"]["worker"].endswith(f":{both['child']['pid']}"), "a child is a worker of its own"
    parent.do("join", session="long")
    assert parent.do("flush", seconds=10)
    assert balance(place) == (16 * CALL, Decimal(0), 16)
    session = place.connect()
    assert session.running(60) == [], "the child does not keep its parent's runs alive"
    session.close()


def test_loops_in_two_threads_and_the_synchronous_runner_share_one_guard(place: Place, worker: Make) -> None:
    plugin = worker(usd="0.20")
    models = [steps(5, 0.01) for _ in range(4)]
    service = InMemorySessionService()
    runner = Runner(
        app=App(name="app", root_agent=agent(models[0], tools=[step]), plugins=[plugin]), session_service=service
    )
    asyncio.run(service.create_session(app_name="app", user_id="alice", session_id="sync"))
    events: list[Any] = []

    def sync() -> None:
        message = types.Content(role="user", parts=[types.Part(text="go")])
        events.extend(runner.run(user_id="alice", session_id="sync", new_message=message))

    threads = [threading.Thread(target=sync)]
    threads += [
        threading.Thread(target=lambda n=n: asyncio.run(play(plugin, models[n], session=f"loop {n}")))
        for n in (1, 2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(model.calls for model in models) == 10
    assert events, "the synchronous runner told its events"
    assert plugin.guard.guard_errors == 0
    assert plugin.flush(10)
    assert balance(place) == (Decimal("0.20"), Decimal(0), 10)


# ---- breakers and side effects --------------------------------------------------------------------------------------


async def _break(plugin: RunGuardPlugin, times: int) -> None:
    """Let a tool fail in so many runs."""

    def flaky(q: int) -> dict[str, int]:
        """Down."""
        raise ConnectionError("down")

    for number in range(times):
        model = ScriptedModel([call("flaky", q=number), text("done")])
        await run(agent(model, tools=[flaky]), plugins=[plugin], session_id=f"break{number}", catch=True)
    assert plugin.flush(10)


class _Together(ScriptedModel):
    """Two models that answer at the same moment."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        if not self.calls:
            await self.prompt_tokens.barrier.wait()
        async for response in super().generate_content_async(llm_request, stream):
            yield response


class _Meeting:
    def __init__(self, parties: int) -> None:
        self.barrier = asyncio.Barrier(parties)

    def __call__(self, _: int) -> int:
        return 1_000


async def test_one_probe_goes_through_a_broken_tool_whichever_worker_makes_it(place: Place, worker: Make) -> None:
    policy: dict[str, Any] = {"max_tool_failures": 2, "half_open_reset_seconds": 0.7}
    one, two = worker(**policy), worker(**policy)
    await _break(one, 2)
    made: list[str] = []

    def tool_of(name: str) -> Callable[[int], Any]:
        async def flaky(q: int) -> dict[str, int]:
            """Works again."""
            made.append(name)
            await asyncio.sleep(0.2)
            return {"ok": q}

        return flaky

    blocked = await run(
        agent(ScriptedModel([call("flaky", q=9), text("done")]), tools=[tool_of("early")]),
        plugins=[two],
        session_id="early",
    )
    assert made == [], "what one worker found out, the other knows"
    assert_calls_answered(blocked.session)
    await asyncio.sleep(0.8)
    meeting = _Meeting(2)

    async def probe(plugin: RunGuardPlugin, name: str, q: int) -> None:
        model = _Together([call("flaky", q=q), text("done")], prompt_tokens=meeting)  # type: ignore[call-arg]
        await run(agent(model, tools=[tool_of(name)]), plugins=[plugin], session_id=name)

    await asyncio.gather(probe(one, "one", 10), probe(two, "two", 11))
    assert len(made) == 1, f"one probe, not {made}"
    assert one.flush(10)
    assert two.flush(10)
    made.clear()
    await asyncio.gather(
        *(
            run(agent(steps_of("flaky"), tools=[tool_of(str(n))]), plugins=[p], session_id=f"after{n}")
            for n, p in enumerate((one, two))
        )
    )
    assert sorted(made) == ["0", "1"], "its success closed the breaker for both"


def steps_of(tool: str) -> ScriptedModel:
    return ScriptedModel([call(tool, q=20), text("done")])


async def test_a_failed_probe_keeps_the_tool_closed_for_every_worker(place: Place, worker: Make) -> None:
    policy: dict[str, Any] = {"max_tool_failures": 2, "half_open_reset_seconds": 0.7}
    one, two = worker(**policy), worker(**policy)
    await _break(one, 2)
    await asyncio.sleep(0.8)
    await _break(two, 1)
    made: list[int] = []

    def flaky(q: int) -> dict[str, int]:
        """Works."""
        made.append(q)
        return {"ok": q}

    for plugin in (one, two):
        await run(agent(steps_of("flaky"), tools=[flaky]), plugins=[plugin], session_id="after")
    assert made == []


async def test_a_side_effect_happens_once_over_workers(place: Place, worker: Make) -> None:
    rule = {"tools": {"pay": {"once": True}}}
    one, two = worker(**rule), worker(**rule)
    paid: list[tuple[str, int]] = []

    def pay_in(name: str) -> Callable[[int], Any]:
        async def pay(amount: int) -> dict[str, int]:
            """Pays."""
            paid.append((name, amount))
            await asyncio.sleep(0.3)
            return {"paid": amount}

        return pay

    async def turn(
        plugin: RunGuardPlugin, name: str, amount: int, session: str, meeting: _Meeting | None = None
    ) -> list[Any]:
        script = [call("pay", amount=amount), text("done")]
        model = _Together(script, prompt_tokens=meeting) if meeting is not None else ScriptedModel(script)  # type: ignore[call-arg]
        result = await run(agent(model, tools=[pay_in(name)]), plugins=[plugin], session_id=session)
        return [response.response for event in result.session.events for response in event.get_function_responses()]

    await turn(one, "one", 5, "s")
    assert one.flush(10)
    (answer,) = await turn(two, "two", 5, "s")
    assert (paid, answer["status"]) == ([("one", 5)], "not_executed")
    await turn(two, "two", 5, "another session")
    await turn(two, "two", 6, "s")
    assert paid[1:] == [("two", 5), ("two", 6)]
    paid.clear()
    answers = await asyncio.gather(turn(one, "one", 7, "s", meeting := _Meeting(2)), turn(two, "two", 7, "s", meeting))
    assert len(paid) == 1, "while one is at it, the other waits for nothing and does nothing"
    assert sorted(answer.get("status", "done") for (answer,) in answers) == ["done", "not_executed"]


async def test_a_side_effect_whose_worker_died_is_free_again_after_a_while(place: Place, worker: Make) -> None:
    """A claim that nobody finishes lasts as long as a hold."""
    one, two = (worker(tools={"pay": {"once": True}}, hold_seconds=1.0) for _ in range(2))
    paid: list[int] = []

    async def pay(amount: int) -> dict[str, int]:
        """Pays."""
        paid.append(amount)
        return {"paid": amount}

    info = replace(await _info(one), session="s1")
    assert await one.guard.tool_gate.once.claim(info, one.guard.tools.once_identity("pay", {"amount": 5}))
    script = [call("pay", amount=5), text("done")]
    await run(agent(ScriptedModel(script), tools=[pay]), plugins=[two])
    assert paid == [], "pending"
    await asyncio.sleep(1.1)
    await run(agent(ScriptedModel(script), tools=[pay]), plugins=[two])
    assert paid == [5]


async def _info(plugin: RunGuardPlugin) -> Any:
    model = ScriptedModel([text("done")], latency_s=0.05)
    running = asyncio.create_task(run(agent(model), plugins=[plugin]))
    await _in_flight(model)
    (one,) = plugin.guard.runs.values()
    await running
    return one.info


# ---- records and signs of life --------------------------------------------------------------------------------------


async def test_another_process_reads_who_spent_what_and_why_runs_were_stopped(place: Place, worker: Make) -> None:
    plugin = worker(usd="0.06")
    helper = agent(ScriptedModel([text("helped")]), "helper", description="helps")
    model = ScriptedModel(lambda n, _: call("transfer_to_agent", agent_name="helper") if n == 1 else text("x"))
    root = agent(model, "boss", sub_agents=[helper])
    await run(root, plugins=[plugin], user_id="alice")
    await play(plugin, steps(5), session="too much")
    assert plugin.flush(10)
    session = place.connect()
    runs, calls, trips = (
        [(ref, json.loads(body)) for _, ref, body in session.tail(kind, 100)] for kind in ("run", "call", "trip")
    )
    session.close()
    assert [(r["session"], r["user"], r["stopped"], r["model_calls"]) for _, r in runs] == [
        ("s1", "alice", None, 2),
        ("too much", "alice", "budget", 1),
    ]
    assert {name: figures["usd"] for name, figures in runs[0][1]["spend"]["by_agent"].items()} == {
        "boss": "0.02",
        "helper": "0.02",
    }
    assert [(ref, c["agent"], c["model"], c["usd"], c["input"], c["output"]) for ref, c in calls] == [
        (runs[0][0], "boss", "scripted-1", "0.02", 1_000, 250),
        (runs[0][0], "helper", "scripted-1", "0.02", 1_000, 250),
        (runs[1][0], "worker", "scripted-1", "0.02", 1_000, 250),
    ]
    assert [(ref == t["id"], t["rule"], t["run_id"], t["scope_id"]) for ref, t in trips] == [
        (True, "budget", runs[1][0], ALICE)
    ]
    told = json.dumps([runs, calls, trips])
    assert "helped" not in told, "records have numbers and names, and nobody's words"


async def test_a_live_run_is_seen_by_others_and_forgotten_at_its_end(place: Place, worker: Make) -> None:
    plugin = worker(usd="1")
    model = ScriptedModel([text("done")], latency_s=1.3)
    running = asyncio.create_task(play(plugin, model))
    session = await asyncio.to_thread(place.connect)
    assert await asyncio.to_thread(eventually, lambda: len(session.running(5)) == 1, 1.2)
    ((run_id, who, at, body),) = session.running(5)
    seen = json.loads(body)
    assert (run_id, who, seen["user"], seen["in_flight"]) == (seen["run"], ledger(plugin).worker, "alice", 1)
    assert abs(session.now() - at) < 5
    await running
    assert plugin.flush(10)
    assert session.running(60) == []
    session.close()
