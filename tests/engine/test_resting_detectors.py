"""A detector that rests is not called. Decisions and the state of every detector are as if all had been called."""

from dataclasses import is_dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runguard.core.events import (
    ROOT_LANE,
    AgentEntered,
    Answer,
    HandOff,
    ModelCall,
    ModelResult,
    Outcome,
    RunInfo,
    StateChanged,
    ToolCall,
    ToolResults,
)
from runguard.core.rules.failures import LastingFailures
from runguard.core.rules.rule import Rule
from runguard.engine.guard import Guard
from runguard.engine.runs import Lane, Observers, Run
from runguard.policy.settings import Policy, ToolRule

LONG = "a page of many words that is longer than any status, " * 6
SAID = (
    "ok",
    "",
    "error: no such file",
    "please try again later",
    "pending",
    LONG,
    f"{LONG} and more",
    {"rows": [1, 2]},
)
TOOLS = ("read", "think", "poll", "ask")
AGENTS = ("boss", "worker")
DELEGATE = f"{ROOT_LANE}/ask@1"

agents, tools = st.sampled_from(AGENTS), st.sampled_from(TOOLS)
steps = st.one_of(
    st.tuples(st.just("model"), agents, st.sampled_from(("", "", "", "done", "and now something else")), st.booleans()),
    st.tuples(
        st.just("tool"),
        agents,
        st.lists(st.tuples(tools, st.integers(0, 2), st.sampled_from(SAID)), min_size=1, max_size=3),
        st.sampled_from((None, None, None, Outcome.ERROR, Outcome.REFUSED)),
        st.booleans(),
    ),
    st.tuples(st.just("new"), agents, st.integers(0, 10**6), st.sampled_from((None, None, *SAID))),
    st.tuples(st.just("hand off"), agents, agents),
    st.tuples(st.just("enter"), agents, st.sampled_from((ROOT_LANE, DELEGATE)), st.booleans()),
    st.tuples(st.just("state"), agents, st.integers(0, 2)),
)


def guard_of(*, rests: bool) -> tuple[Guard, Run]:
    rules = {"poll": ToolRule(polling=True), "ask": ToolRule(max_calls=40)}
    guard = Guard(Policy.validated({"max_nudges": 100, "max_delegation_depth": 3, "tools": rules}, ""))
    run = guard.start(RunInfo("run"))
    if not rests:
        call_all(run.lanes[ROOT_LANE])
    return guard, run


def call_all(lane: Lane) -> None:
    lane.by_event = {kind: Observers(found.every, found.every) for kind, found in lane.by_event.items()}


def events_of(n: int, step: tuple[Any, ...]) -> list[Any]:
    kind, agent, *facts = step
    if kind == "new":
        name = f"c{n}x{facts[0]}".encode()
        answers = [Answer("read", name, {"text": f"{LONG}{n} {facts[0]}"}, str(n), args={"at": n})]
        if facts[1] is not None:  # beside it another answer, which may be anything
            answers.append(Answer("ask", name + b"!", facts[1], f"{n}!"))
        return [
            ModelCall("run", ROOT_LANE, agent, float(n), "m", 10, request_bytes=40 + n, asked=n + 1),
            ModelResult("run", ROOT_LANE, agent, float(n), 10 + n, 5),
            ToolCall("run", ROOT_LANE, agent, float(n), "read", name, f"b{n}", str(n)),
            ToolResults("run", ROOT_LANE, agent, float(n), f"b{n}", answers),
        ]
    if kind == "model":
        words, is_cut = facts
        result = ModelResult("run", ROOT_LANE, agent, float(n), 10, 5, is_cut=is_cut, text=words)
        result.text_id = hash(words) if words else 0
        return [ModelCall("run", ROOT_LANE, agent, float(n), "m", 10, request_bytes=40, asked=3), result]
    if kind == "tool":
        calls, outcome, hands_over = facts
        answers = [
            Answer(t, f"{t}{c}".encode(), says, f"{n}.{k}", outcome if k == 0 else None, args={"at": c})
            for k, (t, c, says) in enumerate(calls)
        ]
        answers[0].hands_over = hands_over
        asked = [ToolCall("run", ROOT_LANE, agent, float(n), a.tool, a.call, f"b{n}", a.id) for a in answers]
        return [*asked, ToolResults("run", ROOT_LANE, agent, float(n), f"b{n}", answers)]
    if kind == "hand off":
        return [HandOff("run", ROOT_LANE, agent, facts[0], float(n))]
    if kind == "state":
        return [StateChanged("run", ROOT_LANE, agent, float(n), facts[0])]
    return [AgentEntered("run", facts[0], agent, float(n), is_bounded=facts[1])]


def state(thing: Any) -> Any:
    """Everything that an object holds, as plain data."""
    if isinstance(thing, dict):
        return [(state(key), state(value)) for key, value in thing.items()]
    if isinstance(thing, list | tuple):
        return [state(one) for one in thing]
    names = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    names += getattr(thing, "__dict__", ())
    if isinstance(thing, Rule):  # what has not changed yet is an attribute of the class
        names = [name for name in dir(thing) if not name.startswith("__")]
    if not names or isinstance(thing, frozenset) or is_dataclass(thing) or callable(thing):
        return (
            thing
            if isinstance(thing, str | bytes | int | float | frozenset | set)
            else repr(thing).partition(" at 0x")[0]
        )
    return {name: state(getattr(thing, name)) for name in names if not callable(getattr(thing, name, None))}


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=25))
def test_it_makes_no_difference_that_detectors_rest(script: list[tuple[Any, ...]]) -> None:
    (guard, run), (other, full) = guard_of(rests=True), guard_of(rests=False)
    for n, step in enumerate(script):
        for mine, theirs in zip(events_of(n, step), events_of(n, step), strict=True):
            asks = isinstance(mine, AgentEntered | HandOff | ModelCall | ToolCall)
            decision = guard.check(mine) if asks else guard.after(mine)
            expected = other.check(theirs) if asks else other.after(theirs)
            assert (decision.action, repr(decision.finding)) == (expected.action, repr(expected.finding))
        here, there = run.lanes[ROOT_LANE], full.lanes[ROOT_LANE]
        for one, twin in zip(here.detectors, there.detectors, strict=True):
            assert state(one) == state(twin), type(one).__name__


def test_a_plain_step_calls_few_detectors() -> None:
    guard, run = guard_of(rests=True)
    seen: list[type] = []
    lane = run.lanes[ROOT_LANE]
    guard.after(events_of(0, ("new", "boss", 6, None))[-1])  # the first step shows that the agent uses tools
    every, wakes = lane.by_event[ToolResults]

    def watched(observe: Any) -> Any:
        def and_note(event: Any) -> Any:
            seen.append(type(observe.__self__))
            return observe(event)

        return and_note

    lane.by_event[ToolResults] = Observers([*map(watched, every)], wakes)
    for event in events_of(1, ("new", "boss", 7, None)):
        if not isinstance(event, ModelCall | ToolCall):
            guard.after(event)
    assert 0 < len(seen) <= len(every) // 2
    seen.clear()
    guard.after(events_of(2, ("tool", "boss", [("read", 0, "error: no")], None, False))[-1])
    assert len(seen) == len(every)
    seen.clear()
    guard.after(events_of(3, ("new", "boss", 7, None))[-1])
    assert LastingFailures in seen  # a failure is on record until this step ends its row
    assert len(seen) < len(every)
