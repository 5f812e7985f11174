"""The result of one recorded run under one policy, and the totals of all runs: plain data for any process.

``player`` fills a ``RunResult`` with ``Verdicts``, ``ReplayedPrices`` and ``ReplayedSwitches``. ``output`` sums results
up in ``Totals``. ``calibrate`` and ``gate`` read them.
"""

from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from math import sqrt
from typing import Any, Final

from runguard.core.decision import Action, Decision, against_limit
from runguard.core.events import ModelCall, ToolCall
from runguard.core.money import to_usd
from runguard.engine.context import ModelChoice
from runguard.engine.decide import Decided
from runguard.engine.guard import Guard
from runguard.engine.runs import Run, SetAside
from runguard.engine.spending import Summable
from runguard.engine.tools import bound_of
from runguard.pricing.book import Pricing
from runguard.pricing.rates import Rates, Usage
from runguard.reporting.journal import Entry

CURVE_KEPT: Final = 400  # turns whose prompt and cost are kept for the plots
VERDICTS_KEPT: Final = 200


@dataclass(slots=True)
class After(Summable):
    """What the recording spent after a decision."""

    model_calls: int = 0
    tool_calls: int = 0
    tokens: int = 0
    nano: int = 0


@dataclass(slots=True)
class Waited(Summable):
    """Calls that would have waited for room in a budget, and how long. A replay does not wait."""

    calls: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {"waited": {"calls": self.calls, "seconds": round(self.seconds, 3)}} if self.calls else {}


@dataclass(slots=True)
class Verdict:
    """A decision that the guard would have made."""

    action: str
    rule: str
    step: int  # of the recorded run, from 1
    turn: int  # model calls made before it
    run: str
    lane: str
    agent: str
    tool: str
    observed: float
    limit: float
    unit: str
    detail: str
    at: float
    evidence: tuple[dict[str, str], ...] = ()
    moot: bool = False  # not reached: the run was already stopped
    after: After = field(default_factory=After)

    @property
    def about(self) -> str:
        return f" of {self.tool}" if self.tool else ""

    def __str__(self) -> str:
        done = {"stop": "stopped", "block": "refused", "nudge": "nudged", "warn": "warned"}.get(
            self.action, self.action
        )
        return f"{done} by {self.rule}{self.about}: {against_limit(self.observed, self.unit, self.limit)}"


@dataclass(slots=True, kw_only=True)
class Taken:
    """What runs took, and what a policy would have changed of it."""

    steps: int = 0
    model_calls: int = 0
    tool_calls: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    nano: int = 0
    unpriced: int = 0  # model calls without a price
    estimated: int = 0  # model calls whose tokens are estimated
    saved: After = field(default_factory=After)  # after the stops
    # calls that would have gone to a cheaper model, and how much less they would have cost
    switched: After = field(default_factory=After)
    waited: Waited = field(default_factory=Waited)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(slots=True)
class RunResult(Taken):
    """Counts, cost and verdicts of one recorded run."""

    id: str
    app: str = ""
    user: str = ""
    session: str = ""
    source: str = ""
    success: bool | None = None
    capped: bool | None = None
    was_stopped: bool = False  # by RunGuard, when it was recorded
    runs: int = 0  # user messages
    verdicts: list[Verdict] = field(default_factory=list)
    more: int = 0  # verdicts beyond the limit, counted only
    curve: list[tuple[int, int]] = field(default_factory=list)  # per model call: prompt tokens, nano-USD
    last_answers: After = field(default_factory=After)  # calls that ``final_answer`` would have made, at most

    @property
    def usd(self) -> Decimal | None:
        """None if no call had a price."""
        return None if self.unpriced and not self.nano else to_usd(self.nano)

    def firsts(self) -> dict[str, Verdict]:
        """Return the first verdict of each action before any stop."""
        found: dict[str, Verdict] = {}
        for verdict in self.verdicts:
            if not verdict.moot:
                found.setdefault(verdict.action, verdict)
        return found

    def first(self, action: str) -> Verdict | None:
        """Return the first verdict of that action before any stop."""
        return self.firsts().get(action)

    def to_dict(self) -> dict[str, Any]:
        names = ("id", "app", "user", "session", "source", "success", "capped", "steps", "runs", *_CALLS_AND_TOKENS)
        data = _picked(self, *names)
        data |= {"usd": _text(self.usd), "unpriced_calls": self.unpriced, "estimated_calls": self.estimated}
        data["verdicts"] = [asdict(verdict) | {"after": after_dict(verdict.after)} for verdict in self.verdicts]
        data |= {"more_verdicts": self.more, "after_stop": after_dict(self.saved)}
        if self.last_answers.model_calls:
            data["last_answers"] = after_dict(self.last_answers)
        return data | self.waited.to_dict() | switched_dict(self.switched)


_CALLS_AND_TOKENS: Final = ("model_calls", "tool_calls", "prompt_tokens", "output_tokens")


def _picked(of: object, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def after_dict(after: After) -> dict[str, Any]:
    return _picked(after, "model_calls", "tool_calls", "tokens") | {"usd": _text(to_usd(after.nano))}


def switched_dict(switched: After) -> dict[str, Any]:
    """Return the calls that would have gone to a cheaper model, if there are any."""
    if not switched.model_calls:
        return {}
    saved_usd = _text(to_usd(switched.nano))
    return {"switched": _picked(switched, "model_calls", "tokens") | {"saved_usd": saved_usd}}


def _text(usd: Decimal | None) -> str | None:
    return None if usd is None else f"{usd:f}"


# ---- totals of all runs under one policy, in constant memory

TURNS: Final = 200  # model calls of a run that the plots show
BINS: Final = 20
_LISTED: Final = 1_000
_LINES: Final = 12


@dataclass(slots=True)
class Group(Taken):
    """Sums over runs with the same label."""

    runs: int = 0
    nudged: int = 0
    blocked: int = 0
    stopped: int = 0
    user_turns: int = 0

    def add(self, run: RunResult) -> None:
        firsts = run.firsts()
        self.runs += 1
        self.user_turns += run.runs
        self.nudged += "nudge" in firsts
        self.blocked += "block" in firsts
        self.stopped += "stop" in firsts
        for name in ("steps", *_CALLS_AND_TOKENS, "nano", "unpriced", "estimated"):
            setattr(self, name, getattr(self, name) + getattr(run, name))
        for name in ("saved", "switched", "waited"):
            getattr(self, name).add(getattr(run, name))

    def to_dict(self) -> dict[str, Any]:
        data = _picked(self, "runs", "nudged", "blocked", "stopped")
        data["stopped_interval"] = [round(edge, 4) for edge in wilson(self.stopped, self.runs)]
        data |= switched_dict(self.switched) | self.waited.to_dict() | _picked(self, "model_calls", "tokens")
        return data | {"usd": _text(to_usd(self.nano)), "after_stop": after_dict(self.saved)}


@dataclass(slots=True)
class RuleTotals:
    """One rule: how often it acted first, and what the recordings spent after its stops."""

    nudge: int = 0
    block: int = 0
    stop: int = 0
    false_stops: int = 0
    saved: After = field(default_factory=After)


class Totals:
    """Sums over runs, and the data for the plots."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.all = Group()
        self.by_label = {"success": Group(), "failure": Group(), "unlabelled": Group()}
        self.rules: dict[str, RuleTotals] = {}
        self.false_stops: list[str] = []
        self.false_stop_count = 0
        self.stop_shares = [0] * BINS  # where in its run a stop falls
        self.prompt_sums, self.cost_sums, self.turn_counts = [0] * TURNS, [0] * TURNS, [0] * TURNS
        # the most expensive runs: weight, id, curve and the turn of the stop
        self.lines: list[tuple[int, str, list[tuple[int, int]], int | None]] = []

    def add(self, run: RunResult) -> None:
        self.all.add(run)
        self.by_label[{True: "success", False: "failure", None: "unlabelled"}[run.success]].add(run)
        firsts = run.firsts()
        firsts.pop("warn", None)
        for action, verdict in firsts.items():
            rule = self.rules.setdefault(verdict.rule, RuleTotals())
            setattr(rule, action, getattr(rule, action) + 1)
        stop = firsts.get("stop")
        if stop is not None:
            self.stop_shares[min(int(stop.turn / max(run.model_calls, 1) * BINS), BINS - 1)] += 1
            rule = self.rules[stop.rule]
            rule.saved.add(run.saved)
            if run.success is True:
                rule.false_stops += 1
                self.false_stop_count += 1
                if len(self.false_stops) < _LISTED:
                    self.false_stops.append(run.id)
        self._plot(run, stop.turn if stop is not None else None)

    def _plot(self, run: RunResult, stop: int | None) -> None:
        for turn, (prompt, nano) in enumerate(run.curve[:TURNS]):
            self.turn_counts[turn] += 1
            self.prompt_sums[turn] += prompt
            self.cost_sums[turn] += nano
        weight = run.nano or run.tokens
        if len(self.lines) < _LINES or weight > self.lines[-1][0]:
            self.lines.append((weight, run.id, run.curve, stop))
            self.lines.sort(key=lambda line: -line[0])
            del self.lines[_LINES:]

    @property
    def groups(self) -> dict[str, Group]:
        """All runs, and those of each label where there are several."""
        labelled = {name: group for name, group in self.by_label.items() if group.runs and group.runs != self.all.runs}
        return {"all": self.all, **labelled}

    def to_dict(self) -> dict[str, Any]:
        every = self.all
        rules = {
            name: _picked(rule, "nudge", "block", "stop", "false_stops") | {"after_stop": after_dict(rule.saved)}
            for name, rule in sorted(self.rules.items())
        }
        return {
            **every.to_dict(),
            **_picked(every, "steps", "tool_calls", "prompt_tokens", "output_tokens", "user_turns"),
            "unpriced_calls": every.unpriced,
            "estimated_calls": every.estimated,
            "by_label": {name: group.to_dict() for name, group in self.by_label.items()},
            "by_rule": rules,
            "false_stops": {"count": self.false_stop_count, "ids": self.false_stops},
        }


def wilson(hits: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's 95 % interval for a share."""
    if not total:
        return 0.0, 1.0
    share, spread = hits / total, z * z / total
    middle, half = share + spread / 2, z * sqrt(share * (1 - share) / total + spread / total / 4)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


# ---- verdicts on a run as it is played, and what the recording spent after each of them


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
        """Begin a run, or continue it with the stops that it had."""
        self._run = run
        self.stops = stops or Stops()

    def end(self) -> Stops:
        """End or pause the run, now that what came after each of its verdicts is known; return its stops."""
        result = self._result
        for verdict, calls, tools, tokens, nano in self._open:
            if verdict.action != "stop":
                verdict.after = After(
                    result.model_calls - calls, result.tool_calls - tools, result.tokens - tokens, result.nano - nano
                )
        self._open.clear()
        return self.stops

    def add(self, decided: Decided, at: float) -> None:
        """Count a decision of the guard."""
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
                closing = decided.run.set_aside
                if closing is not None and closing.is_taken:
                    self._answer_last(verdict, closing)
            else:
                self.stops.lanes.add(owner.key)

    def _answer_last(self, verdict: Verdict, closing: SetAside) -> None:
        """Take the price of the last answer, at most, from what the stop saves."""
        answer = After(1, 0, closing.tokens, closing.nano)
        self._result.saved.add(answer, -1)
        verdict.after.add(answer, -1)
        self._result.last_answers.add(answer)

    def paid(self, lane: str, usage: Usage, nano: int, *, estimated: bool) -> None:
        """Count a model call."""
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
        """Count the price of a tool call."""
        self._result.nano += nano
        self._result.estimated += estimated
        if self.stops.any:
            self._spend(lane, After(nano=nano))

    def called(self, lane: str) -> None:
        """Count a tool call."""
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
        """Yield a lane and those above it."""
        at = self._run.lanes.get(lane) if self._run is not None else None
        while at is not None:
            yield at.key
            at = at.parent

    def _meets(self, lane: str, covering: set[str]) -> bool:
        return any(key in covering and key in self.stops.lanes for key in self._chain(lane))


# ---- prices of tools, and what the model calls would have cost on a cheaper model


class ReplayedPrices:
    """The priced tool calls of one player.

    A journal holds no arguments and no answers: where this policy has no fixed price, what was booked then counts.
    """

    def __init__(self, guard: Guard, on_paid: Callable[[str, int, bool], None]) -> None:
        """``on_paid`` is called with the lane, the nano-USD and whether they are an estimate."""
        self._guard, self._on_paid = guard, on_paid
        self._called: dict[str, ToolCall] = {}  # of a journal, until it is known what they cost
        guard.tool_prices.on_paid = on_paid

    def called(self, run: Run, event: ToolCall, args: object) -> None:
        """Reserve the price of a recorded call; the guard books it when it sees the answer."""
        if self._guard.tools.has_prices:
            drive_now(self._guard.reserve_tool(run, event, args))

    def unjudged(self, tool: str, lane: str, args: object) -> None:
        """Bill a call after the stop, which the guard does not see."""
        rule = self._guard.tools.rule(tool) if self._guard.tools.has_prices else None
        if rule is not None and rule.price is not None:
            self._on_paid(lane, bound_of(rule, args)[0] or 0, callable(rule.price))

    # ---- a journal --------------------------------------------------------------------------------------------------

    def noted(self, run: Run, event: ToolCall, *, is_over: bool) -> None:
        if not self._has_fixed_price(event.tool):
            self._called[event.id] = event
        elif is_over:
            self.unjudged(event.tool, event.lane, None)
        else:
            self.called(run, event, None)

    def held(self, run: Run, entry: Entry) -> None:
        event, bound = self._called.get(str(entry.get("id"))), entry["bound"]
        if event is not None:
            drive_now(self._guard.tool_prices.hold(run, event, bound, bound))

    def paid(self, run: Run, entry: Entry) -> None:
        call_id, nano, estimated = str(entry.get("id")), entry["nano"], bool(entry.get("estimated"))
        event = self._called.pop(call_id, None)
        if call_id in run.bills:
            if event is None:
                self._guard.settle_tool(run, call_id, None, None)
            else:
                self._guard.tool_prices.settle_at(run, call_id, nano, estimated=estimated)
        elif not self._has_fixed_price(str(entry.get("tool") or "")):
            self._on_paid(event.lane if event is not None else "", nano, estimated)

    def not_made(self, run: Run, entry: Entry) -> None:
        self._called.pop(str(entry.get("id")), None)
        self._guard.release_tool(run, str(entry.get("id")))

    def _has_fixed_price(self, tool: str) -> bool:
        rule = self._guard.tools.rule(tool)
        return rule is not None and rule.price is not None and not callable(rule.price)


def drive_now(waiting: Coroutine[Any, Any, Decision]) -> Decision:
    """Run a coroutine that has nothing to wait for: accounts in memory, shadow mode."""
    try:
        waiting.send(None)
    except StopIteration as done:
        decision: Decision = done.value
        return decision
    waiting.close()
    raise RuntimeError("a reservation in memory had to wait")


class ReplayedSwitches:
    """The switches of one recorded run. The recording goes on with its own models, so the saving is an estimate."""

    def __init__(self, choice: ModelChoice, pricing: Pricing, result: RunResult) -> None:
        self._choice, self._pricing, self._result = choice, pricing, result
        self._chosen: dict[tuple[str, str], str] = {}  # by lane and agent: the model of its last call

    def asked(self, run: Run, event: ModelCall) -> None:
        """Choose the model of a recorded call. Recordings hold answered calls, so every point is a safe one."""
        chosen = self._choice.choose(run, event, lambda: False, lambda model: "")
        before = self._chosen.get((event.lane, event.agent), "")
        self._chosen[event.lane, event.agent] = chosen
        event.cheaper = chosen, chosen != before

    def paid(self, event: ModelCall, usage: Usage, nano: int) -> None:
        """Count a call on the chosen model, whose first call finds no cache."""
        model, is_first = event.cheaper or ("", False)
        rates = self._pricing.rates(model, event.at) if model else None
        if not isinstance(rates, Rates):
            return
        if is_first:
            usage = replace(usage, cached=0, cached_audio=0, cache_write=usage.cache_write + usage.cached)
        self._result.switched.model_calls += 1
        self._result.switched.tokens += usage.input + usage.output
        self._result.switched.nano += nano - rates.cost(usage)
