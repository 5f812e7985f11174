"""The rows that a view of a store returns, how its records are read, and the story of a stop.

``view/store`` fills the rows and calls ``build_story``. The screens of the command line and the dashboard show both.
Only values in, only values out: nothing here reads a store.
"""

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any, Final
from urllib.parse import urlsplit

from runguard.core.decision import printable
from runguard.core.money import UNITS, BudgetForecast, amount_text, nanos, to_usd

# ---- rows: the results of reading a store, as plain values


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One unit of one budget on one scope in its current period. The cap is ``limit`` plus ``granted``."""

    scope: str
    window: str | None
    unit: str
    limit: Decimal | int
    granted: Decimal | int
    spent: Decimal | int
    reserved: Decimal | int
    overrun: Decimal | int
    share: float  # spent plus reserved, divided by the cap
    closed: bool
    ends: float | None
    forecast: BudgetForecast | None = None  # None: no window, or too few calls


@dataclass(frozen=True, slots=True)
class Ahead:
    """A limit that a run will reach: how many calls still fit, and what they will cost. An estimate."""

    calls_left: int
    usd: Decimal | None
    limit: Decimal | int | None
    unit: str
    agent: str  # "": the whole run


@dataclass(frozen=True, slots=True)
class RunForecast:
    calls: int  # that it is based on
    cap: Ahead | None
    window: Ahead | None  # of the model
    tier: Ahead | None  # a higher price of the model


@dataclass(frozen=True, slots=True)
class RunningRow:
    """A recently active run. Facts that its worker did not report are None."""

    run: str
    worker: str
    silent_s: float  # since its last heartbeat
    seconds: float | None
    app: str
    user: str
    session: str
    model_calls: int | None
    tool_calls: int | None
    tokens: int | None
    in_flight: int | None
    spent_usd: Decimal | None
    reserved_usd: Decimal | None
    unpriced_calls: int
    estimated_calls: int
    nudges: int
    stopped: str | None  # the rule
    forecast: RunForecast | None = None  # None: too few calls
    notes: tuple[str, ...] = ()  # agents on a cheaper model, and a prompt cache that is no longer used
    waiting: int = 0  # calls that wait for room in a budget, or for their provider


@dataclass(frozen=True, slots=True)
class BreakerRow:
    tool: str
    state: str  # as stored; an open breaker allows one probe after its time is up
    failures: int
    runs: int  # runs with failures
    opened_at: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Usage of calls. Calls without a price are counted, but ``usd`` does not contain them."""

    name: str
    usd: Decimal
    tokens: int
    calls: int  # of models
    unpriced: int
    estimated: int
    tool_calls: int = 0  # of tools that have a price


@dataclass(frozen=True, slots=True)
class Spend:
    """Spending over time, grouped by one property of the calls."""

    by: str
    since: float
    until: float
    step: float  # seconds of one bucket
    begins: tuple[float, ...]  # of each bucket
    names: tuple[str, ...]  # the most expensive ones; the last may be "others"
    usd: tuple[tuple[float, ...], ...]  # for each name, for each bucket
    tokens: tuple[tuple[int, ...], ...]
    totals: tuple[Figures, ...]
    total: Figures
    capped_at: int | None  # number of records read, if they do not reach back to ``since``
    scope: str = ""  # only calls with a scope that starts with this


@dataclass(frozen=True, slots=True)
class Projection:
    """The projected cost of the run up to ADK's own cap on model calls."""

    cap: int
    made: int
    mean_usd: Decimal  # of the last few calls
    more_usd: Decimal
    total_usd: Decimal


@dataclass(frozen=True, slots=True)
class Repeat:
    what: str  # "call" (identical), "hand-off", or the unit in which a rule counts
    name: str
    times: int
    same_answer: int  # how often the most frequent answer came; 0: unknown


@dataclass(slots=True)
class StoryRow:
    """One event of a run."""

    after_s: float
    agent: str
    lane: str
    kind: str  # begin, hand, model, tool, decision
    what: str
    name: str = ""  # of the model, the tool, or the agent it was handed to
    nth_call: int = 0  # how often this identical call was made so far
    nth_answer: int = 0  # how often this identical answer came for it so far
    outcome: str = ""
    tokens_in: int | None = None
    tokens_out: int | None = None
    usd: Decimal | None = None
    estimated: bool = False
    decision: str = ""


@dataclass(frozen=True, slots=True)
class Story:
    """The course of a run up to its stop."""

    trip: dict[str, Any]
    rows: tuple[StoryRow, ...]
    left_out: int  # rows before the first one in ``rows``
    source: str  # "steps", "calls" (an older store: only model calls) or "trip" (nothing else is stored)
    repeats: tuple[Repeat, ...]
    why: tuple[str, ...]  # as text; empty if the reason is a repetition
    command: str  # shell command to continue; empty if there is none
    usd: Decimal | None  # up to the stop; None: unknown
    later_usd: Decimal  # in flight at the stop, in other branches, or after a stop in shadow mode
    unpriced: int
    estimated: int
    projection: Projection | None


def plain(value: Any) -> Any:
    """Convert a value to JSON data, money as decimal strings."""
    if isinstance(value, Decimal):
        return f"{value:f}"
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


# ---- records of a store as values; what cannot be read is counted

_NOTES_SHOWN: Final = 5  # agents


class Unreadable:
    """The number of unreadable records of each kind in the last read."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def table(text: str) -> dict[str, Any] | None:
    """Parse a JSON object; None if the text is not one."""
    found = _parsed(text)
    return found if isinstance(found, dict) else None


def entries(text: str) -> list[dict[str, Any]] | None:
    """Parse a JSON list and return its objects; None if the text is not a list."""
    found = _parsed(text)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def word(value: Any) -> str:
    return value if isinstance(value, str) else ""


def count(value: Any) -> int:
    return whole(value) or 0


def whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e15 else None


def number(value: Any) -> float | None:
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else None
    )


def dollars(value: Any) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        return None
    return amount if amount.is_finite() and abs(amount) < 10**12 else None


@dataclass(frozen=True, slots=True)
class Call:
    """One model call, or one tool call with a price, with its usage and cost."""

    at: float  # when it was recorded, by the store's clock
    run: str
    id: str
    app: str
    user: str
    agent: str
    model: str
    tool: str
    tokens_in: int
    tokens_out: int
    nano: int | None  # None: no price
    estimated: bool
    is_tool: bool = False  # the price of a tool call


def read_call(at: float, run: str, text: str) -> Call | None:
    found = table(text)
    if found is None:
        return None
    usd = dollars(found.get("usd"))
    return Call(
        at,
        run,
        word(found.get("id")),
        word(found.get("app")),
        word(found.get("user")),
        word(found.get("agent")),
        word(found.get("model")),
        word(found.get("tool")),
        count(found.get("input")),
        count(found.get("output")),
        nanos(usd) if usd is not None else None,
        bool(found.get("estimated")),
        found.get("kind") == "tool",
    )


def latest(calls: list[Call]) -> list[Call]:
    """Return each call once: a later record with the same id replaces the earlier one."""
    calls_by_id: dict[tuple[str, str] | int, Call] = {}
    for position, call in enumerate(calls):
        key: tuple[str, str] | int = (call.run, call.id) if call.id else position
        before = calls_by_id.get(key)
        calls_by_id[key] = call if before is None else replace(call, at=before.at)
    return list(calls_by_id.values())


def read_forecast(value: Any) -> RunForecast | None:
    """Return the forecast of a run as its worker reported it, or None."""
    if not isinstance(value, dict):
        return None
    return RunForecast(count(value.get("calls")), *(_ahead(value.get(name)) for name in ("cap", "window", "tier")))


def _ahead(value: Any) -> Ahead | None:
    if not isinstance(value, dict) or (left := whole(value.get("calls_left"))) is None:
        return None
    unit = word(value.get("unit"))
    limit = dollars(value.get("limit")) if unit == "usd" else whole(value.get("limit"))
    return Ahead(left, dollars(value.get("usd")), limit, unit, word(value.get("agent")))


def notes_of(facts: dict[str, Any]) -> tuple[str, ...]:
    """Return what a running run reports beside its figures: agents on a cheaper model, a lost prompt cache."""
    switched = facts.get("switched")
    notes = [
        f"{agent} on {word(one.get('to'))} instead of {word(one.get('from'))}: {word(one.get('because'))}"
        for agent, one in list(switched.items() if isinstance(switched, dict) else ())[:_NOTES_SHOWN]
        if isinstance(one, dict)
    ]
    lost = word(facts.get("prompt_cache"))
    return (*notes, *([f"prompt cache: {lost}"] if lost else ()))


# ---- the story of a stop: the events of the run, what repeated, its cost and its projected cost

ADK_MODEL_CALLS: Final = 500  # the default of RunConfig.max_llm_calls
NOT_MADE: Final = "not made"
REFUSED: Final = "refused"
_LAST_CALLS: Final = 5  # the projection uses their mean
_ROWS_KEPT: Final = 500
_REPEATS_KEPT: Final = 3


def build_story(
    trip: dict[str, Any], calls: Sequence[Call], steps: Sequence[dict[str, Any]], store: str | None = None
) -> Story:
    """Return the story of a stop.

    ``calls``: what each model call of the run took. ``steps``: what happened, where the store has it. ``store``: its
    address, for commands.
    """
    if steps:
        timeline = _Timeline(steps)
        rows, repeats, source = timeline.rows, timeline.repeats(), "steps"
    else:
        rows, repeats, source = _model_calls(calls), [], "calls" if calls else "trip"
    until, later = _parted(trip, calls)
    return Story(
        trip,
        tuple(rows[-_ROWS_KEPT:]),
        max(len(rows) - _ROWS_KEPT, 0),
        source,
        tuple(repeats or _repeat_of(trip)),
        why_of(trip),
        command_of(trip, store),
        cost_of(trip, calls),
        to_usd(sum(call.nano or 0 for call in later)),
        sum(call.nano is None for call in calls),
        sum(call.estimated for call in calls),
        _projection(trip, until, _cap(steps)),
    )


def cost_of(trip: dict[str, Any], calls: Sequence[Call]) -> Decimal | None:
    """Return the cost of the run up to the stop, from its calls; None: unknown."""
    known = [call.nano for call in _parted(trip, calls)[0] if call.nano is not None]
    made_none = not calls and whole(trip.get("model_calls")) == 0
    return to_usd(sum(known)) if known or made_none else None


def _parted(trip: dict[str, Any], calls: Sequence[Call]) -> tuple[list[Call], list[Call]]:
    """Return the calls up to the stop, and those after it. Both are recorded by one clock, in order.

    A run that was stopped as a whole makes no further call: what is recorded later was in flight at the stop.
    """
    if trip.get("enforced") is not False and trip.get("branch") is None:
        return list(calls), []
    at = number(trip.get("recorded_at"))
    return [call for call in calls if at is None or call.at <= at], [
        call for call in calls if at is not None and call.at > at
    ]


def _cap(steps: Sequence[dict[str, Any]]) -> int | None:
    """Return the framework's limit on model calls for this run; ADK's default if unknown."""
    begin = next((step for step in steps if step.get("k") == "start"), None)
    return ADK_MODEL_CALLS if begin is None else whole(begin.get("model_call_limit"))


def _projection(trip: dict[str, Any], calls: Sequence[Call], cap: int | None) -> Projection | None:
    last = [call.nano for call in [call for call in calls if not call.is_tool][-_LAST_CALLS:]]
    priced = [nano for nano in last if nano is not None]
    made = whole(trip.get("model_calls")) or sum(not call.is_tool for call in calls)
    if cap is None or not last or len(priced) < len(last) or made >= cap:
        return None
    mean = sum(priced) // len(priced)
    more = mean * (cap - made)
    spent = sum(call.nano or 0 for call in calls)
    return Projection(cap, made, to_usd(mean), to_usd(more), to_usd(spent + more))


def _repeat_of(trip: dict[str, Any]) -> list[Repeat]:
    """Return the count of the rule itself, if nothing else is known."""
    tool, times, unit = word(trip.get("tool")), number(trip.get("observed")), word(trip.get("unit"))
    return [Repeat(unit, tool, int(times), 0)] if tool and unit and times is not None and 2 <= times < 10**6 else []


def _model_calls(calls: Sequence[Call]) -> list[StoryRow]:
    begin = calls[0].at if calls else 0.0
    return [
        StoryRow(
            call.at - begin, call.agent, "",
            *(("tool", "tool call", call.tool) if call.is_tool else ("model", "model call", call.model)),
            tokens_in=call.tokens_in, tokens_out=call.tokens_out, estimated=call.estimated,
            usd=to_usd(call.nano) if call.nano is not None else None,
        )
        for call in calls
    ]  # fmt: skip


class _Timeline:
    """Converts steps to rows: one row per model call with its answer and price, one per tool call with its answer."""

    def __init__(self, steps: Sequence[dict[str, Any]]) -> None:
        self.rows: list[StoryRow] = []
        self._begin = next((at for step in steps if (at := number(step.get("t"))) is not None), 0.0)
        self._open_calls: list[StoryRow] = []  # model calls without an answer
        self._last_call: StoryRow | None = None  # the model call that this step started or withdrew
        self._fresh: StoryRow | None = None  # the one of the step before
        self._has_stopped = self._stopped = False  # this step, and the step before
        self._numbered: dict[int, StoryRow] = {}  # model calls
        self._called: dict[str, StoryRow] = {}  # tool calls without an answer, by id
        self._tool_rows: dict[str, StoryRow] = {}  # all of them
        self._calls: Counter[tuple[str, str]] = Counter()
        self._answers: Counter[tuple[str, str, str]] = Counter()
        self._hands: Counter[tuple[str, str]] = Counter()
        readers: dict[str, Callable[[dict[str, Any]], object]] = {
            "enter": lambda step: self._row(step, "begin", "begins"),
            "hand": self._hand,
            "ask": self._ask,
            "got": self._got,
            "paid": self._paid,
            "tool_paid": self._paid_tool,
            "back": lambda step: self._take_back(self._model_call(step), NOT_MADE),
            "unspent": self._unspent,
            "call": self._call,
            "answers": self._answered,
            "decision": self._decided,
        }
        for step in steps:
            self._fresh, self._stopped = self._last_call, self._has_stopped
            self._last_call, self._has_stopped = None, False
            if (read := readers.get(word(step.get("k")))) is not None:
                read(step)

    def _row(self, step: dict[str, Any], kind: str, what: str, name: str = "") -> StoryRow:
        at = number(step.get("t"))
        row = StoryRow(
            at - self._begin if at is not None else 0.0, word(step.get("a")), word(step.get("l")), kind, what, name
        )
        self.rows.append(row)
        return row

    def _hand(self, step: dict[str, Any]) -> None:
        to = word(step.get("to"))
        self._hands[word(step.get("a")), to] += 1
        self._row(step, "hand", "hands over to", to).nth_call = self._hands[word(step.get("a")), to]

    def _ask(self, step: dict[str, Any]) -> None:
        row = self._row(step, "model", "model call", word(step.get("model")))
        if asked := word(step.get("instead_of")):
            row.name = f"{row.name} instead of {asked}"
        row.tokens_in = whole(step.get("in"))
        self._open_calls.append(row)
        self._last_call = row
        self._numbered[count(step.get("n"))] = row

    def _got(self, step: dict[str, Any]) -> None:
        """Match an answer to its call; an answer does not name its call, but in one lane they come in order."""
        lane, agent = word(step.get("l")), word(step.get("a"))
        row = next((row for row in self._open_calls if (row.lane, row.agent) == (lane, agent)), None)
        if row is None:
            row = self._row(step, "model", "model call")
        else:
            self._open_calls.remove(row)
        row.tokens_in, row.tokens_out = whole(step.get("in")) or row.tokens_in, whole(step.get("out"))

    def _model_call(self, step: dict[str, Any]) -> StoryRow:
        known = self._numbered.get(count(step.get("n")))
        return known if known is not None else self._row(step, "model", "model call", word(step.get("model")))

    def _unspent(self, step: dict[str, Any]) -> None:
        """Mark the row of a call that was not made: the one with this number, or in older records the last asked.

        A refusal is decided just before or just after.
        """
        row = self._numbered.get(count(step.get("n"))) or (self._open_calls[-1] if self._open_calls else None)
        if row is not None and row.usd is None:
            self._take_back(row, REFUSED if self._stopped or step.get("denied") else NOT_MADE)
            self._last_call = row

    def _take_back(self, row: StoryRow, outcome: str) -> None:
        row.outcome, row.tokens_in, row.tokens_out, row.usd = outcome, 0, 0, Decimal(0)
        if row in self._open_calls:
            self._open_calls.remove(row)

    def _paid(self, step: dict[str, Any]) -> None:
        row = self._model_call(step)
        usd = dollars(step.get("usd"))
        row.usd, row.outcome = to_usd(nanos(usd)) if usd is not None else None, ""
        row.tokens_in, row.tokens_out = whole(step.get("in")) or row.tokens_in, whole(step.get("out")) or row.tokens_out
        row.estimated = bool(step.get("estimated"))

    def _call(self, step: dict[str, Any]) -> None:
        tool, digest = word(step.get("tool")), word(step.get("call"))
        self._calls[tool, digest] += 1
        row = self._row(step, "tool", "tool call", tool)
        row.nth_call = self._calls[tool, digest]
        self._called[word(step.get("id"))] = self._tool_rows[word(step.get("id"))] = row

    def _paid_tool(self, step: dict[str, Any]) -> None:
        row = self._tool_rows.get(word(step.get("id"))) or self._row(step, "tool", "tool call", word(step.get("tool")))
        row.usd, row.estimated = to_usd(count(step.get("nano"))), bool(step.get("estimated"))

    def _answered(self, step: dict[str, Any]) -> None:
        given = step.get("of")
        for answer in given if isinstance(given, list) else ():
            if not isinstance(answer, dict):
                continue
            tool, digest, text = word(answer.get("tool")), word(answer.get("call")), str(answer.get("answer") or "")
            row = self._called.pop(word(answer.get("id")), None)
            if row is None:  # its call is older than the stored steps
                row = self._row(step, "tool", "tool call", tool)
            row.outcome = word(answer.get("as"))
            if text and row.outcome != "refused":
                self._answers[tool, digest, text] += 1
                row.nth_answer = self._answers[tool, digest, text]

    def _decided(self, step: dict[str, Any]) -> None:
        row, fresh = self._row(step, "decision", word(step.get("rule")), word(step.get("tool"))), self._fresh
        row.decision = word(step.get("do"))
        self._has_stopped = row.decision in ("stop", "block") and step.get("enforced") is not False
        if self._has_stopped and fresh is not None and (fresh.lane, fresh.agent) == (row.lane, row.agent):
            self._take_back(fresh, REFUSED)
        observed, limit = (
            counted(step.get("unit"), step.get("observed")),
            counted("usd" if step.get("unit") == "usd" else "", step.get("limit")),
        )
        if observed and limit and row.what not in WITHOUT_A_COUNT:
            ahead = " with this call" if row.what == "budget" and row.decision == "stop" else ""
            row.outcome = f"{observed}{ahead}, limit {limit}"

    def repeats(self) -> list[Repeat]:
        """Return what occurred more than twice, the most frequent first."""
        found = [
            Repeat(
                "call",
                tool,
                times,
                max((n for (t, c, _), n in self._answers.items() if (t, c) == (tool, digest)), default=0),
            )
            for (tool, digest), times in self._calls.items()
            if times > 2
        ]
        found += [
            Repeat("hand-off", f"{source} → {target}", times, 0)
            for (source, target), times in self._hands.items()
            if times > 2
        ]
        return sorted(found, key=lambda repeat: -repeat.times)[:_REPEATS_KEPT]


# ---- the reason of a stop as text, and the command that lets the run continue

# Rules that count repetitions; every other rule has its own reason.
OF_REPETITION: Final = frozenset(
    {
        "repetition",
        "no_news",
        "same_call",
        "cycle",
        "stall",
        "tool_failures",
        "handoff",
        "talk",
        "reentry",
        "polling",
        "empty",
    }
)
# rules without a count
WITHOUT_A_COUNT: Final = frozenset({"kill_switch", "guard_error", "policy_error", "unpriced"})


def why_of(trip: dict[str, Any]) -> tuple[str, ...]:
    """Return the reason of a stop; empty if the reason is a repetition."""
    rule = word(trip.get("rule"))
    if rule in OF_REPETITION:
        return ()
    if rule == "kill_switch":
        scope = word(trip.get("scope_id"))
        detail = _detail(trip)
        return (f"{'everything' if scope == 'all' else scope} was {detail}" if detail else word(trip.get("message")),)
    if rule == "budget" and (reason := _budget_reason(trip)):
        return reason
    if rule in WITHOUT_A_COUNT or rule == "budget":
        return (_detail(trip) or word(trip.get("message")),)
    observed, limit = counted(trip.get("unit"), trip.get("observed")), counted(trip.get("unit"), trip.get("limit"))
    return (
        (f"The rule “{rule}” counted {observed}; its limit is {limit}.",)
        if observed and limit
        else (word(trip.get("message")),)
    )


def _budget_reason(trip: dict[str, Any]) -> tuple[str, ...]:
    listed = trip.get("evidence")
    evidence = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
    spent, reserved, wanted, limit = (
        counted(evidence.get("unit"), evidence.get(name)) for name in ("spent", "reserved", "wanted", "limit")
    )
    if not (spent and reserved and wanted and limit):
        return ()
    return (
        f"{word(trip.get('scope_id'))} had spent {spent} and reserved {reserved} of its {limit}.",
        f"This call could have cost {wanted}, more than was left.",
    )


def counted(unit: Any, value: Any) -> str:
    """Format ``$0.028``, ``1,200 tokens``, ``3 equal failures``; "" if the value is not a number."""
    amount = dollars(value)
    if amount is None:
        return ""
    if unit in UNITS:
        number = nanos(amount) if unit == "usd" else whole(int(amount))
        return amount_text(UNITS.index(unit), number) if number is not None else ""
    return f"{_plain(amount)} {word(unit)}".rstrip()


def _plain(amount: Decimal) -> str:
    return f"{amount:,f}".rstrip("0").rstrip(".") if "." in f"{amount:f}" else f"{amount:,f}"


def _detail(trip: dict[str, Any]) -> str:
    """Return the part of the message between the scope and the agents: the text of the deciding rule or operator."""
    message, scope, made = word(trip.get("message")), word(trip.get("scope_id")), whole(trip.get("model_calls")) or 0
    begin, end = message.find(f": {scope}, "), message.rfind(f"; {made:,} model call")
    if not scope or begin < 0 or end < 0:
        return ""
    path = trip.get("agent_path")
    where = f", in {'→'.join(map(str, path))}" if isinstance(path, list) and path else ""
    return message[begin + len(scope) + 4 : end].removesuffix(where)


def command_of(trip: dict[str, Any], store: str | None) -> str:
    """Return the shell command that lifts the stop or doubles the limit; "" if there is none."""
    scope, unit, limit = word(trip.get("scope_id")), word(trip.get("unit")), dollars(trip.get("limit"))
    if trip.get("rule") == "kill_switch" and scope:
        return hint("resume", scope, store)
    if trip.get("rule") == "budget" and scope and trip.get("scope") != "run" and unit in UNITS and limit:
        return hint("extend", scope, store, f" --{unit} {limit:f}")
    return ""


# ---- commands for users to copy; names in them are quoted, so that a shell reads each as one word


def hint(name: str, scope: str, store: str | None, more: str = "") -> str:
    """Return ``runguard resume SCOPE`` with the named store; a URL with a password becomes the word URL."""
    at = "" if store is None else f" --store {'URL' if _holds_password(store) else _quoted(store)}"
    return f"runguard {name} {_quoted(scope)}{at}{more}"


def _quoted(word: str) -> str:
    if printable(word) == word:
        return shlex.quote(word)
    # escape control characters in the form that bash and zsh read back
    return "$'" + "".join(_escaped(sign) for sign in word) + "'"


def _escaped(sign: str) -> str:
    if sign in "\\'":
        return f"\\{sign}"
    return sign if printable(sign) == sign else f"\\u{ord(sign):04x}"


def _holds_password(url: str) -> bool:
    parts = urlsplit(url)
    return parts.password is not None or "pass" in parts.query.lower()
