"""Whether one tool call may run: its side effect happens once, and the breaker of the tool is closed."""

from collections.abc import Callable

from runguard.conductor.breakers import Breakers
from runguard.conductor.deciding import Deciding
from runguard.conductor.runs import Lane, Run
from runguard.conductor.side_effects import Once
from runguard.core.breaker import Permit
from runguard.core.decision import ALLOW, Action, Decision, Finding
from runguard.core.events import Answer, Outcome, ToolCall
from runguard.ledger.ledger import Ledger
from runguard.policy.tools import Tools

_BLOCK, _REFUSED = Action.BLOCK, Outcome.REFUSED


class ToolGate:
    """Decides what runs share about tools: breakers, and side effects that happen once per session."""

    def __init__(
        self,
        clock: Callable[[], float],
        ledger: Ledger,
        tools: Tools,
        breakers: Breakers,
        once: Once,
        deciding: Deciding,
        *,
        on_outage: str,
    ) -> None:
        self._clock, self._ledger, self._tools, self._breakers = clock, ledger, tools, breakers
        self._once, self._deciding, self._goes_on_in_outage = once, deciding, on_outage == "open"

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
        if effect in run.pending_once or self._once.is_done(run.info, effect):
            return
        # before the wait: an equal call beside this one is refused, and the end of the run gives the claim back
        run.pending_once[effect] = call_id
        try:
            mine = await self._once.claim(run.info, effect)
        except BaseException:  # cancelled while it asked: give back whatever was claimed
            self.settle_once(run, effect, False)
            raise
        if mine is None and self._goes_on_in_outage:
            mine = True
        if not mine:
            run.pending_once.pop(effect, None)
            (run.unchecked_once if mine is None else run.claimed_elsewhere).add(effect)

    def check(self, run: Run, lane: Lane, event: ToolCall) -> Decision:
        known, tool = self._tools.known, event.tool
        rule = known[tool] if tool in known else self._tools.rule(tool)
        effect = self._tools.effect_of(event) if rule is not None and rule.once else b""
        if effect:
            taken = run.pending_once.get(effect, event.id) != event.id or effect in run.claimed_elsewhere
            if taken or self._once.is_done(run.info, effect):
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
        failures = breaker.threshold
        found = Finding("breaker", _BLOCK, failures, failures, "failures across runs", "call", tool, tool)
        decision = self._deciding.decide(run, lane, event, found)
        if decision:
            decision.retry_after = breaker.retry_after(now)
        return decision

    def give_up(self, run: Run, event: ToolCall) -> None:
        """A call that was refused was not done: its side effect may be tried again."""
        effect = self._tools.effect_of(event)
        if effect and run.pending_once.get(effect) == event.id:
            self.settle_once(run, effect, False)

    def settle_once(self, run: Run, effect: bytes, done: bool) -> None:
        """A call of a ``once`` tool has ended: done, or free to be tried again."""
        run.pending_once.pop(effect, None)
        self._once.settle(run.info, effect, done)

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
        """A tool raised or timed out. Nothing else opens its breaker across runs."""
        held = run.permits.pop(call_id, None)
        permit = held[1] if held is not None else Permit(0)  # begun before the breaker existed
        self._breakers.report(tool, permit, False, self._clock(), run.info.run)
