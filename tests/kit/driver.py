"""A driver that plays the adapter: it asks the guard before each step and tells it afterwards, with plain events."""

from dataclasses import dataclass
from itertools import count
from typing import Any

from runguard.core.decision import Action, Decision
from runguard.core.events import (
    ROOT_LANE,
    AgentEntered,
    Answer,
    HandOff,
    ModelCall,
    ModelResult,
    Outcome,
    RunInfo,
    ToolCall,
    ToolResults,
)
from runguard.engine.guard import Guard
from runguard.policy import Policy
from runguard.pricing.rates import Usage


@dataclass
class Step:
    """What the guard said before a call (or a batch of calls) and after its answers."""

    before: list[Decision]
    after: Decision

    @property
    def word(self) -> str:
        """The strongest thing that was said: "allow", "warn", "nudge", "block" or "stop"."""
        return max(d.action for d in [*self.before, self.after]).word

    @property
    def trip(self) -> Any:
        return next((d.trip for d in [*self.before, self.after] if d.trip is not None), None)

    @property
    def ran(self) -> bool:
        return not any(refuses(d) for d in self.before)


def refuses(decision: Decision) -> bool:
    return decision.enforced and decision.action >= Action.BLOCK


class Driver:
    """One guard, time that moves by hand, and as many runs as a test wants."""

    def __init__(self, **policy: Any) -> None:
        self.now = 1_000.0
        self.guard = Guard(Policy.validated({"clock": lambda: self.now, **policy}, "keywords"))
        self._ids = count(1)
        self.start("run")

    def start(self, run: str, **info: Any) -> None:
        self.guard.start(RunInfo(run, at=self.now, **info))

    def bill(self, prompt: int, output: int, *, run: str = "run", model: str = "", agent: str = "agent") -> None:
        """What a model call took, told without having been asked for."""
        call = ModelCall(run, ROOT_LANE, agent, self.now, model)
        self.guard.settle(self.guard.accounts.open_settled(self.guard.runs[run].run_costs, call), Usage(prompt, output))

    def lane(
        self, key: str, *, parent: str = ROOT_LANE, concurrent: bool = True, run: str = "run", delegate: str = ""
    ) -> str:
        self.guard.open_lane(self.guard.runs[run], key, parent, concurrent=concurrent, delegate=delegate)
        return key

    def tool(self, tool: str = "look", args: Any = None, says: Any = "same", **how: Any) -> Step:
        """One call and its answer."""
        return self.batch([(tool, args, says)], **how)

    def batch(
        self,
        calls: list[tuple[str, Any, Any]],
        *,
        outcome: Outcome | None = None,
        run: str = "run",
        lane: str = ROOT_LANE,
        agent: str = "agent",
    ) -> Step:
        """Calls of one model response: all are asked for, then answered together; those refused are answered with the
        refusal.
        """
        guard, batch = self.guard, f"batch {next(self._ids)}"
        before, answers = [], []
        for tool, args, says in calls:
            call, call_id = guard.tools.fingerprint(tool, args or {}), f"call {next(self._ids)}"
            decision = guard.check(ToolCall(run, lane, agent, self.now, tool, call, batch, call_id))
            before.append(decision)
            refused = refuses(decision)
            if outcome in (Outcome.ERROR, Outcome.TIMEOUT) and not refused:
                guard.report_failure(guard.runs[run], tool, call_id)
            answers.append(
                Answer(
                    tool,
                    call,
                    None if refused else says,
                    call_id,
                    Outcome.REFUSED if refused else outcome,
                    event_id=batch,
                    args=args,
                )
            )
        return Step(before, guard.after(ToolResults(run, lane, agent, self.now, batch, answers)))

    def model(self, *, run: str = "run", lane: str = ROOT_LANE, agent: str = "agent") -> Decision:
        return self.guard.check(ModelCall(run, lane, agent, self.now, "model-1"))

    def model_result(
        self,
        prompt: int | None,
        output: int | None = 10,
        *,
        run: str = "run",
        lane: str = ROOT_LANE,
        agent: str = "agent",
    ) -> Decision:
        return self.guard.after(ModelResult(run, lane, agent, self.now, prompt, output, "model-1"))

    def enter(self, agent: str, *, run: str = "run", lane: str = ROOT_LANE, branches: int = 0) -> Decision:
        return self.guard.check(AgentEntered(run, lane, agent, self.now, branches=branches))

    def hand_off(self, agent: str, target: str, *, run: str = "run", lane: str = ROOT_LANE) -> Decision:
        return self.guard.check(HandOff(run, lane, agent, target, self.now))

    @property
    def rules_tripped(self) -> list[str]:
        return [trip.rule for trip in self.guard.trips]
