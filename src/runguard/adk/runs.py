"""Which lane of a run a hook or an event belongs to, and how many delegations are above its agent.

A model delegates in three ways. A transfer stays in its lane. An agent called as a tool (``AgentTool``,
``mode="single_turn"``) gets a lane of its own: its hooks see the tool call around it. So does a task (``mode="task"``):
its hooks see the id of the delegating call as isolation scope. ADK gives a task a new branch at each transfer inside of
it, and may start it again inside of itself; all of that is the task's one lane. Elsewhere a branch is parallel work.
"""

from dataclasses import dataclass, field
from typing import Final

from google.adk.agents import BaseAgent, LlmAgent, LoopAgent

from runguard.adk.context import HERE, EnclosingTool
from runguard.adk.invocation_state import Invocation
from runguard.engine.guard import Guard
from runguard.engine.runs import parallel_part

_KEPT: Final = 4_096


@dataclass(slots=True)
class Task:
    """A task that a model has delegated.

    ``starts``: the branches in which ADK has started it, each inside the one before.
    """

    id: str  # of the delegating call
    agent: str
    lane: str
    caller_lane: str
    caller_path: tuple[str, ...]
    # of its agent; -1 where the delegation was made in an earlier turn: then the depth of the agent in the tree
    depth: int
    starts: list[str] = field(default_factory=list)

    def follow(self, branch: str | None) -> int:
        """An agent begins to work in this branch of the task. Returns the depth of the start that it belongs to."""
        if branch:
            while self.starts and self.starts[-1].startswith(f"{branch}."):
                self.starts.pop()  # that start is over: the agent that made it continues
            if branch.endswith(f"@{self.id}") and branch not in self.starts:
                self.starts.append(branch)
        return self.depth + max(len(self.starts) - 1, 0)


# ---- lanes ----------------------------------------------------------------------------------------------------------


def child_lane(tool: EnclosingTool) -> str:
    return f"{tool.lane}/{tool.name}@{tool.call_id}"


def open_child(guard: Guard, tool: EnclosingTool) -> str:
    """The lane of an agent called as a tool. Other running calls of the same response make it a parallel one."""
    key = child_lane(tool)
    run = tool.invocation.run
    if key not in run.lanes:
        calls = tool.invocation.calls
        mine = calls.get(tool.call_id)
        batch = mine.batch if mine is not None else ""
        beside = sum(1 for c in calls.values() if (c.batch == batch if batch else c.running and c.lane == tool.lane))
        guard.open_lane(run, key, tool.lane, concurrent=beside > 1, path=tool.path, delegate=tool.name)
    return key


def lane_of(guard: Guard, invocation: Invocation, branch: str | None, scope: str | None) -> str:
    """The lane that a hook or an event of this invocation belongs to. ``scope``: its isolation scope."""
    tool = _tool_in(guard, invocation) if HERE.get().tool is not None else None
    place = (tool.call_id if tool is not None else "", branch, scope)
    cached = invocation.lanes.get(place)
    if cached is not None and cached in invocation.run.lanes:
        return cached
    task = _task_of(invocation, branch, scope) if scope else None
    if task is not None and (tool is None or task.lane.startswith(f"{child_lane(tool)}/")):
        key = _task_lane(guard, invocation, task, branch)
    elif tool is not None:
        key = open_child(guard, tool)
    elif branch:
        key = _branch_lane(guard, invocation, branch, invocation.lane)
    else:
        key = invocation.lane
    if len(invocation.lanes) < _KEPT:
        invocation.lanes[place] = key
    return key


def _tool_in(guard: Guard, invocation: Invocation) -> EnclosingTool | None:
    """The tool call of this invocation that the running code is inside of."""
    tool = HERE.get().tool
    while tool is not None and tool.guard is not guard:
        tool = tool.outer
    return tool if tool is not None and tool.invocation is invocation else None


def _task_of(invocation: Invocation, branch: str | None, scope: str) -> Task | None:
    """The task with this id, or None when the scope is not that of a delegated task."""
    task = invocation.tasks.get(scope)
    if task is not None:
        return task
    call = invocation.calls.get(scope)
    if call is not None:
        depth = invocation.depths.get(call.lane, invocation.depth)
        lane = invocation.run.lanes.get(call.lane)
        path = (*lane.path, call.agent) if lane is not None else (call.agent,)
        task = Task(scope, call.tool, f"{call.lane}/{call.tool}@{scope}", call.lane, path, depth + 1)
    elif branch and f"@{scope}" in branch:  # delegated in an earlier turn, and resumed by this one
        agent = branch.partition(f"@{scope}")[0].rpartition(".")[2]
        task = Task(scope, agent, f"{invocation.lane}/{agent}@{scope}", invocation.lane, (), -1)
    else:
        return None
    if len(invocation.tasks) >= _KEPT:
        del invocation.tasks[next(iter(invocation.tasks))]
    invocation.tasks[scope] = task
    return task


def _task_lane(guard: Guard, invocation: Invocation, task: Task, branch: str | None) -> str:
    run = invocation.run
    if task.lane not in run.lanes:
        guard.open_lane(run, task.lane, task.caller_lane, concurrent=False, path=task.caller_path, delegate=task.agent)
    parallel = parallel_part(branch) if branch else ""
    if not parallel:
        return task.lane
    key = _branch_lane(guard, invocation, parallel, task.lane)
    if task.lane in invocation.delegates:
        invocation.delegates.setdefault(key, invocation.delegates[task.lane])
    return key


def _branch_lane(guard: Guard, invocation: Invocation, branch: str, base: str) -> str:
    """A lane for a branch below lane ``base``. ADK joins the names of branches by dots."""
    run = invocation.run
    key = f"{base}/{branch}"
    if key in run.lanes:
        return key
    above = branch
    parent = base
    while "." in above:
        above = above.rpartition(".")[0]
        if f"{base}/{above}" in run.lanes:
            parent = f"{base}/{above}"
            break
    opened_by = branch.rpartition("@")[2] if "@" in branch else ""
    lane = run.lanes.get(parent)
    guard.open_lane(
        run, key, parent, concurrent=opened_by not in invocation.calls, path=lane.path if lane is not None else ()
    )
    return key


# ---- loops ---------------------------------------------------------------------------------------------------------


def is_bounded(agent: BaseAgent) -> bool:
    """Whether an agent works in a ``LoopAgent`` whose number of rounds is set."""
    above = agent.parent_agent
    while above is not None:
        if isinstance(above, LoopAgent) and above.max_iterations is not None:
            return True
        above = above.parent_agent
    return False


# ---- depth ----------------------------------------------------------------------------------------------------------


def enter(
    guard: Guard, invocation: Invocation, agent: BaseAgent, lane: str, branch: str | None, scope: str | None
) -> int:
    """An agent begins to work in a lane. Returns the delegations above it."""
    task = invocation.tasks.get(scope) if scope else None
    known = invocation.delegates.get(lane)
    if task is not None and task.lane == lane:
        if task.depth < 0:
            task.depth = _levels(agent, invocation)
        invocation.delegates[lane] = (
            task.follow(branch),
            known[1] if known is not None else _levels(agent, invocation),
        )
    elif known is None and (tool := _tool_in(guard, invocation)) is not None and child_lane(tool) == lane:
        invocation.delegates[lane] = (tool.depth + 1, _levels(agent, invocation))
    if len(invocation.delegates) > _KEPT:
        del invocation.delegates[next(iter(invocation.delegates))]
    depth = invocation.depths[lane] = depth_of(agent, invocation, lane)
    if len(invocation.depths) > _KEPT:
        del invocation.depths[next(iter(invocation.depths))]
    return depth


def depth_of(agent: BaseAgent, invocation: Invocation, lane: str) -> int:
    """Delegations above an agent in a lane, each made by a model. Containers do not count.

    In the tree of agents these are the models above it that could have sent the work down. In the lane of a delegated
    agent they are those above the delegate, and those between the delegate and an agent below it: a transfer back up to
    the caller goes no less deep.
    """
    if agent.parent_agent is None and not invocation.delegates:
        return invocation.depth  # most agents
    levels = _levels(agent, invocation)
    delegate = invocation.delegates.get(lane)
    return levels if delegate is None else delegate[0] + max(levels - delegate[1], 0)


def _levels(agent: BaseAgent, invocation: Invocation) -> int:
    """Models above an agent in the tree of agents, down from the agent that the invocation began with."""
    depth = invocation.depth
    current, above = agent, agent.parent_agent
    while above is not None and current.name != invocation.root_agent:
        depth += isinstance(above, LlmAgent)
        current, above = above, above.parent_agent
    return depth
