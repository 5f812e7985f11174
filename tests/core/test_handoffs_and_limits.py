"""Hand-offs, plain limits and growth."""

from collections.abc import Callable
from typing import Any

import pytest

from runguard.core.decision import Action
from runguard.core.events import (
    AgentEntered,
    HandOff,
    ModelCall,
    ToolCall,
)
from runguard.core.rules.agents import Depth, ReEntry
from runguard.core.rules.limits import Deadline
from tests.kit.detectors import only, word, words
from tests.kit.driver import Driver
from tests.kit.examples import each_row


def attempt(call: str = "c", *, tool: str = "t", batch: str = "", depth: int = 0, at: float = 0.0) -> ToolCall:
    return ToolCall("run", "", "agent", at, tool, call.encode(), batch, depth=depth)


# ---- hand-offs ------------------------------------------------------------------------------------------------------


def test_a_hand_off_circle_without_news_is_nudged_and_stopped(drive: type[Driver]) -> None:
    d = drive()
    seen = [d.hand_off(*("AB" if n % 2 == 0 else "BA")).action.word for n in range(11)]
    assert seen.index("nudge") == 6  # the fourth A→B
    assert seen.index("stop") == 10  # the sixth
    assert d.rules_tripped == ["handoff"]


def test_the_path_of_the_circle_is_told(drive: type[Driver]) -> None:
    d = drive(max_handoff_repeats=3)
    for n in range(5):
        decision = d.hand_off(*("AB" if n % 2 == 0 else "BA"))
    assert decision.trip is not None
    assert decision.trip.agent_path == ("A", "B", "A", "B", "A")


def test_a_circle_of_three_peers_trips(drive: type[Driver]) -> None:
    d = drive(max_handoff_repeats=3)
    seen = [d.hand_off("ABC"[n % 3], "ABC"[(n + 1) % 3]).action.word for n in range(7)]
    assert seen[-1] == "stop"


def test_hand_offs_with_real_results_between_are_work(drive: type[Driver]) -> None:
    d = drive(max_handoff_repeats=3)
    for n in range(30):
        d.tool("work", {"n": n}, says=f"fact {n}")
        assert d.hand_off(*("AB" if n % 2 == 0 else "BA")).action is Action.ALLOW


def test_a_failure_between_is_no_news(drive: type[Driver]) -> None:
    d = drive(max_handoff_repeats=3, rules={"stall": False})
    seen = []
    for n in range(5):
        d.tool("work", {"n": n}, says="Error: boom")
        seen.append(d.hand_off(*("AB" if n % 2 == 0 else "BA")).action.word)
    assert seen == ["allow"] * 4 + ["stop"]


def test_one_return_to_the_parent_is_normal(drive: type[Driver]) -> None:
    d = drive(max_handoff_repeats=2)
    assert [d.hand_off(*edge).action for edge in ("AB", "BA", "AC", "CA", "AD", "DA")] == [Action.ALLOW] * 6


@pytest.mark.parametrize("agents", ["AB", "ABC", "ABCD"])
def test_rounds_of_hand_offs_count_as_rounds_of_calls_do(drive: type[Driver], agents: str) -> None:
    d = drive(cycle_repeats=3, max_cycle_len=4)
    hops = [agents[n % len(agents)] + agents[(n + 1) % len(agents)] for n in range(3 * len(agents))]
    assert [d.hand_off(*hop).action.word for hop in hops] == ["allow"] * (len(hops) - 1) + ["stop"]
    assert d.rules_tripped == ["cycle"]


def test_a_longer_circle_of_hand_offs_than_asked_for_is_none(drive: type[Driver]) -> None:
    d = drive(cycle_repeats=2, max_cycle_len=3, rules={"handoff": False})
    assert {d.hand_off("ABCD"[n % 4], "ABCD"[(n + 1) % 4]).action.word for n in range(40)} == {"allow"}


def test_hand_offs_do_not_lengthen_a_circle_of_calls(drive: type[Driver]) -> None:
    d = drive(cycle_repeats=3, max_cycle_len=2, rules={"no_news": False, "handoff": False})
    seen = []
    for n in range(6):
        seen.append(d.tool("look", {"n": n % 2}, says="the same").word)
        d.hand_off(*("AB" if n % 2 == 0 else "BA"))
    assert seen[-1] == "stop"


@pytest.mark.parametrize(
    ("limit", "edges"), [(1, "AB BA"), (1, "AB BC CA"), (1, "AB BC CB"), (2, "AB BA AB"), (2, "AB BC CA AB")]
)
def test_a_hand_off_back_into_the_chain_is_a_reentry(drive: type[Driver], limit: int, edges: str) -> None:
    d = drive(max_reentries=limit)
    seen = [d.hand_off(*edge).action.word for edge in edges.split()]
    assert seen == ["allow"] * (len(seen) - 1) + ["stop"]
    assert d.rules_tripped == ["reentry"]


def told(*events: str) -> list[str]:
    """What a detector of first re-entries finds in 'A>B' (a hand-off), '+A' (an agent starts) and '?' (a model is
    asked).
    """
    detector = ReEntry(1)
    made: dict[str, Callable[[str], HandOff | AgentEntered | ModelCall]] = {
        ">": lambda e: HandOff("run", "", e[0], e[2], 0.0),
        "+": lambda e: AgentEntered("run", "", e[1], 0.0),
        "?": lambda _: ModelCall("run", "", "", 0.0),
    }
    return [
        found.key for e in events if (found := detector.observe(made[next(k for k in made if k in e)](e))) is not None
    ]


def test_a_chain_starts_again_where_a_container_starts_an_agent() -> None:
    iteration = ("+L", "+A", "?", "A>B", "+B", "?")
    assert told(*iteration * 3) == []
    assert told("+A", "?", "A>B", "+B", "?", "+C", "?", "C>B") == []  # a sequence starts C


def test_a_container_that_gets_the_work_passes_it_on() -> None:
    assert told("+A", "?", "A>S", "+S", "+C", "?", "C>A") == ["A"]


def test_a_call_goes_on_with_the_chain_of_its_caller(drive: type[Driver]) -> None:
    d = drive(max_reentries=2)
    d.enter("A")
    d.hand_off("A", "B")
    first = d.lane("B@1", concurrent=False, delegate="tool")
    assert d.enter("C", lane=first).action.word == "allow"
    assert d.enter("A", lane=d.lane("C@2", parent=first, concurrent=False, delegate="tool")).action.word == "allow"
    second = d.lane("C@3", parent=first, concurrent=False, delegate="tool")
    assert d.enter("A", lane=second).action.word == "allow", "each call has a count of its own"
    below = d.lane("A@4", parent=second, concurrent=False, delegate="tool")
    assert d.enter("B", lane=below).action.word == "stop"
    assert d.guard.trips[0].agent_path == ("A", "B", "C", "A", "B")


def test_a_parallel_branch_goes_on_with_the_chain_only_where_the_work_was_handed_to_its_container(
    drive: type[Driver],
) -> None:
    for is_handed, expected in ((True, "stop"), (False, "allow")):
        d = drive(max_reentries=1)
        d.enter("A")
        d.model()
        if is_handed:
            d.hand_off("A", "P")
        d.enter("P", branches=2)
        branch = d.lane("P.x")
        d.enter("X", lane=branch)
        assert d.hand_off("X", "A", lane=branch).action.word == expected


# ---- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3, 25])
def test_max_model_calls_allows_exactly_that_many(drive: type[Driver], limit: int) -> None:
    d = drive(max_model_calls=limit)
    assert [d.model().action.word for _ in range(limit + 1)] == ["allow"] * limit + ["stop"]


@pytest.mark.parametrize("limit", [1, 3, 25])
def test_max_tool_calls_allows_exactly_that_many(drive: type[Driver], limit: int) -> None:
    d = drive(max_tool_calls=limit)
    steps = [d.tool(args={"n": n}, says=f"fact {n}") for n in range(limit + 1)]
    assert [step.ran for step in steps] == [True] * limit + [False]
    assert d.rules_tripped == ["tool_calls"]


def test_calls_of_one_tool_are_counted_over_all_lanes_and_the_surplus_is_refused_then_stopped(
    drive: type[Driver],
) -> None:
    d = drive(tools={"search": {"max_calls": 2}})
    lane = d.lane("branch")
    steps = [d.tool("search", {"q": n}, says=f"hit {n}", lane=where) for n, where in enumerate(("", lane, "", ""))]
    assert words(steps) == ["allow", "allow", "block", "stop"]
    assert d.rules_tripped == ["tool_limit"]


def test_a_surplus_in_one_batch_is_refused_and_not_stopped(drive: type[Driver]) -> None:
    d = drive(tools={"search": {"max_calls": 2}})
    step = d.batch([("search", {"q": n}, f"hit {n}") for n in range(6)])
    assert [decision.action.word for decision in step.before] == ["allow"] * 2 + ["block"] * 4


def test_a_limit_declared_beside_the_tool_holds(drive: type[Driver]) -> None:
    from runguard import ToolRule

    d = drive()
    d.guard.tools.declare("search", ToolRule(max_calls=2))
    assert [d.tool("search", {"q": n}, says=f"hit {n}").ran for n in range(3)] == [True, True, False]


def test_the_deadline_is_inclusive(drive: type[Driver]) -> None:
    d = drive(max_seconds=60)
    d.now += 60
    assert d.model().action is Action.ALLOW
    d.now += 0.01
    assert d.model().action is Action.STOP
    assert d.rules_tripped == ["deadline"]


@each_row(
    "event",
    [
        ModelCall("run", "", "a", 61.0),
        attempt(at=61.0),
        AgentEntered("run", "", "a", 61.0),
        HandOff("run", "", "a", "b", 61.0),
    ],
)
def test_the_deadline_is_seen_before_whatever_comes_next(event: Any) -> None:
    deadline = Deadline(60, started=0.0)
    assert type(event) in deadline.sees
    assert word(deadline.observe(event)) == "stop"


def test_depth_refuses_the_callee_and_not_the_caller() -> None:
    depth = Depth(5)
    assert depth.observe(attempt(depth=5)) is None
    found = depth.observe(attempt(depth=6))
    assert found is not None
    assert (found.action, found.scope, found.observed, found.limit) == (Action.BLOCK, "call", 6, 5)
    assert word(depth.observe(AgentEntered("run", "", "a", 0.0, depth=6))) == "block"


def test_branches_of_one_node_are_limited_before_the_first_is_paid(drive: type[Driver]) -> None:
    d = drive()
    assert d.guard.check(AgentEntered("run", "", "fan", d.now, branches=100)).action is Action.ALLOW
    assert d.guard.check(AgentEntered("run", "", "fan", d.now, branches=101)).action is Action.STOP


def test_an_answer_too_large_is_kept_out(drive: type[Driver]) -> None:
    d = drive(max_tool_result_chars=1_000)
    assert d.tool(args={"n": 1}, says="x" * 900).word == "allow"
    step = d.tool(args={"n": 2}, says={"rows": ["x" * 600, "x" * 600]})
    assert step.after.finding is not None
    assert (step.after.action, step.after.finding.rule, step.ran) == (Action.BLOCK, "result_size", True)


# ---- growth ---------------------------------------------------------------------------------------------------------


def test_growth_compares_the_last_calls_with_the_first(drive: type[Driver]) -> None:
    d = drive(**only("growth", stop=3), cost_baseline_events=2)
    seen = []
    for prompt in (100, 100, 200, 200, 290, 309, 291, 300):
        seen.append(d.model().action.word)
        assert d.model_result(prompt).action is Action.ALLOW  # what was answered is kept; the next call is refused
    assert seen == ["allow"] * 7 + ["stop"]
    assert d.guard.trips[0].observed == 3.0


def test_growth_only_warns_by_default_and_says_it_once(drive: type[Driver]) -> None:
    d = drive()
    seen = [d.model_result(1_000 * n).action.word for n in range(1, 60)]
    assert seen.count("warn") == 1
    assert set(seen) == {"allow", "warn"}


def test_growth_is_told_apart_by_agent_and_lane(drive: type[Driver]) -> None:
    d = drive(**only("growth", stop=2), cost_baseline_events=1)
    lane = d.lane("branch")
    sizes = {"small": 100, "large": 10_000}
    for _ in range(10):
        for agent, prompt in sizes.items():
            assert d.model_result(prompt, agent=agent).action is Action.ALLOW
            assert d.model_result(3 * prompt, agent=agent, lane=lane).action is Action.ALLOW
