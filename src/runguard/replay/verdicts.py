"""The verdicts on a recorded run as it is played, and what the recording spent after each of them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from runguard.core.decision import Action
from runguard.engine.decide import Decided
from runguard.engine.final_answer import Closing
from runguard.engine.runs import Run
from runguard.pricing.rates import Usage
from runguard.replay.results import CURVE_KEPT, VERDICTS_KEPT, After, RunResult, Verdict


@dataclass(slots=True)
class Stops:
    """What would have been stopped in a run so far."""

    lanes: set[str] = field(default_factory=set)
    run: bool = False
    any: bool = False  # of them
    is_over: bool = False  # nothing more of the run is judged


class Verdicts:
    """Adds decisions and paid steps to one result. ``to_the_end``: judge also what a stopped run would not reach."""

    def __init__(self, result: RunResult, *, to_the_end: bool) -> None:
        self._result, self._to_the_end = result, to_the_end
        self._run: Run | None = None
        self.stops = Stops()
        # verdicts of this run, and what had been spent by then
        self._open: list[tuple[Verdict, int, int, int, int]] = []

    def begin(self, run: Run, stops: Stops | None = None) -> None:
        """A run begins, or goes on with the stops that it had."""
        self._run = run
        self.stops = stops or Stops()

    def end(self) -> Stops:
        """The run has ended or paused: what came after each of its verdicts is known now."""
        result = self._result
        for verdict, calls, tools, tokens, nano in self._open:
            if verdict.action != "stop":
                verdict.after = After(
                    result.model_calls - calls, result.tool_calls - tools, result.tokens - tokens, result.nano - nano
                )
        self._open.clear()
        return self.stops

    def add(self, decided: Decided, at: float) -> None:
        """A decision of the guard."""
        finding, event, result = decided.finding, decided.event, self._result
        action, lane = decided.decision.action, decided.event.lane
        verdict = Verdict(
            *(action.word, finding.rule, result.steps, result.model_calls, event.run, lane, event.agent, finding.tool),
            *(float(finding.observed), float(finding.limit), finding.unit, finding.detail, at, finding.evidence),
            moot=self._covers(lane),
        )
        counts = action is Action.STOP and not verdict.moot
        if len(result.verdicts) < VERDICTS_KEPT or counts:
            result.verdicts.append(verdict)
            self._open.append((verdict, result.model_calls, result.tool_calls, result.tokens, result.nano))
        else:
            result.more += 1
        if counts:
            self.stops.any = True
            known = decided.run.lanes.get(lane)
            owner = known.owner(finding) if finding.scope == "lane" and known is not None else None
            if owner is None:
                self.stops.run, self.stops.is_over = True, not self._to_the_end
                closing = decided.run.closing
                if closing is not None and closing.is_taken:
                    self._answer_last(verdict, closing)
            else:
                self.stops.lanes.add(owner.key)

    def _answer_last(self, verdict: Verdict, closing: Closing) -> None:
        """The stop would have ended with a last answer: its price, at most, is not saved."""
        answer = After(1, 0, closing.tokens, closing.nano)
        self._result.saved.add(answer, -1)
        verdict.after.add(answer, -1)
        self._result.last_answers.add(answer)

    def paid(self, lane: str, usage: Usage, nano: int, *, estimated: bool) -> None:
        """A model call was made."""
        result = self._result
        result.model_calls += 1
        result.prompt_tokens += usage.input
        result.output_tokens += usage.output
        result.nano += nano
        result.estimated += estimated
        if len(result.curve) < CURVE_KEPT:
            result.curve.append((usage.input, nano))
        if self.stops.any:
            self._spend(lane, After(1, 0, usage.input + usage.output, nano))

    def paid_tool(self, lane: str, nano: int, estimated: bool) -> None:
        """A tool with a price was called."""
        self._result.nano += nano
        self._result.estimated += estimated
        if self.stops.any:
            self._spend(lane, After(nano=nano))

    def called(self, lane: str) -> None:
        """A tool was called."""
        self._result.tool_calls += 1
        if self.stops.any:
            self._spend(lane, After(tool_calls=1))

    def _spend(self, lane: str, spent: After) -> None:
        """Count what a stop would have spared: in all, and after the stop that covers it."""
        if not self._covers(lane):
            return
        self._result.saved.add(spent)
        covering = None if self.stops.run else set(self._chain(lane))
        for verdict, *_ in self._open:
            if verdict.action != "stop" or verdict.moot:
                continue
            if covering is None or verdict.lane in covering or self._meets(verdict.lane, covering):
                verdict.after.add(spent)
                return

    def _covers(self, lane: str) -> bool:
        """Whether a stop so far covers a lane."""
        stops = self.stops
        return stops.run or (bool(stops.lanes) and not stops.lanes.isdisjoint(self._chain(lane)))

    def _chain(self, lane: str) -> Iterator[str]:
        """A lane and those above it."""
        at = self._run.lanes.get(lane) if self._run is not None else None
        while at is not None:
            yield at.key
            at = at.parent

    def _meets(self, lane: str, covering: set[str]) -> bool:
        return any(key in covering and key in self.stops.lanes for key in self._chain(lane))
