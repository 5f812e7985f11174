"""Which lane of a run an ADK event belongs to, as far as events show it: by its branch, its isolation scope and the
calls that are open.

``runguard.adk.lanes`` names the same lanes from hooks, which see more.
"""

from dataclasses import dataclass
from typing import Final

from runguard.conductor.adapter import Conductor
from runguard.conductor.runs import Run, parallel_part
from runguard.core.events import ROOT_LANE

_KEPT: Final = 4_096


@dataclass(slots=True)
class UnansweredCall:
    """A call that has no answer yet."""

    tool: str
    args: object
    fingerprint: bytes
    lane: str
    batch: str
    agent: str
    once: bytes = b""  # identity of its side effect


class EventLanes:
    """The lanes of one run, found by the calls that are open in it."""

    def __init__(self, guard: Conductor, run: Run) -> None:
        self._guard, self._run = guard, run
        self.calls: dict[str, UnansweredCall] = {}
        self.delegations: set[str] = set()  # calls by which a task was delegated
        self._known: dict[tuple[str, str], str] = {}
        # the id of the delegating call -> its lane, that of the caller, the agent
        self._tasks: dict[str, tuple[str, str, str]] = {}

    def add(self, call_id: str, call: UnansweredCall) -> None:
        if len(self.calls) >= _KEPT:
            del self.calls[next(iter(self.calls))]
        self.calls[call_id] = call

    def close(self, call_id: str) -> UnansweredCall | None:
        """A call was answered: so are the agents that worked on it."""
        call = self.calls.pop(call_id, None)
        if call is not None and len(self._run.lanes) > 1:
            self._guard.close_lane(self._run, f"{call.lane}/{call.tool}@{call_id}")
        return call

    def of(self, branch: str, scope: str = "") -> str:
        if not branch and not scope:
            return ROOT_LANE
        key = self._known.get((branch, scope))
        if key is None or key not in self._run.lanes:
            if len(self._known) >= _KEPT:
                self._known.clear()
            key = self._known[branch, scope] = self._open(branch, scope)
        return key

    def _open(self, branch: str, scope: str) -> str:
        if scope in self.calls:
            self.delegations.add(scope)
        called = self._called_in(branch)
        lane = self._lane_of_call(called) if called else ""
        task = self._task(branch, scope) if scope else None
        if task is not None and (not called or task[0].startswith(f"{lane}/")):
            if task[0] not in self._run.lanes:
                self._open_lane(task[0], task[1], concurrent=False, delegate=task[2])
            parallel = parallel_part(branch)
            return self._open_branch(parallel, task[0]) if parallel else task[0]
        if called:
            if lane not in self._run.lanes:
                call = self.calls[called]
                beside = sum(other.batch == call.batch for other in self.calls.values())
                self._open_lane(lane, call.lane, concurrent=beside > 1, delegate=call.tool)
            return lane
        return self._open_branch(branch, ROOT_LANE) if branch else ROOT_LANE

    def _called_in(self, branch: str) -> str:
        """The innermost open call of an agent as a tool that this branch is inside of.

        Older ADK numbers such branches.
        """
        found = lane = ""
        for part in branch.split("."):
            name, _, opened_by = part.partition("@")
            if opened_by.isdigit():
                opened_by = next(
                    (i for i, call in self.calls.items() if call.tool == name and (not found or call.lane == lane)), ""
                )
            if opened_by in self.calls and opened_by not in self.delegations:
                found, lane = opened_by, self._lane_of_call(opened_by)
        return found

    def _lane_of_call(self, call_id: str) -> str:
        call = self.calls[call_id]
        return f"{call.lane}/{call.tool}@{call_id}"

    def _task(self, branch: str, scope: str) -> tuple[str, str, str] | None:
        task = self._tasks.get(scope)
        if task is None:
            call = self.calls.get(scope)
            if call is not None:
                task = (self._lane_of_call(scope), call.lane, call.tool)
            elif f"@{scope}" in branch:  # delegated in an earlier turn
                agent = branch.partition(f"@{scope}")[0].rpartition(".")[2]
                task = (f"/{agent}@{scope}", ROOT_LANE, agent)
            else:
                return None
            if len(self._tasks) >= _KEPT:
                del self._tasks[next(iter(self._tasks))]
            self._tasks[scope] = task
        return task

    def _open_branch(self, branch: str, base: str) -> str:
        key = f"{base}/{branch}"
        if key not in self._run.lanes:
            self._open_lane(key, self._above(branch, base), concurrent=branch.rpartition("@")[2] not in self.calls)
        return key

    def _above(self, branch: str, base: str) -> str:
        while "." in branch:
            branch = branch.rpartition(".")[0]
            if f"{base}/{branch}" in self._run.lanes:
                return f"{base}/{branch}"
        return base

    def _open_lane(self, key: str, parent: str, *, concurrent: bool, delegate: str = "") -> None:
        above = self._run.lanes.get(parent)
        self._guard.open_lane(
            self._run,
            key,
            parent,
            concurrent=concurrent,
            path=above.path if above is not None else (),
            delegate=delegate,
        )
