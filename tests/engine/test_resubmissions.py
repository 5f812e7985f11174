"""The same input again, after runs on it that were stopped or ended in the same failure."""

import asyncio
import logging
from itertools import count
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest

from runguard.core.decision import Action, Decision
from runguard.core.errors import CircuitOpenError, RunStoppedError
from runguard.core.events import ModelCall, Outcome, RunInfo
from runguard.core.identity import input_fingerprint
from runguard.engine.resume import reopen
from runguard.engine.runs import LastRuns, input_name
from runguard.policy import Policy
from runguard.pricing.rates import Usage
from tests.kit.driver import Driver
from tests.kit.examples import each_row

DOCUMENT = input_fingerprint("pipeline", "the invoice")
FAILED = {"status": "partial_parse_error"}


class Submissions(Driver):
    """Runs on inputs, each with the tools that a pipeline calls."""

    numbers = count(1)  # runs of different workers have different names

    def __init__(self, **policy: Any) -> None:
        self.heard: list[Decision] = []
        super().__init__(on_decision=self.heard.append, **policy)

    def submit(self, document: bytes = DOCUMENT, *, fails: bool = True, stop: bool = True, **info: Any) -> str:
        """One run. It fails in a tool and is stopped for it, or fails once and ends by itself, or works.

        Returns what was said at its start: "allow", "warn" or "stop".
        """
        name = f"submission {next(self.numbers)}"
        self.start(name, **{"app": "app", "user": "ann", "input": document, **info})
        said = self.said()
        if said != "stop":
            for n in range(6 if fails and stop else 1):
                self.work(name, n, FAILED if fails else {"total": n})
        self.guard.end(name)
        self.now += 60
        return said

    def work(self, run: str, n: int, says: Any, outcome: Outcome | None = None) -> None:
        self.tool("parse", {"hint": n}, says=says, run=run, outcome=outcome)

    def said(self) -> str:
        self.guard.flush(2)
        heard, self.heard[:] = [one for one in self.heard if one.finding and one.finding.rule == "resubmission"], []
        return max((one.action for one in heard), default=Action.ALLOW).word


def test_the_third_submission_after_two_stopped_runs_warns(caplog: pytest.LogCaptureFixture) -> None:
    d = Submissions()
    with caplog.at_level(logging.WARNING, "runguard"):
        assert [d.submit() for _ in range(4)] == ["allow", "allow", "warn", "warn"]
    assert "runguard.warn: resubmission, 3 submissions of one input" in caplog.text


def test_the_third_submission_after_the_same_failure_warns() -> None:
    d = Submissions()
    assert [d.submit(stop=False) for _ in range(3)] == ["allow", "allow", "warn"]


@pytest.mark.parametrize("allowed", [0, 1, 4, 30])
def test_max_resubmissions_allows_exactly_that_many(allowed: int) -> None:
    d = Submissions(max_resubmissions=allowed)
    said = [d.submit() for _ in range(allowed + 3)]
    assert said[allowed + 1 :] == ["stop", "stop"]
    assert "stop" not in said[: allowed + 1]
    trip = d.guard.trips[-1]
    assert (trip.rule, trip.observed, trip.model_calls) == ("resubmission", allowed + 2, 0)
    assert "max_resubmissions" in trip.resume
    error = RunStoppedError.of(trip)
    assert isinstance(error, CircuitOpenError)
    assert 0 < error.retry_after <= 3_600


def test_a_refused_run_is_refused_before_its_first_model_call() -> None:
    d = Submissions(max_resubmissions=0)
    d.submit()
    d.start("again", app="app", user="ann", input=DOCUMENT)
    assert d.model(run="again").action is Action.STOP
    assert not d.tool("parse", run="again").ran


def test_the_hour_is_counted_from_the_runs_and_not_from_the_refusals() -> None:
    d = Submissions(max_resubmissions=0)
    assert d.submit() == "allow"
    for _ in range(58):
        assert d.submit() == "stop"
    d.now += 60
    assert d.submit() == "allow"


# ---- what is free ---------------------------------------------------------------------------------------------------


def test_other_words_another_user_and_another_agent_are_other_inputs() -> None:
    d = Submissions(max_resubmissions=0)
    d.submit()
    assert d.submit(input_fingerprint("pipeline", "the other invoice")) == "allow"
    assert d.submit(user="bob") == "allow"
    assert d.submit(input_fingerprint("classifier", "the invoice")) == "allow"
    assert d.submit(b"") == "allow"
    assert d.submit(input_fingerprint("pipeline", "  the\ninvoice ")) == "stop"


def test_a_success_in_between_starts_anew() -> None:
    d = Submissions(max_resubmissions=1)
    assert [d.submit(), d.submit(fails=False), d.submit(), d.submit()] == ["allow"] * 4
    assert d.submit() == "stop"


@each_row(
    ("says", "outcome"),
    [
        ({"status": "error", "message": "503 service unavailable"}, None),
        ("ConnectionError: refused", Outcome.ERROR),
        ("gone", Outcome.TIMEOUT),
    ],
)
@each_row("tries", [1, 12])
def test_a_retry_after_an_outage_of_a_tool_is_free(says: Any, outcome: Outcome | None, tries: int) -> None:
    d = Submissions(max_resubmissions=0)
    for n in range(4):
        d.start(f"run {n}", app="app", user="ann", input=DOCUMENT)
        for step in range(tries):
            d.work(f"run {n}", step, says, outcome)
        d.guard.end(f"run {n}")
        assert d.said() == "allow"


@pytest.mark.parametrize(
    "says",
    [
        {"status": "partial_parse_error", "data": None, "retry_hint": "E42"},
        {"status": "error", "connection": "db-1", "timeout_seconds": 30, "max_retries": 3, "message": "totals differ"},
        "Error: the totals differ; refine the hint and retry with it",
    ],
    ids=["the seed's parser", "names of fields", "advice"],
)
def test_a_failure_that_only_names_a_retry_or_a_connection_is_no_outage(says: Any) -> None:
    d = Submissions(max_resubmissions=0)
    said = []
    for n in range(2):
        d.start(f"run {n}", app="app", user="ann", input=DOCUMENT)
        said.append(d.said())
        d.work(f"run {n}", 0, says)
        d.guard.end(f"run {n}")
    assert said == ["allow", "stop"]


def test_runs_that_an_operator_or_a_shared_budget_stopped_are_free() -> None:
    d = Submissions(max_resubmissions=0, budgets=[{"calls": 1, "per": "user", "window": "1m"}])
    for n in range(3):
        d.start(f"run {n}", app="app", user="ann", input=DOCUMENT)
        d.guard.operator_stops.throw("user:app/ann", "ops", None)
        assert d.model(run=f"run {n}").action is Action.STOP
        d.guard.end(f"run {n}")
        d.guard.operator_stops.release("user:app/ann")
        assert d.said() == "allow"


def test_different_failures_are_not_the_same_end() -> None:
    d = Submissions(max_resubmissions=1)
    for n in range(4):
        d.start(f"run {n}", app="app", user="ann", input=DOCUMENT)
        d.work(f"run {n}", 0, {"status": "error", "message": "page " + "abcd"[n] * 4 + " is torn"})
        d.guard.end(f"run {n}")
        assert d.said() == "allow"


def test_the_rule_can_be_switched_off_and_tuned() -> None:
    assert {Submissions(rules={"resubmission": False}).submit() for _ in range(4)} == {"allow"}
    d = Submissions(rules={"resubmission": {"warn": 2, "stop": 4}})
    assert [d.submit() for _ in range(4)] == ["allow", "warn", "warn", "stop"]
    assert Policy.validated({"max_resubmissions": 0}, "keywords").rungs("resubmission").stop == 2  # type: ignore[union-attr]


# ---- what other workers know ----------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/guard.db"


async def asked(d: Submissions, run: str) -> Action:
    event = ModelCall(run, "", "agent", d.now, "model-1")
    decision = d.guard.check(event)
    assert decision.action is Action.ALLOW
    assert not d.guard.reserve_now(event)
    action = (await d.guard.reserve(event, slot=False)).action
    if event.charge is not None:
        d.guard.settle(event.charge, Usage(10, 10))
    return action


async def test_another_worker_refuses_what_this_one_has_seen_fail(store: str) -> None:
    one = Submissions(store=store, max_resubmissions=1)
    assert [one.submit(), one.submit()] == ["allow", "allow"]
    one.guard.flush(2)
    other = Submissions(store=store, max_resubmissions=1)
    other.now = one.now
    other.start("again", app="app", user="ann", input=DOCUMENT)
    assert await asked(other, "again") is Action.STOP
    assert other.guard.trips[-1].rule == "resubmission"
    assert other.guard.runs["again"].spend.model_calls == 0
    other.guard.end("again")
    other.start("another", app="app", user="ann", input=input_fingerprint("pipeline", "another"))
    assert await asked(other, "another") is Action.ALLOW


def test_another_worker_warns_of_what_this_one_has_seen_fail(store: str) -> None:
    one = Submissions(store=store)
    assert [one.submit(), one.submit()] == ["allow", "allow"]
    one.guard.flush(2)
    other = Submissions(store=store)
    other.now = one.now
    assert other.submit() == "warn"


def test_a_success_of_another_worker_starts_anew(store: str) -> None:
    one, other = Submissions(store=store), Submissions(store=store)
    assert [one.submit(), one.submit()] == ["allow", "allow"]
    one.guard.flush(2)
    other.now = one.now
    other.submit(fails=False)
    other.guard.flush(2)
    one.now = other.now
    one.submit()
    one.guard.flush(2)
    third = Submissions(store=store)
    third.now = one.now
    assert third.submit() == "allow"


async def test_parallel_branches_wait_for_what_the_store_knows(store: str) -> None:
    one = Submissions(store=store, max_resubmissions=0)
    assert one.submit() == "allow"
    one.guard.flush(2)
    other = Submissions(store=store, max_resubmissions=0)
    other.now = one.now
    other.start("again", app="app", user="ann", input=DOCUMENT)
    branches = [other.lane(f"branch {n}", run="again") for n in range(8)]
    events = [ModelCall("again", lane, lane, other.now, "model-1") for lane in branches]
    assert {other.guard.check(event).action for event in events} == {Action.ALLOW}
    said = await asyncio.gather(*(other.guard.reserve(event) for event in events))
    assert [one.action for one in said] == [Action.STOP] * 8
    assert [trip.rule for trip in other.guard.trips] == ["resubmission"]


async def test_a_run_that_another_worker_resumes_is_not_judged_by_its_own_end(store: str) -> None:
    budgets = [{"calls": 1, "per": "run"}]
    one, other = (Submissions(store=store, max_resubmissions=0, budgets=budgets) for _ in range(2))
    info = RunInfo("invocation", "app", "ann", at=one.now, input=DOCUMENT)
    one.guard.start(info)
    assert await asked(one, "invocation") is Action.ALLOW
    assert await asked(one, "invocation") is Action.STOP
    one.guard.pauses.keep("invocation", waits=False)
    one.guard.flush(2)
    other.now += 60
    other.guard.accounts.extend("run:invocation", calls=5)
    again = RunInfo("invocation", "app", "ann", at=other.now, input=DOCUMENT)
    assert await reopen(other.guard, again, may_be_elsewhere=True) is not None
    assert await asked(other, "invocation") is Action.ALLOW


async def test_a_record_that_cannot_be_read_stops_nothing(store: str) -> None:
    one = Submissions(store=store, max_resubmissions=0)
    assert one.submit() == "allow"
    name = input_name(RunInfo("", "app", "ann", input=DOCUMENT))
    for text in ("[1" + "0" * 400 + ', "stall", "", "r"]', "[]", "no JSON", '[1, "stall"]'):
        one.guard.accounts.ledger.tell(methodcaller("append", "resubmission", name, text))
    one.guard.flush(2)
    other = Submissions(store=store, max_resubmissions=0)
    other.now = one.now
    other.start("again", app="app", user="ann", input=DOCUMENT)
    assert await asked(other, "again") is Action.STOP
    assert other.guard.guard_errors == 0


def test_inputs_are_compared_whole() -> None:
    text = "page " * 10_000
    assert input_fingerprint("a", text + "x") != input_fingerprint("a", text + "y")
    assert input_fingerprint("a", ["x", b"\0"]) != input_fingerprint("a", ["x\0"])
    assert input_fingerprint("a", {"b": 1, "a": "x"}) == input_fingerprint("a", {"a": "x", "b": 1})
    assert input_fingerprint("a", None) == input_fingerprint("a", "") == input_fingerprint("a", object()) == b""


# ---- A message that a program wrote starts no count anew; a message of a person does


PROCEED = "Please proceed to the next step on your own. Do not ask for help."
FORMAT = "Your last message held no call of a tool. Every message must hold exactly one call; call finish when done."


def turns(d: Driver, count: int, message: Any, **info: Any) -> list[str]:
    """What is said about one call in each of so many turns of a session."""
    words = []
    for n in range(count):
        said = message(n) if callable(message) else message
        d.start(f"run {n}", app="app", user="u", session="s", message=said, **info)
        words.append(d.tool("parse", {"n": n}, says={"status": "partial_parse_error"}, run=f"run {n}").word)
        d.guard.end(f"run {n}")
    return words


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(PROCEED, id="go on"),
        pytest.param(FORMAT, id="a long complaint"),
        pytest.param(lambda n: f"Continue. You have {50 - n} steps left.", id="with a counter"),
        pytest.param(lambda n: ("Go on.", "Please continue.", "Keep going!")[n % 3], id="in other words"),
    ],
)
def test_a_loop_goes_on_counting_under_an_automatic_user(message: Any) -> None:
    words = turns(Driver(), 9, message)
    assert "nudge" in words
    assert words[-1] == "stop"


@pytest.mark.parametrize(
    "message",
    [
        pytest.param("any news?", id="the same short question"),
        pytest.param("yes", id="a word"),
        pytest.param("please make an exception", id="an insisting user"),
        pytest.param(lambda n: f"question {'abcdefghi'[n] * 3} about {'jklmnopqr'[n] * 4}", id="other words"),
        pytest.param(lambda n: f"please continue with {'abcdefghi'[n] * 3} and {'jklmnopqr'[n] * 4}", id="other work"),
        pytest.param("please", id="a polite word"),
        pytest.param("", id="no text"),
    ],
)
def test_a_person_starts_every_count_anew(message: Any) -> None:
    assert set(turns(Driver(), 9, message)) == {"allow"}


def test_an_app_can_mark_messages_as_automatic() -> None:
    words = turns(Driver(), 9, lambda n: f"text {'abcdefghi'[n] * 4}", is_automatic=True)
    assert words[-1] == "stop"


def test_a_person_among_automatic_messages_starts_anew() -> None:
    words = turns(Driver(), 12, lambda n: PROCEED if n % 4 else f"what about {'abcdefghijkl'[n] * 3} then?")
    assert "stop" not in words


def test_new_work_under_an_automatic_user_is_left_alone() -> None:
    d = Driver()
    for n in range(30):
        d.start(f"run {n}", app="app", user="u", session="s", message=PROCEED)
        assert d.tool("read", {"n": n}, says=f"content {n}", run=f"run {n}").word == "allow"
        d.guard.end(f"run {n}")


def test_of_a_persons_run_only_the_words_of_the_message_are_kept() -> None:
    d, last = Driver(), LastRuns()
    for n in range(200):
        d.start("run", app="app", user="u", session=f"s{n}", message=f"question {n}")
        last.note(d.guard.runs["run"])
    assert len(last._last) == 64
    assert all(one.book is None and not one.detectors for one in last._last.values())
