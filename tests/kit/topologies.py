"""Every shape an ADK application can take, each in two versions: one that never ends by itself and a healthy
look-alike.

A topology is a function of a ``Team``. The team hands out agents with a scripted model each, counts what really reached
a model, and can be told to calm down, so that the user's next turn finds agents that simply answer.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from importlib.metadata import version
from typing import Any

import pytest
from google.adk.agents import BaseAgent, LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.callback_context import CallbackContext
from google.adk.agents.invocation_context import InvocationContext
from google.adk.events import Event
from google.adk.models.llm_request import LlmRequest
from google.adk.tools import exit_loop
from google.adk.tools.agent_tool import AgentTool
from google.adk.workflow import JoinNode, RetryConfig, Workflow, node
from google.genai import types
from pydantic import BaseModel

from runguard.testing import ScriptedModel, call, calls, text, transfer

Step = types.Part | Sequence[types.Part]
ADK = tuple(int(part) for part in version("google-adk").split(".")[:2])
OLDER_TASKS = ADK < (2, 6)  # a task has no branch of its own
LOST_TASKS = ADK < (2, 12)  # a task that is called from inside of a task is not started
MAKES_NO_CACHES = ADK == (2, 4)  # it cannot create a context cache with a newer google-genai
IS_NEWEST = ADK >= (2, 13)
EXIT = call("exit_loop")


def step(n: int) -> dict[str, int]:
    """A tool that gets somewhere: a new answer to every new argument."""
    return {"done": n}


class Answer(BaseModel):
    word: str


class Wish(BaseModel):
    room: str


class Team:
    """The agents of one topology. ``endless`` picks the version, ``calm`` ends whatever is asked next."""

    def __init__(self, *, endless: bool) -> None:
        self.endless = endless
        self.calm = False
        self.models: dict[str, ScriptedModel] = {}

    @property
    def calls(self) -> int:
        """Calls that really reached a model, all agents together."""
        return sum(model.calls for model in self.models.values())

    @property
    def requests(self) -> list[LlmRequest]:
        return [request for model in self.models.values() for request in model.requests]

    def agent(
        self,
        name: str,
        healthy: Sequence[Step],
        endless: Callable[[int], Step],
        *,
        calm: Step | None = None,
        **options: Any,
    ) -> LlmAgent:
        def script(n: int, _: LlmRequest) -> Step:
            if self.calm:
                return calm or text(f"{name} is calm")
            return endless(n) if self.endless else healthy[min(n, len(healthy)) - 1]

        self.models[name] = model = ScriptedModel(script)
        return LlmAgent(
            name=name, description=f"does the work of {name}", model=model, **{"output_key": f"{name}_said", **options}
        )

    def worker(self, name: str, **options: Any) -> LlmAgent:
        """Healthy: two steps and an answer. Endless: one step after the other, each with a new answer."""
        return self.agent(
            name,
            [call("step", n=1), call("step", n=2), text(f"{name} is done")],
            lambda n: call("step", n=n),
            tools=[step],
            **options,
        )

    def speaker(self, name: str, **options: Any) -> LlmAgent:
        """One call, one answer; endless only if asked for ever."""
        return self.agent(name, [text(f"{name} is done")], lambda n: text(f"{name} says {n}"), **options)


# ---- LlmAgent at the root -------------------------------------------------------------------------------------------


def single(team: Team) -> Any:
    return team.worker("solo")


def transfer_to_child(team: Team) -> Any:
    child = team.worker("child")
    return team.agent("lead", [transfer("child")], lambda n: transfer("child"), sub_agents=[child])


def transfer_to_parent(team: Team) -> Any:
    child = team.agent(
        "child",
        [call("step", n=0), transfer("lead")],
        lambda n: call("step", n=0) if n == 1 else transfer("lead"),
        tools=[step],
    )
    return team.agent(
        "lead",
        [transfer("child"), call("step", n=1), text("lead is done")],
        lambda n: transfer("child") if n == 1 else call("step", n=n),
        tools=[step],
        sub_agents=[child],
    )


def transfer_to_peer(team: Team) -> Any:
    peers = [team.agent("first", [transfer("second")], lambda n: transfer("second")), team.worker("second")]
    return team.agent("lead", [transfer("first")], lambda n: transfer("first"), sub_agents=peers)


def task(team: Team) -> Any:
    """The delegate works for ever inside one task."""
    finish = call("finish_task", result="clean")
    worker = team.agent(
        "tasked", [call("step", n=1), finish], lambda n: call("step", n=n), calm=finish, mode="task", tools=[step]
    )
    return team.agent(
        "lead",
        [call("tasked", request="clean up"), text("lead is done")],
        lambda n: call("tasked", request="clean up"),
        sub_agents=[worker],
    )


def task_again(team: Team) -> Any:
    """The delegate finishes each task and gets the next one for ever."""
    finish = call("finish_task", result="clean")
    worker = team.agent("tasked", [finish], lambda n: finish, calm=finish, mode="task")
    ask = [call("tasked", request="room 1"), call("tasked", request="room 2"), text("lead is done")]
    return team.agent("lead", ask, lambda n: call("tasked", request=f"room {n}"), sub_agents=[worker])


def single_turn(team: Team) -> Any:
    helper = team.speaker("helper", mode="single_turn")
    ask = [call("helper", request="room 1"), call("helper", request="room 2"), text("lead is done")]
    return team.agent("lead", ask, lambda n: call("helper", request=f"room {n}"), sub_agents=[helper])


def single_turn_two_at_once(team: Team) -> Any:
    helpers = [team.speaker("left", mode="single_turn"), team.speaker("right", mode="single_turn")]

    def both(n: int) -> Step:
        return calls(call("left", request=f"room {n}"), call("right", request=f"room {n}"))

    return team.agent("lead", [both(1), both(2), text("lead is done")], both, sub_agents=helpers)


def agent_tool(team: Team) -> Any:
    inner = team.agent(
        "inner",
        [call("step", n=1), text("inner is done")],
        lambda n: call("step", n=n) if n % 3 else text(f"inner says {n}"),
        tools=[step],
    )
    ask = [call("inner", request="one"), text("outer is done")]
    return team.agent("outer", ask, lambda n: call("inner", request=f"part {n}"), tools=[AgentTool(inner)])


def agent_tool_two_deep(team: Team) -> Any:
    inner = team.worker("inner")
    middle = team.agent(
        "middle",
        [call("inner", request="one"), text("middle is done")],
        lambda n: call("inner", request=f"{n}"),
        tools=[AgentTool(inner)],
    )
    return team.agent(
        "outer",
        [call("middle", request="one"), text("outer is done")],
        lambda n: call("middle", request=f"{n}"),
        tools=[AgentTool(middle)],
    )


def agent_tool_with_schema(team: Team) -> Any:
    said = text('{"word": "yes"}')
    inner = team.agent("inner", [said], lambda n: said, calm=said, output_schema=Answer, output_key="word")
    ask = [call("inner", request="one"), text("outer is done")]
    return team.agent("outer", ask, lambda n: call("inner", request=f"part {n}"), tools=[AgentTool(inner)])


def agent_tools_at_once(team: Team) -> Any:
    helpers = [team.speaker("left"), team.speaker("right")]

    def both(n: int) -> Step:
        return calls(call("left", request=f"room {n}"), call("right", request=f"room {n}"))

    return team.agent(
        "lead", [both(1), both(2), text("lead is done")], both, tools=[AgentTool(helper) for helper in helpers]
    )


def agent_tool_of_loop(team: Team) -> Any:
    """The agent behind the tool is a loop without an end of its own."""
    inner = loop(team)
    return team.agent(
        "outer",
        [call("loop", request="one"), text("outer is done")],
        lambda n: call("loop", request=f"{n}"),
        tools=[AgentTool(inner)],
    )


def agent_tool_of_parallel(team: Team) -> Any:
    inner = parallel(team)
    return team.agent(
        "outer",
        [call("par", request="one"), text("outer is done")],
        lambda n: call("par", request=f"{n}"),
        tools=[AgentTool(inner)],
    )


# ---- hand-offs out of a delegated agent -----------------------------------------------------------------------------
# The delegate passes the work back up, and gets it again inside of its own call. Healthy: once. Endless: deeper and
# deeper.


def _asks_again(team: Team, *delegates: LlmAgent, first: str) -> LlmAgent:
    """Asks a delegate, answers what comes back to it, and is done."""
    healthy = [call(first, request="room"), text("do it like this"), text("lead is done")]
    return team.agent("lead", healthy, lambda n: call(first, request="room"), sub_agents=list(delegates))


def _passes_on(team: Team, name: str, target: str, **options: Any) -> LlmAgent:
    return team.agent(name, [transfer(target), text(f"{name} is done")], lambda n: transfer(target), **options)


def single_turn_back(team: Team) -> Any:
    return _asks_again(team, _passes_on(team, "helper", "lead", mode="single_turn"), first="helper")


def single_turn_back_by_a_peer(team: Team) -> Any:
    delegates = [_passes_on(team, "helper", "peer", mode="single_turn"), _passes_on(team, "peer", "lead")]
    return _asks_again(team, *delegates, first="helper")


def single_turn_back_to_its_lead(team: Team) -> Any:
    """The lead of the delegate is not the root."""
    middle = _asks_again(team, _passes_on(team, "helper", "lead", mode="single_turn"), first="helper")
    return team.agent("root", [transfer("lead")], lambda n: transfer("lead"), sub_agents=[middle])


def single_turn_back_with_a_tool(team: Team) -> Any:
    """Between two hand-offs the delegate looks at the same thing again."""
    healthy = [call("step", n=1), transfer("lead"), text("helper is done")]
    helper = team.agent(
        "helper", healthy, lambda n: call("step", n=1) if n % 2 else transfer("lead"), tools=[step], mode="single_turn"
    )
    return _asks_again(team, helper, first="helper")


def single_turn_back_with_schemas(team: Team) -> Any:
    said = text('{"word": "yes"}')
    helper = team.agent(
        "helper",
        [transfer("lead"), said],
        lambda n: transfer("lead"),
        calm=said,
        mode="single_turn",
        input_schema=Wish,
        output_schema=Answer,
    )
    healthy = [call("helper", room="hall"), text("do it like this"), text("lead is done")]
    return team.agent("lead", healthy, lambda n: call("helper", room="hall"), sub_agents=[helper])


def task_back(team: Team) -> Any:
    finish = call("finish_task", result="clean")
    tasked = team.agent("tasked", [transfer("lead"), finish], lambda n: transfer("lead"), calm=finish, mode="task")
    return _asks_again(team, tasked, first="tasked")


def task_back_by_a_peer(team: Team) -> Any:
    finish = call("finish_task", result="clean")
    tasked = team.agent("tasked", [transfer("peer"), finish], lambda n: transfer("peer"), calm=finish, mode="task")
    return _asks_again(team, tasked, _passes_on(team, "peer", "lead"), first="tasked")


def task_and_its_child(team: Team) -> Any:
    """A task and a chat agent below it pass the work to each other; every transfer has a branch of its own."""
    finish = call("finish_task", result="clean")
    child = _passes_on(team, "child", "tasked")
    tasked = team.agent(
        "tasked", [transfer("child"), finish], lambda n: transfer("child"), calm=finish, mode="task", sub_agents=[child]
    )
    return _asks_again(team, tasked, first="tasked")


def task_with_a_single_turn(team: Team) -> Any:
    finish = call("finish_task", result="clean")
    helper = _passes_on(team, "helper", "tasked", mode="single_turn")
    healthy = [call("helper", request="room"), text("do it like this"), finish]
    tasked = team.agent("tasked", healthy, lambda n: call("helper", request="room"), mode="task", sub_agents=[helper])
    return _asks_again(team, tasked, first="tasked")


NESTED: list[Callable[[Team], Any]] = [
    single_turn_back,
    single_turn_back_by_a_peer,
    single_turn_back_to_its_lead,
    single_turn_back_with_a_tool,
    single_turn_back_with_schemas,
    task_back,
    task_back_by_a_peer,
    task_and_its_child,
    task_with_a_single_turn,
]


# ---- containers -----------------------------------------------------------------------------------------------------


def sequential(team: Team) -> Any:
    return SequentialAgent(name="seq", sub_agents=[team.speaker("first"), team.worker("second"), team.speaker("third")])


def loop(team: Team) -> Any:
    member = team.agent(
        "member", [text("again"), text("again"), EXIT], lambda n: text(f"again {n}"), calm=EXIT, tools=[exit_loop]
    )
    return LoopAgent(name="loop", sub_agents=[member])


def parallel(team: Team) -> Any:
    return ParallelAgent(name="par", sub_agents=[team.worker("p1"), team.worker("p2"), team.worker("p3")])


def loop_of_sequential(team: Team) -> Any:
    last = team.agent("second", [text("again"), EXIT], lambda n: text(f"again {n}"), calm=EXIT, tools=[exit_loop])
    return LoopAgent(name="loop", sub_agents=[SequentialAgent(name="seq", sub_agents=[team.speaker("first"), last])])


def parallel_of_loops(team: Team) -> Any:
    def one(name: str) -> LoopAgent:
        member = team.agent(name, [text("again"), EXIT], lambda n: text(f"again {n}"), calm=EXIT, tools=[exit_loop])
        return LoopAgent(name=f"loop_{name}", sub_agents=[member])

    return ParallelAgent(name="par", sub_agents=[one("m1"), one("m2")])


def loop_of_parallel(team: Team) -> Any:
    pair = ParallelAgent(name="par", sub_agents=[team.speaker("p1"), team.speaker("p2")])
    member = team.agent("judge", [text("again"), EXIT], lambda n: text(f"again {n}"), calm=EXIT, tools=[exit_loop])
    return LoopAgent(name="loop", sub_agents=[pair, member])


def sequential_with_parallel(team: Team) -> Any:
    pair = ParallelAgent(name="par", sub_agents=[team.worker("p1"), team.worker("p2")])
    return SequentialAgent(name="seq", sub_agents=[pair, team.speaker("third")])


def transfer_inside_sequence(team: Team) -> Any:
    """Below a container a transfer is nested, not handed over."""
    child = team.worker("child")
    lead = team.agent("lead", [transfer("child")], lambda n: transfer("child"), sub_agents=[child])
    return SequentialAgent(name="seq", sub_agents=[lead, team.speaker("third")])


# ---- workflows ------------------------------------------------------------------------------------------------------


def _shout(node_input: str) -> str:
    return str(node_input).upper()


def workflow_chain(team: Team) -> Any:
    first, second = team.speaker("first"), team.worker("second")
    return Workflow(name="wf", edges=[("START", first), (first, _shout), (_shout, second)])


def _review(team: Team) -> Any:
    rounds = 0

    def review(node_input: Any) -> Event:
        nonlocal rounds
        rounds += 1
        again = not team.calm and (team.endless or rounds < 3)
        return Event(route="again" if again else "good", output="reviewed")

    return review


def workflow_cycle(team: Team) -> Any:
    writer, review = team.speaker("writer"), _review(team)

    def publish(node_input: Any) -> str:
        return "published"

    return Workflow(
        name="wf", edges=[("START", writer), (writer, review), (review, {"again": writer, "good": publish})]
    )


def workflow_join(team: Team) -> Any:
    """Two nodes at once, a join, and round again."""
    left, right, review = team.speaker("left"), team.speaker("right"), _review(team)
    join = JoinNode(name="join")

    def again(node_input: Any) -> str:
        return "once more"

    def publish(node_input: Any) -> str:
        return "published"

    there = [
        ("START", left),
        ("START", right),
        (left, join),
        (right, join),
        (join, review),
        (review, {"again": again, "good": publish}),
    ]
    return Workflow(name="wf", edges=[*there, (again, left), (again, right)])


def workflow_parallel_worker(team: Team) -> Any:
    worker = team.worker("worker", parallel_worker=True)

    def split(node_input: Any) -> list[str]:
        return ["room 1", "room 2", "room 3"]

    return Workflow(name="wf", edges=[("START", split), (split, worker)])


def workflow_dynamic_node(team: Team) -> Any:
    worker = team.speaker("worker")

    @node(rerun_on_resume=True)
    async def orchestrate(ctx: CallbackContext) -> str:
        rounds = 0
        while rounds == 0 or (not team.calm and (team.endless or rounds < 2)):
            rounds += 1
            await ctx.run_node(worker, f"room {rounds}")
        return "all rooms done"

    return Workflow(name="wf", edges=[("START", orchestrate)])


def workflow_dynamic_nodes_at_once(team: Team) -> Any:
    workers = [team.speaker("left"), team.speaker("right")]

    @node(rerun_on_resume=True)
    async def orchestrate(ctx: CallbackContext) -> str:
        rounds = 0
        while rounds == 0 or (not team.calm and (team.endless or rounds < 2)):
            rounds += 1
            await asyncio.gather(*(ctx.run_node(worker, f"room {rounds}", use_sub_branch=True) for worker in workers))
        return "all rooms done"

    return Workflow(name="wf", edges=[("START", orchestrate)])


def workflow_in_workflow(team: Team) -> Any:
    inner = workflow_cycle(team)
    inner.name = "inner"
    last = team.speaker("last")
    return Workflow(name="outer", edges=[("START", inner), (inner, last)])


def workflow_of_containers(team: Team) -> Any:
    looped = loop(team)
    last = team.speaker("last")
    return Workflow(name="wf", edges=[("START", looped), (looped, last)])


def workflow_with_retries(team: Team) -> Any:
    """A stop is no failure: nothing is tried again because of it."""
    worker = team.worker("worker", retry_config=RetryConfig(max_attempts=3, initial_delay=0.01))
    return Workflow(name="wf", edges=[("START", worker)])


# ---- agents of one's own --------------------------------------------------------------------------------------------


class Again(BaseAgent):
    """Runs its child again and again and ignores escalation."""

    team: Any

    async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        rounds = 0
        while rounds == 0 or (not self.team.calm and (self.team.endless or rounds < 2)):
            rounds += 1
            async for event in self.sub_agents[0].run_async(ctx):
                yield event


class Quiet(Again):
    """The same, and keeps the child's events to itself."""

    async def _run_async_impl(self, ctx: InvocationContext) -> AsyncGenerator[Event, None]:
        async for _ in super()._run_async_impl(ctx):
            pass
        yield Event(
            author=self.name,
            invocation_id=ctx.invocation_id,
            content=types.Content(role="model", parts=[types.Part(text="all done")]),
        )


def custom_loop_in_workflow(team: Team) -> Any:
    custom, last = Again(name="custom", sub_agents=[team.speaker("member")], team=team), team.speaker("last")
    return Workflow(name="wf", edges=[("START", custom), (custom, last)])


def custom_loop(team: Team) -> Any:
    return Again(name="custom", sub_agents=[team.speaker("member")], team=team)


def custom_quiet_loop(team: Team) -> Any:
    return Quiet(name="custom", sub_agents=[team.speaker("member")], team=team)


def parallel_of_custom_loops(team: Team) -> Any:
    """Loops that nobody can escalate, in branches of branches."""

    def branch(name: str) -> ParallelAgent:
        return ParallelAgent(
            name=f"par_{name}", sub_agents=[Again(name=f"custom_{name}", sub_agents=[team.speaker(name)], team=team)]
        )

    return ParallelAgent(name="outer", sub_agents=[branch("m1"), branch("m2"), branch("m3")])


TOPOLOGIES: list[Callable[[Team], Any]] = [
    single,
    transfer_to_child,
    transfer_to_parent,
    transfer_to_peer,
    task,
    task_again,
    single_turn,
    single_turn_two_at_once,
    agent_tool,
    agent_tool_two_deep,
    agent_tool_with_schema,
    agent_tools_at_once,
    agent_tool_of_loop,
    agent_tool_of_parallel,
    sequential,
    loop,
    parallel,
    loop_of_sequential,
    parallel_of_loops,
    loop_of_parallel,
    sequential_with_parallel,
    transfer_inside_sequence,
    workflow_chain,
    workflow_cycle,
    workflow_join,
    workflow_parallel_worker,
    workflow_dynamic_node,
    workflow_dynamic_nodes_at_once,
    workflow_in_workflow,
    workflow_of_containers,
    workflow_with_retries,
    custom_loop_in_workflow,
    custom_loop,
    custom_quiet_loop,
    parallel_of_custom_loops,
]

# One of each kind of nesting, with the ones that ADK itself handles in a special way.
REPRESENTATIVE = [single, transfer_to_child, task, single_turn, agent_tool, loop, parallel, workflow_cycle]


def spread(*choices: Any, each: int = 1, topologies: Sequence[Callable[[Team], Any]] = TOPOLOGIES) -> list[Any]:
    """Pairs of a topology and a choice: the representative topologies with all choices, every other with ``each`` of
    them in turn, so that every topology and every choice is there without their whole product. On an older ADK no
    topology has all.
    """
    turn = itertools.cycle(choices)
    return [
        pytest.param(topology, choice, id=f"{topology.__name__}-{getattr(choice, '__name__', choice)}")
        for topology in topologies
        for choice in (choices if topology in REPRESENTATIVE and IS_NEWEST else itertools.islice(turn, each))
    ]
