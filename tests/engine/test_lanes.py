"""Loop counters follow an agent that is called inside of its own call, and nothing else; lanes found by what events
show.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runguard.core.events import AgentEntered, RunInfo, ToolCall
from runguard.core.rules.agents import Depth
from runguard.engine.guard import Guard
from runguard.policy import Policy
from runguard.termination.conditions import EventLanes, UnansweredCall
from tests.kit.driver import Driver

OFF = {"no_news": False, "same_call": False}


def calls_inside_each_other(d: Driver, agents: list[str], *, concurrent: frozenset[int] = frozenset()) -> list[str]:
    """Each agent is called by the one before it. ``concurrent``: which of them run beside others."""
    lanes = [""]
    for n, agent in enumerate(agents):
        lanes.append(d.lane(f"{lanes[-1]}/{agent}@{n}", parent=lanes[-1], concurrent=n in concurrent, delegate=agent))
    return lanes[1:]


def test_hand_offs_of_an_agent_inside_of_itself_are_counted_together(drive: type[Driver]) -> None:
    d = drive()
    lanes = calls_inside_each_other(d, ["helper"] * 6)
    assert [d.hand_off("helper", "lead", lane=lane).action.word for lane in lanes] == ["allow"] * 3 + [
        "nudge",
        "allow",
        "stop",
    ]
    assert d.guard.runs["run"].stopped is not None


def test_an_agent_between_does_not_hide_it(drive: type[Driver]) -> None:
    d = drive()
    lanes = calls_inside_each_other(d, ["helper", "writer"] * 6)
    assert [d.hand_off("helper", "lead", lane=lane).action.word for lane in lanes[::2]][-1] == "stop"


def test_another_agents_hand_offs_are_its_own(drive: type[Driver]) -> None:
    d = drive()
    lanes = calls_inside_each_other(d, [f"agent_{n}" for n in range(8)])
    assert {d.hand_off("helper", "lead", lane=lane).action.word for lane in lanes} == {"allow"}


def test_what_the_agent_has_seen_is_known_inside_of_itself(drive: type[Driver]) -> None:
    d = drive(rules=OFF)
    outer, inner = calls_inside_each_other(d, ["helper", "helper"])
    d.tool(args={"n": 1}, says="one", lane=outer)
    d.hand_off("helper", "lead", lane=outer)
    for _ in range(3):
        d.tool(args={"n": 1}, says="one", lane=inner)  # nothing new: the hand-off is not forgotten
    assert [d.hand_off("helper", "lead", lane=inner).action.word for _ in range(5)][-1] == "stop"


def test_news_inside_clears_the_count(drive: type[Driver]) -> None:
    d = drive()
    lanes = calls_inside_each_other(d, ["helper"] * 12)
    for n, lane in enumerate(lanes):
        d.tool(args={"n": n}, says=f"page {n}", lane=lane)
        assert d.hand_off("helper", "lead", lane=lane).action.word == "allow"


def test_an_equal_call_in_a_circle_is_no_news(drive: type[Driver]) -> None:
    """Ten activations inside each other ask the same and hear the same."""
    d = drive(rules={"no_news": {"stop": 5}, "handoff": False})
    lanes = calls_inside_each_other(d, ["helper"] * 10)
    words = [d.tool(args={"n": 1}, says="one", lane=lane).word for lane in lanes]
    assert words.index("stop") == 6  # told, told again for free, and five times more


@pytest.mark.parametrize("beside", [{1}, {2}, {1, 2}])
def test_branches_between_keep_their_calls_apart_and_count_hand_offs_together(
    drive: type[Driver], beside: set[Any]
) -> None:
    d = drive(rules={"no_news": {"stop": 2}}, max_delegation_depth=None)
    outer, _, inner = calls_inside_each_other(d, ["helper", "writer", "helper"], concurrent=frozenset(beside))
    for lane in (outer, inner):
        for _ in range(2):
            assert d.tool(args={"n": 1}, says="one", lane=lane).word == "allow"
    words = [d.hand_off("helper", "lead", lane=lane).action.word for lane in (outer, inner) * 3]
    assert words == ["allow"] * 3 + ["nudge", "nudge", "stop"]


def test_a_circle_of_hand_offs_stops_the_branch_in_which_it_began(drive: type[Driver]) -> None:
    d = drive(max_delegation_depth=None)
    beside = d.lane("/other@0", delegate="other")
    lanes = calls_inside_each_other(d, ["helper"] * 6, concurrent=frozenset(range(6)))
    for lane in lanes:
        d.hand_off("helper", "lead", lane=lane)
    (trip,) = d.guard.trips
    assert (trip.scope, trip.branch) == ("branch", lanes[0])
    assert d.model(lane=lanes[2]).action.word == "stop"
    assert d.model(lane=beside).action.word == "allow"
    assert d.guard.runs["run"].stopped is None


# ---- tasks ----------------------------------------------------------------------------------------------------------


def test_a_task_that_is_too_deep_stops_because_its_caller_cannot_be_told() -> None:
    depth = Depth(5)
    assert depth.observe(AgentEntered("run", "", "a", 0.0, depth=5, is_task=True)) is None
    found = depth.observe(AgentEntered("run", "", "a", 0.0, depth=6, is_task=True))
    assert found is not None
    assert (found.action.word, found.scope, found.observed, found.limit) == ("stop", "lane", 6, 5)


# ---- calls without an answer ----------------------------------------------------------------------------------------


def unanswered(
    d: Driver, n: int, *, tool: str = "tasked", args: Any = None, depth: int = 0, batch: str | None = None
) -> str:
    call = d.guard.tools.fingerprint(tool, args or {})
    return d.guard.check(
        ToolCall("run", "", "lead", d.now, tool, call, f"response {n}" if batch is None else batch, f"call {n}", depth)
    ).action.word


def test_a_call_that_is_never_answered_stops_at_the_rung_of_a_repetition(drive: type[Driver]) -> None:
    d = drive()
    assert [unanswered(d, n) for n in range(9)] == ["allow"] * 8 + ["stop"]
    assert d.rules_tripped == ["repetition"]
    assert d.guard.trips[0].unit == "equal calls without an answer"


def test_an_agent_that_never_answers_is_the_same_whatever_it_is_asked(drive: type[Driver]) -> None:
    d = drive()
    assert [unanswered(d, n, args={"n": n}, depth=1) for n in range(9)][-1] == "stop"


@pytest.mark.parametrize(
    "kind", ["other arguments", "answered", "another activation", "no response of a model", "one response"]
)
def test_what_is_no_repetition_without_an_answer(drive: type[Driver], kind: str) -> None:
    d = drive(rules=OFF)
    for n in range(30):
        batch = {"no response of a model": "", "one response": "response"}.get(kind)
        assert unanswered(d, n, args={"n": n} if kind == "other arguments" else None, batch=batch) == "allow"
        if kind == "answered":
            assert d.tool(args={"n": n}, says=f"page {n}").word == "allow"
        elif kind == "another activation":
            d.guard.check(AgentEntered("run", "", "lead", d.now))


# ---- what events show -----------------------------------------------------------------------------------------------


class Seen:
    """Lanes of a run, found by events."""

    def __init__(self) -> None:
        self.guard = Guard(Policy.validated({}, ""))
        self.run = self.guard.start(RunInfo("run"))
        self.lanes = EventLanes(self.guard, self.run)

    def asks(self, call_id: str, tool: str, *, branch: str = "", scope: str = "", batch: str = "") -> None:
        self.lanes.calls[call_id] = UnansweredCall(
            tool, {}, b"", self.lanes.of(branch, scope), batch or call_id, "agent"
        )


def test_every_branch_of_a_task_is_its_one_lane() -> None:
    seen = Seen()
    seen.asks("c0", "tasked")
    places = [("tasked@c0", "c0"), ("lead@2", "c0"), ("lead@2.tasked@c0", "c0"), ("peer@1", "c0"), ("", "c0")]
    assert {seen.lanes.of(*place) for place in places} == {"/tasked@c0"}
    assert not seen.run.lanes["/tasked@c0"].concurrent


def test_a_task_stays_where_it_is_when_it_was_answered_inside_of_itself() -> None:
    seen = Seen()
    seen.asks("c0", "tasked")
    seen.lanes.of("tasked@c0", "c0")
    seen.lanes.close("c0")
    assert "/tasked@c0" not in seen.run.lanes
    assert seen.lanes.of("lead@2", "c0") == "/tasked@c0"


def test_a_task_of_an_earlier_turn_is_no_parallel_branch() -> None:
    seen = Seen()
    assert seen.lanes.of("tasked@c0", "c0") == "/tasked@c0"
    assert not seen.run.lanes["/tasked@c0"].concurrent


def test_parallel_agents_inside_of_a_task_have_lanes_of_their_own() -> None:
    seen = Seen()
    seen.asks("c0", "tasked")
    assert seen.lanes.of("tasked@c0.par.p0", "c0") == "/tasked@c0/par.p0"
    assert seen.run.lanes["/tasked@c0/par.p0"].concurrent
    assert seen.run.lanes["/tasked@c0/par.p0"].parent is seen.run.lanes["/tasked@c0"]


def test_the_innermost_of_a_task_and_a_call_is_the_lane() -> None:
    seen = Seen()
    seen.asks("c0", "tasked")
    seen.asks("c1", "helper", branch="tasked@c0", scope="c0")
    assert seen.lanes.of("tasked@c0.helper@c1", "c0") == "/tasked@c0/helper@c1"
    seen.asks("c2", "tasked", branch="tasked@c0.helper@c1", scope="c0")
    assert seen.lanes.of("tasked@c0.helper@c1.tasked@c2", "c2") == "/tasked@c0/helper@c1/tasked@c2"
    assert seen.lanes.of("tasked@c0.helper@c1", "c0") == "/tasked@c0/helper@c1"


@given(st.integers(1, 8))
def test_numbered_branches_of_older_adk_are_the_calls_inside_each_other(levels: int) -> None:
    seen, branch, lane = Seen(), "", ""
    for n in range(levels):
        seen.asks(f"c{n}", "helper", branch=branch)
        branch = f"{branch}.helper@1".lstrip(".")
        lane = f"{lane}/helper@c{n}"
        assert seen.lanes.of(branch) == lane
