"""Tool calls: whether one may run, what it costs, and what its answer means.

``engine/guard`` asks ``ToolGate`` before a call, ``ToolPrices`` for its price, and ``Answers`` when it has answered.
``Once`` knows the side effects that must not happen twice.
"""

import asyncio
import logging
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final

from runguard.core.breaker import Permit
from runguard.core.decision import ALLOW, Action, Decision, Finding
from runguard.core.events import FAILURES, LATE, Answer, Outcome, RunInfo, ToolCall, ToolPayment, ToolResults
from runguard.core.identity import LruDict, answer_text, digest, mask, size_of
from runguard.core.money import UNLIMITED, dollars_of, nanos, scope_part, stated_nano
from runguard.core.outcomes import (
    MISSING,
    classify,
    ending_class,
    failure_class,
    is_unfinished,
    named_items,
    says_missing,
    was_done,
    without_items,
)
from runguard.core.rules.failures import is_acknowledgement, lacks_arguments
from runguard.core.rules.limits import CallsPerTool, ToolCalls
from runguard.core.rules.repetition import Repetition
from runguard.engine.calls import PaidCalls
from runguard.engine.charges import Charge, Denied, finding_of
from runguard.engine.context import GuardContext
from runguard.engine.decide import stop_in_force
from runguard.engine.runs import Bill, Lane, LastFailure, Run
from runguard.ledger.ledger import Ledger, StoreError, StoreOutage, StoreSession
from runguard.policy.settings import ToolRule
from runguard.pricing.rates import Usage

_log: Final = logging.getLogger("runguard")
# Members bound once: looking one up on its enum costs as much as the rest of a line.
_BLOCK = Action.BLOCK
_OK, _EMPTY, _FAILED, _ERROR, _REFUSED = Outcome.OK, Outcome.EMPTY, Outcome.FAILED, Outcome.ERROR, Outcome.REFUSED

# ---- Side effects that happen once per session

_SESSIONS_KEPT: Final = 10_000
_ONCE_PER_SESSION: Final = 1_000
_FINISH_S: Final = 5.0


class Once:
    """The side effects that were done in each session. With a shared store they happen once over all workers.

    What this process has done is known at once. The claim of a side effect in a shared store is awaited.
    """

    def __init__(self, ledger: Ledger, claim_seconds: float) -> None:
        self._ledger, self._claim_seconds = ledger, claim_seconds
        self._finishing: dict[str, Future[None]] = {}  # not written to the store yet
        self._done = LruDict[tuple[str, str, str], LruDict[bytes, None]](_SESSIONS_KEPT)
        self._lock = threading.Lock()

    def share(self, other: "Once") -> None:
        """Know what another guard knows."""
        self._done, self._lock, self._finishing = other._done, other._lock, other._finishing

    def is_done(self, info: RunInfo, call: bytes) -> bool:
        return call in self._done.get((info.app, info.user, info.session), ())

    async def claim(self, info: RunInfo, call: bytes) -> bool | None:
        """Return whether this worker may do it; None when the store does not answer."""
        if not self._ledger.is_shared:
            return True
        answer: list[str] = []
        last = self._finishing.get(_claim_key(info, call))
        if last is not None:  # the last attempt here is over: the store must learn that first
            await asyncio.wait((asyncio.wrap_future(last),), timeout=_FINISH_S)
        try:
            await self._ledger.ask(
                lambda session: answer.append(session.claim(_claim_key(info, call), self._claim_seconds)), again=True
            )
        except (StoreOutage, StoreError):
            _log.warning(
                "runguard.once_unsure: the store does not answer, so a side effect may have been made by another worker"
            )
            return None
        if answer == ["done"]:
            self._remember(info, call)
        return answer == ["yes"]

    def settle(self, info: RunInfo, call: bytes, done: bool) -> None:
        if done:
            self._remember(info, call)
        if not self._ledger.is_shared:
            return
        key, written = _claim_key(info, call), Future[None]()
        self._finishing[key] = written

        def write(session: StoreSession) -> None:
            try:
                session.finish(key, done)
            except StoreOutage:
                raise  # the ledger tries again
            except BaseException:
                self._finished(key, written)
                raise
            self._finished(key, written)

        self._ledger.tell(write)

    def _finished(self, key: str, written: "Future[None]") -> None:
        if self._finishing.get(key) is written:
            del self._finishing[key]
        written.set_result(None)

    def _remember(self, info: RunInfo, call: bytes) -> None:
        key = (info.app, info.user, info.session)
        with self._lock:
            done = self._done.setdefault(key, LruDict(_ONCE_PER_SESSION))
            self._done.move_to_end(key)
            done[call] = None


def _claim_key(info: RunInfo, call: bytes) -> str:
    return f"{scope_part(info.app)}/{scope_part(info.user)}/{scope_part(info.session)}/{call.hex()}"


# ---- Whether one tool call may run: its side effect happens once, and the breaker of the tool is closed


class ToolGate:
    """Decides what runs share about tools: breakers, and side effects that happen once per session."""

    def __init__(self, context: GuardContext) -> None:
        self._clock, self._ledger, self._tools = context.clock, context.accounts.ledger, context.tools
        self._breakers, self._deciding, self._faults = context.breakers, context.deciding, context.faults
        self.once = Once(context.accounts.ledger, context.policy.hold_seconds)
        context.keep(self.once, for_store=True)
        self._goes_on_in_outage = context.policy.on_outage == "open"
        context.sink.on("run paused", "pause", lambda run, waits: self._give_back_permits(run))
        context.sink.on("run ended", "end of run", self._give_back_permits)
        context.sink.on("run ended", "end of run", self._give_back_effects)
        context.sink.on("run dropped", "pause", self._give_back_effects)

    async def prepare_tool(self, run: Run, tool: str, effect: bytes, call_id: str) -> None:
        """Ask the store before ``check`` judges a tool call: for the probe of an open breaker, and for the claim of
        the side effect ``effect``, if the call has one.
        """
        if not self._ledger.is_shared:
            return
        permit = await self._breakers.claim_probe(tool, self._clock())
        if permit is not None:
            run.permits[call_id] = (tool, permit)
        if not effect:
            return
        run.claimed_elsewhere.discard(effect)  # the other worker may have failed
        run.unchecked_once.discard(effect)
        if effect in run.pending_once or self.once.is_done(run.info, effect):
            return
        # before the wait: an equal call beside this one is refused, and the end of the run gives the claim back
        run.pending_once[effect] = call_id
        try:
            mine = await self.once.claim(run.info, effect)
        except BaseException:  # cancelled while it asked: give back whatever was claimed
            self.settle_once(run, effect, False)
            raise
        if mine is None and self._goes_on_in_outage:
            mine = True
        if not mine:
            run.pending_once.pop(effect, None)
            (run.unchecked_once if mine is None else run.claimed_elsewhere).add(effect)

    def check(self, run: Run, lane: Lane, event: ToolCall) -> Decision:
        tool = event.tool
        rule = self._tools.rule(tool)
        effect = self._tools.effect_of(event) if rule is not None and rule.once else b""
        if effect:
            taken = run.pending_once.get(effect, event.id) != event.id or effect in run.claimed_elsewhere
            if taken or self.once.is_done(run.info, effect):
                done = Finding("once", _BLOCK, 2, 1, "executions", "call", event.tool, effect.hex())
                return self._deciding.decide(run, lane, event, done)
            if effect in run.unchecked_once:
                unsure = Finding("once_unsure", _BLOCK, 1, 0, "outages", "call", event.tool, effect.hex())
                return self._deciding.decide(run, lane, event, unsure)
            run.pending_once[effect] = event.id
        breaker = self._breakers.get(tool)
        if breaker is None or event.id in run.permits:  # none, or its probe was claimed for this call
            return ALLOW
        now = self._ledger.now(event.at)
        permit = breaker.admit(now)
        if permit is not None:
            run.permits[event.id] = (event.tool, permit)
            return ALLOW
        run.last_failure = LastFailure("", is_outage=True)
        failures = breaker.threshold
        found = Finding("breaker", _BLOCK, failures, failures, "failures across runs", "call", tool, tool)
        decision = self._deciding.decide(run, lane, event, found)
        if decision:
            decision.retry_after = breaker.retry_after(now)
        return decision

    def give_up(self, run: Run, event: ToolCall) -> None:
        """Let the side effect of a refused call be tried again: it was not done."""
        effect = self._tools.effect_of(event)
        if effect and run.pending_once.get(effect) == event.id:
            self.settle_once(run, effect, False)

    def unspent(self, run: Run, event: ToolCall) -> None:
        """Do not count a call that was allowed and not made. It will be checked again."""
        run.spend.tool_calls -= 1
        for detector in run.detectors:
            if isinstance(detector, ToolCalls | CallsPerTool):
                detector.take_back(event)
        for detector in run.lanes[event.lane].detectors if event.lane in run.lanes else ():
            if isinstance(detector, Repetition):
                detector.take_back(event)
        held = run.permits.pop(event.id, None)
        if held is not None:
            self._breakers.release(event.tool, held[1])

    def _give_back_permits(self, run: Run) -> None:
        for tool, permit in run.permits.values():
            self._faults.attempt("end of run", self._breakers.release, tool, permit)
        run.permits.clear()

    def _give_back_effects(self, run: Run) -> None:
        for call in run.pending_once:
            self._faults.attempt("end of run", self.once.settle, run.info, call, False)

    def settle_once(self, run: Run, effect: bytes, done: bool) -> None:
        """Say how a call of a ``once`` tool has ended: done, or free to be tried again."""
        run.pending_once.pop(effect, None)
        self.once.settle(run.info, effect, done)

    def report_answer(self, run: Run, answer: Answer, now: float) -> None:
        """Any answer shows that the tool works. Exceptions go to ``report_failure``; a refusal shows nothing."""
        held = run.permits.pop(answer.id, None)
        if held is None:
            return
        if answer.outcome is _REFUSED:
            self._breakers.release(answer.tool, held[1])
        else:
            self._breakers.report(answer.tool, held[1], True, now, run.info.run)

    def report_failure(self, run: Run, tool: str, call_id: str) -> None:
        """Count that a tool raised or timed out. Nothing else opens its breaker across runs."""
        held = run.permits.pop(call_id, None)
        permit = held[1] if held is not None else Permit(0)  # begun before the breaker existed
        self._breakers.report(tool, permit, False, self._clock(), run.info.run)


# ---- The price of a tool call: reserved before the tool runs, settled when it has answered

_NOT_EXECUTED: Final = frozenset({_REFUSED, Outcome.UNKNOWN_TOOL})


class ToolPrices:
    """Reserves and settles the prices of one guard's tools.

    A fixed price is booked as it is, also when the tool raised: the call was made. A price that is a function is
    reserved at its ``price_bound`` and settled at what the function returns for the arguments and the answer; a tool
    that raised shows it the exception. A call that was not executed costs nothing.
    """

    def __init__(self, calls: PaidCalls, gate: ToolGate) -> None:
        self._clock, self._accounts, self._tools = calls.clock, calls.accounts, calls.tools
        self._deciding, self._calls, self._gate = calls.deciding, calls, gate
        calls.sink.on("run paused", "pause", lambda run, waits: self.end(run))
        calls.sink.on("run ended", "end of run", self.end)
        self.is_used = False  # some tool call was paid
        # called with the lane of a paid call, its nano-USD and whether they are an estimate
        self.on_paid: Callable[[str, int, bool], None] | None = None

    async def reserve(
        self, run: Run, event: ToolCall, args: object, *, no_loop: bool = False, no_wait: bool = False
    ) -> Decision:
        """Permission for a tool call that ``check`` has allowed. A tool without a price has it at once.

        With permission, the call is settled by ``settle`` or given back by ``release``.
        """
        rule = self._tools.rule(event.tool)
        if rule is None or rule.price is None:
            return ALLOW
        bound, fault = bound_of(rule, args)
        if bound is None:
            decision = self._without_bound(run, event, fault)
            if decision.enforced and decision.action >= _BLOCK:
                return decision
            bound = 0
        return await self.hold(run, event, rule.price, bound, no_loop=no_loop, no_wait=no_wait)

    async def hold(
        self, run: Run, event: ToolCall, price: Any, bound: int, *, no_loop: bool = False, no_wait: bool = False
    ) -> Decision:
        lane = run.lane(event.lane)
        payment = ToolPayment(event.run, event.lane, event.agent, event.at, tool=event.tool, bound=(bound, 0))
        payment.no_loop, payment.no_wait = no_loop, no_wait
        denied: Denied | None = None
        charge = self._accounts.open_now(run.run_costs, payment)
        if charge is None:
            try:
                charge, denied = await self._accounts.open(
                    run.run_costs, payment, self._deciding.enforces, lambda: _stopped(run, lane) is not None
                )
            except BaseException:
                self._take_back(run, event)
                raise
        if charge is None:
            assert denied is not None
            if (trip := _stopped(run, lane)) is not None:
                self._take_back(run, event)
                return stop_in_force(trip)
            return self._refuse(run, event, finding_of(denied, payment, self._accounts.ledger.name), denied)
        self.is_used = True
        charge.journal = run.journal
        run.bills[event.id] = Bill(charge, event.tool, price, bound)
        if run.journal is not None:
            base = {"k": "tool_hold", "t": event.at, "l": event.lane, "a": event.agent}
            run.journal.add(base | {"tool": event.tool, "id": event.id, "bound": bound})
        late = self._too_late(run, event)
        if late is not None:
            self.release(run, event.id)
            self._take_back(run, event)
            return self._deciding.decide(run, lane, event, late)
        if denied is not None:  # in shadow mode
            return self._refuse(run, event, finding_of(denied, payment, self._accounts.ledger.name), denied)
        return ALLOW

    def charge_of(self, run: Run, call_id: str) -> Charge | None:
        """Return what is held for a call."""
        bill = run.bills.get(call_id)
        return bill.charge if bill is not None else None

    def settle(self, run: Run, call_id: str, args: object, answer: object) -> None:
        """Book the price of an executed tool. ``answer``: what it returned, or the exception that it raised."""
        bill = run.bills.get(call_id)
        if bill is None:
            return
        nano, estimated = bill.bound, callable(bill.price)
        try:
            if estimated:
                value, fault = _dollars(bill.price, args, answer)
                if value is None:
                    _log.warning(
                        "runguard.tool_price_failed: the price function of tool %r %s; its price_bound is booked",
                        bill.tool,
                        fault,
                    )
                else:
                    nano, estimated = value, False
        finally:  # also when the function ends the program or the task
            self.book(bill.charge, call_id, nano, estimated=estimated)
            run.bills.pop(call_id, None)  # last: after a fault, the call is still open and closed later

    def settle_unknown(self, run: Run, call_id: str) -> None:
        """Book the price of a tool that was executed and never answered."""
        bill = run.bills.get(call_id)
        if bill is not None:
            self.settle_at(run, call_id, bill.bound, estimated=callable(bill.price))

    def settle_at(self, run: Run, call_id: str, nano: int, *, estimated: bool) -> None:
        """Book the price of an executed tool whose cost is known."""
        bill = run.bills.get(call_id)
        if bill is not None:
            self.book(bill.charge, call_id, nano, estimated=estimated)
            run.bills.pop(call_id, None)

    def book(self, charge: Charge, call_id: str, nano: int, *, estimated: bool) -> None:
        self._calls.settle(charge, Usage(), nano=nano, estimated=estimated)
        if self.on_paid is not None:
            self.on_paid(charge.lane, nano, estimated)
        journal = charge.journal
        if journal is not None:
            entry = {"k": "tool_paid", "t": self._clock(), "tool": charge.tool, "id": call_id, "nano": nano}
            journal.add(entry | ({"estimated": True} if estimated else {}))

    def release(self, run: Run, call_id: str) -> None:
        """Give back the price of a tool that was not executed."""
        bill = run.bills.pop(call_id, None)
        if bill is None:
            return
        self._calls.release(bill.charge)
        if run.journal is not None:
            run.journal.add({"k": "tool_back", "t": self._clock(), "id": call_id})

    def book_unseen(self, run: Run, lane: str, agent: str, answer: Answer) -> None:
        """Book the price of a tool that was executed before anything could be reserved for it."""
        rule = self._tools.rule(answer.tool)
        if rule is None or rule.price is None:
            return
        payment = ToolPayment(run.info.run, lane, agent, self._clock(), tool=answer.tool)
        charge = self._accounts.open_settled(run.run_costs, payment)
        charge.journal = run.journal
        bill = run.bills[answer.id] = Bill(charge, answer.tool, rule.price, 0)
        bill.bound = bound_of(rule, answer.args)[0] or 0
        self.settle(run, answer.id, answer.args, answer.value)

    def close(self, run: Run, answer: Answer) -> None:
        """Book the price of an open call whose answer has arrived, or nothing where it was not executed."""
        if answer.id not in run.bills:
            return
        if answer.outcome in _NOT_EXECUTED:
            self.release(run, answer.id)
        else:
            self.settle(run, answer.id, answer.args, answer.value)

    def end(self, run: Run) -> None:
        """Book the open calls of a run that is over: they were made, and what they cost is not known."""
        for call_id, bill in list(run.bills.items()):
            try:
                self.settle_unknown(run, call_id)
            except Exception as error:
                self._calls.close(bill.charge, error)

    def _without_bound(self, run: Run, event: ToolCall, fault: str) -> Decision:
        """Refuse a call of unknown cost where dollars are limited."""
        payment = ToolPayment(event.run, event.lane, event.agent, event.at, tool=event.tool)
        lines = self._accounts.finder.of_call(run.run_costs, payment)
        if all(account.cap_usd >= UNLIMITED for account in lines.accounts):
            return ALLOW
        detail = f"the price_bound function of tool '{event.tool}' {fault}"
        unit = "tools without a price"
        return self._refuse(
            run, event, Finding("unpriced", _BLOCK, 1, 0, unit, "call", event.tool, event.tool, detail), None
        )

    # ---- refusals ---------------------------------------------------------------------------------------------------

    def _refuse(self, run: Run, event: ToolCall, finding: Finding, denied: Denied | None) -> Decision:
        """Refuse a call whose price no budget holds. Asking again in a later response stops, and so does whatever stops
        a model call: the kill switch, an outage, an unknown cap.
        """
        if denied is not None and denied.refusal is not None and not denied.fraction:
            before = run.tools_refused.setdefault(event.tool, event.batch)
            is_first = not event.batch or before == event.batch
            finding = replace(finding, tool=event.tool, key=f"{event.tool}:{finding.key}")
            if is_first:
                finding = replace(finding, action=_BLOCK, scope="call")
        decision = self._deciding.decide(run, run.lane(event.lane), event, finding)
        if decision.enforced and decision.action >= _BLOCK:
            self._take_back(run, event)
        return decision

    def _take_back(self, run: Run, event: ToolCall) -> None:
        """``check`` has counted the call and claimed its side effect. It is not made."""
        run.spend.tool_calls -= 1
        self._gate.give_up(run, event)

    def _too_late(self, run: Run, event: ToolCall) -> Finding | None:
        if run.deadline is None or not self._deciding.enforces:
            return None
        return run.deadline.observe(replace(event, at=max(event.at, self._clock())))


def _stopped(run: Run, lane: Lane) -> Any:
    return run.stopped or lane.stop_in_force()


def bound_of(rule: ToolRule, args: object) -> tuple[int | None, str]:
    """Return the most that a call may cost in nano-USD; None with the reason where that cannot be known."""
    bound = rule.price_bound if callable(rule.price) else rule.price
    return _dollars(bound, args) if callable(bound) else (stated_nano(bound), "is no amount")


def _dollars(function: Callable[..., Any], *given: object) -> tuple[int | None, str]:
    """Return what a function of the user returns, in nano-USD; None with what is wrong with it."""
    try:
        value = function(*given)
    except Exception as error:
        return None, f"raised {type(error).__name__}"
    try:
        return nanos(dollars_of(value, least=0), up=True), ""
    except ValueError as fault:
        return None, f"returned no price ({fault})"


# ---- What the answers of tools mean: which are failures, which are news, which count

# Tools by which an agent writes to itself, answered by a short "noted". They are not work: a thought between two
# failures is not progress.
_NOTES: Final = re.compile(
    r"(?:sequential_?)?think(?:ing)?|(?:log_|record_)?thoughts?|scratchpad|todo_?write|update_?todos?"
    r"|(?:update|write|set|save)_?plan",
    re.IGNORECASE,
)
_NOTE_BYTES: Final = 194
_STATUS_BYTES: Final = 194  # a longer answer is more than a status


class Answers:
    """Reads answers by a policy."""

    def __init__(self, context: GuardContext, gate: ToolGate, prices: ToolPrices) -> None:
        self._policy, self._tools, self._gate, self._prices = context.policy, context.tools, gate, prices
        self._max_chars = self._policy.max_tool_result_chars or 0
        self._normalizes = bool(self._policy.tool_result_normalizer)
        self._compares = self._policy.max_identical_tool_results is not None

    def understand(self, run: Run, lane: Lane, event: ToolResults) -> None:
        """Find out what each answer means and whether it is news."""
        kept: list[Answer] = []
        pairs: list[tuple[bytes, int]] = []
        calls: list[bytes] = []
        agent, context, rule_of = event.agent, lane.context, self._tools.rule
        is_plain = True
        for a in event.answers:
            tool = a.tool
            rule = rule_of(tool)
            if run.permits:
                self._gate.report_answer(run, a, event.at)
            if run.bills:
                self._prices.close(run, a)
            if rule is not None and rule.exempt:
                # a refused call claimed nothing: the claim belongs to another one
                if rule.once and a.outcome is not _REFUSED:
                    self._gate.settle_once(run, a.once or a.call, a.outcome is None and was_done(a.value))
                continue
            kept.append(a)
            if a.outcome is _REFUSED:
                is_plain = False
                if a.counted:
                    calls.append(a.call)
                continue
            if self._max_chars:
                a.chars = size_of(a.value, 2 * self._max_chars)
            raw = a.value
            if rule is not None or self._normalizes:
                a.value = self._normalized(a, rule)
            value = a.value
            outcome: Outcome | None = a.outcome
            if outcome is None:
                outcome, a.failure = classify(raw)
                a.outcome = outcome
            elif outcome is _ERROR and type(raw) is str and says_missing(raw):
                outcome, a.failure = _EMPTY, MISSING  # raised or answered: an item that was looked up is missing
                a.outcome = outcome
            missing = outcome is _EMPTY and a.failure == MISSING
            if missing:
                a.failure = ""
            if outcome in FAILURES:
                event.failures = True
                # an error after other text tells what the call has found
                a.lacks_arguments = not a.failure.startswith(LATE) and lacks_arguments(a.args, answer_text(raw))
                if not a.failure or value is not raw:  # the normalizer decides what identifies a failure, too
                    a.failure = failure_class(answer_text(value))
                a.ending = ending_class(raw, a.failure)
                if items := named_items(a.args, value, rule.volatile if rule is not None else ()):
                    a.failure = f"{a.failure}\0{items}"
                    a.ending = without_items(a.ending, items)
            a.answer, new = lane.book.name(a.call, value, agent)
            size = lane.book.size
            a.size = size if value is raw else 0
            # an answer with fewer characters than the window has tokens needs no second look
            if (
                context is not None
                and (size < 0 or (0 < context.limit < size and size > context.suspicious_chars))
                and not a.chars
            ):
                a.chars = size_of(raw, 8 * context.limit)
            good = outcome is _OK or outcome is _EMPTY
            if self._compares and good and not a.hands_over and not is_acknowledgement(value):
                a.identity = digest(mask(answer_text(value))).hex()
            if rule is not None:
                self._apply_rule(run, lane, event, a, rule, good and not missing)
            if new and good and size < _NOTE_BYTES and _NOTES.fullmatch(tool) is not None:
                a.counted = new = False  # neither news nor a step
                a.is_note = True
            if a.counted:
                calls.append(a.call)
                pairs.append((a.call, a.answer))
                a.is_long = not 0 <= size <= _STATUS_BYTES and not is_unfinished(raw)
            if outcome is not _OK or a.failure or a.chars or not a.counted:
                is_plain = False
            if new:
                event.news = True
                event.progress = event.progress or (good and not a.hands_over and not a.failure)
        event.answers, event.is_plain = kept, is_plain and event.progress
        event.pairs = frozenset(pairs)
        event.calls = frozenset(calls)

    def settle_effects(self, run: Run, event: ToolResults) -> None:
        """Answers from a journal, whose outcome is known: which side effects were done."""
        for a in event.answers:
            if run.bills:
                self._prices.close(run, a)
            effect = self._tools.effect_of(a)
            if effect and a.outcome is not _REFUSED:
                self._gate.settle_once(run, effect, a.outcome is _OK or a.outcome is _EMPTY)

    def _apply_rule(self, run: Run, lane: Lane, event: ToolResults, a: Answer, rule: ToolRule, good: bool) -> None:
        a.counted = not (rule.polling or rule.paging)
        if rule.once:
            self._gate.settle_once(run, a.once or a.call, good)
        if good and rule.writes:
            lane.book.forget_pairs()
            event.news = event.progress = True

    def _normalized(self, a: Answer, rule: ToolRule | None) -> object:
        normalizer = self._policy.tool_result_normalizer.get(a.tool)
        value = a.value
        if normalizer is not None:
            try:
                value = normalizer(value)
            except Exception:  # the user's function failed on this answer: the answer itself still identifies
                _log.warning(
                    "runguard.normalizer_failed: tool_result_normalizer[%r] raised; the whole answer is compared",
                    a.tool,
                    exc_info=True,
                )
        if rule is None:
            return value
        if a.outcome is None and rule.failed is not None and _declared_failure(rule.failed, a.value):
            a.outcome = _FAILED
        if rule.volatile and type(value) is dict:
            value = {key: entry for key, entry in value.items() if key not in rule.volatile}
        return value


def _declared_failure(failed: Any, value: object) -> bool:
    if callable(failed):
        try:
            return bool(failed(value))
        except Exception:
            _log.warning(
                "runguard.failed_rule_failed: a tool's `failed` function raised; the answer is judged without it",
                exc_info=True,
            )
            return False
    if type(value) is not dict:
        return False
    for key, wanted in failed.items():
        actual = value.get(key)
        options = wanted if isinstance(wanted, list | tuple) else [wanted]
        if type(actual) in (str, int, float, bool) and actual in options:
            return True
    return False
