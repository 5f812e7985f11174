"""Read events of ADK by their shape: their fields, the model calls that they report, and the lanes that they show.

Conditions, ``replay`` and ``adk`` use this. It imports no framework: an event is any object with the fields of an ADK
event. One of another version or of a test may lack any of them.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from runguard.core.events import ROOT_LANE
from runguard.core.identity import LruDict
from runguard.pricing.rates import Usage
from runguard.providers.usage import EventUsage

if TYPE_CHECKING:  # conditions are used without the engine
    from runguard.engine.guard import Guard
    from runguard.engine.runs import Run

# ---- Fields


def whole(events: Sequence[Any]) -> Iterator[Any]:
    """Yield events that are not chunks of a stream; the closing event repeats the text of the chunks."""
    return (event for event in events if not getattr(event, "partial", None))


def author_of(event: Any) -> str:
    return getattr(event, "author", None) or ""


def branch_of(event: Any) -> str:
    return getattr(event, "branch", None) or ""


def scope_of(event: Any) -> str:
    """Return the id of the call that delegated the task to which the event belongs."""
    return getattr(event, "isolation_scope", None) or ""


def parts_of(event: Any) -> Sequence[Any]:
    return getattr(getattr(event, "content", None), "parts", None) or ()


def visible_text(event: Any) -> str:
    """Return the visible text of an event without thoughts, with its parts joined."""
    texts = (getattr(part, "text", None) for part in parts_of(event) if not getattr(part, "thought", None))
    return "".join(text for text in texts if isinstance(text, str))


def calls_of(event: Any) -> list[Any]:
    return [call for part in parts_of(event) if (call := getattr(part, "function_call", None)) is not None]


def answers_of(event: Any) -> list[Any]:
    """Return the function responses, without requests for a confirmation or a sign-in."""
    actions = getattr(event, "actions", None)
    waiting = {
        *(getattr(actions, "requested_tool_confirmations", None) or ()),
        *(getattr(actions, "requested_auth_configs", None) or ()),
    }
    answers = [answer for part in parts_of(event) if (answer := getattr(part, "function_response", None)) is not None]
    return [answer for answer in answers if getattr(answer, "id", None) not in waiting] if waiting else answers


def transfer_of(event: Any) -> str:
    return getattr(getattr(event, "actions", None), "transfer_to_agent", None) or ""


def state_delta_of(event: Any) -> dict[str, Any]:
    return getattr(getattr(event, "actions", None), "state_delta", None) or {}


# ---- Model calls

_MODELS_KEPT: Final = 1_024


@dataclass(frozen=True, slots=True)
class CallTaken:
    """The usage of one model call. ``before``: the amount already counted for the same call, which this replaces."""

    usage: Usage
    model: str
    at: float | None  # unix seconds
    before: Usage | None = None


class ModelCallReader:
    """Yield usage and model once per model call."""

    __slots__ = ("_models", "_usage")

    def __init__(self) -> None:
        self._usage = EventUsage()
        self._models: dict[tuple[str, str], str] = {}  # by the ids of the chunks of a stream

    def read(self, events: Sequence[Any]) -> list[CallTaken]:
        return [taken for event in events if (taken := self._read(event)) is not None]

    def _read(self, event: Any) -> CallTaken | None:
        key, model = (author_of(event), branch_of(event)), getattr(event, "model_version", None) or ""
        if getattr(event, "partial", None):
            if model and (len(self._models) < _MODELS_KEPT or key in self._models):
                self._models[key] = model
        else:
            model = model or self._models.get(key, "")
        taken = self._usage.read(event)
        if taken is None:
            return None
        return CallTaken(taken.usage, model, getattr(event, "timestamp", None), taken.before)


# ---- Lanes

_KEPT: Final = 4_096  # open calls, branches and tasks of one run


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
    """The lanes of one run, as far as events show them: by branch, isolation scope and the calls that are open.

    ``replay`` and ``termination`` read events. ``runguard.adk.runs`` names the same lanes from hooks, which see more.
    """

    def __init__(self, guard: "Guard", run: "Run") -> None:
        self._guard, self._run = guard, run
        self.calls = LruDict[str, UnansweredCall](_KEPT)
        self.delegations: set[str] = set()  # calls by which a task was delegated
        self._known = LruDict[tuple[str, str], str](_KEPT)
        # the id of the delegating call -> its lane, that of the caller, the agent
        self._tasks = LruDict[str, tuple[str, str, str]](_KEPT)

    def close(self, call_id: str) -> UnansweredCall | None:
        """Forget a call that was answered, and close the lane of the agents that worked on it."""
        call = self.calls.pop(call_id, None)
        if call is not None and len(self._run.lanes) > 1:
            self._guard.close_lane(self._run, f"{call.lane}/{call.tool}@{call_id}")
        return call

    def of(self, branch: str, scope: str = "") -> str:
        """Return the lane of an event, and open it where it is new."""
        if not branch and not scope:
            return ROOT_LANE
        key = self._known.get((branch, scope))
        if key is None or key not in self._run.lanes:
            key = self._known[branch, scope] = self._open(branch, scope)
        return key

    def _open(self, branch: str, scope: str) -> str:
        if scope in self.calls:
            self.delegations.add(scope)
        called = self._called_in(branch)
        lane = self._lane_of_call(called) if called else ""
        task = self._task(branch, scope) if scope else None
        if task is not None and (not called or task[0].startswith(f"{lane}/")):
            self._open_lane(*task, concurrent=False)
            parallel = parallel_part(branch)
            return branch_lane(self._guard, self._run, parallel, task[0], self.calls) if parallel else task[0]
        if called:
            call = self.calls[called]
            beside = sum(other.batch == call.batch for other in self.calls.values())
            self._open_lane(lane, call.lane, call.tool, concurrent=beside > 1)
            return lane
        return branch_lane(self._guard, self._run, branch, ROOT_LANE, self.calls) if branch else ROOT_LANE

    def _called_in(self, branch: str) -> str:
        """Return the innermost open call of an agent as a tool that this branch is inside of.

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
            self._tasks[scope] = task
        return task

    def _open_lane(self, key: str, parent: str, delegate: str, *, concurrent: bool) -> None:
        if key not in self._run.lanes:
            above = self._run.lanes.get(parent)
            path = above.path if above is not None else ()
            self._guard.open_lane(self._run, key, parent, concurrent=concurrent, path=path, delegate=delegate)


def branch_lane(guard: "Guard", run: "Run", branch: str, base: str, calls: Collection[str]) -> str:
    """Return the lane of a branch below lane ``base``, and open it where it is new.

    ADK joins the names of branches by dots. ``calls``: the ids of open calls; a branch that one of them has opened runs
    beside no other.
    """
    key = f"{base}/{branch}"
    if key in run.lanes:
        return key
    above, parent = branch, base
    while "." in above and parent == base:
        above = above.rpartition(".")[0]
        if f"{base}/{above}" in run.lanes:
            parent = f"{base}/{above}"
    lane = run.lanes.get(parent)
    is_called = "@" in branch and branch.rpartition("@")[2] in calls
    guard.open_lane(run, key, parent, concurrent=not is_called, path=lane.path if lane is not None else ())
    return key


def parallel_part(branch: str) -> str:
    """Return what parallel agents have added at the end of a branch: names without a number or the id of a call."""
    parts = branch.split(".")
    named = len(parts)
    while named and "@" not in parts[named - 1]:
        named -= 1
    return ".".join(parts[named:])
