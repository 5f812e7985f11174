"""The story of a stop: the events of the run, what repeated, its cost and its projected cost. Pure."""

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

from runguard.core.money import nanos, to_usd
from runguard.view.records import Call, count, dollars, number, whole, word
from runguard.view.rows import Projection, Repeat, Story, StoryRow
from runguard.view.why import WITHOUT_A_COUNT, command_of, counted, why_of

ADK_MODEL_CALLS: Final = 500  # the default of RunConfig.max_llm_calls
NOT_MADE: Final = "not made"
REFUSED: Final = "refused"
_LAST_CALLS: Final = 5  # the projection uses their mean
_ROWS_KEPT: Final = 500
_REPEATS_KEPT: Final = 3


def build_story(
    trip: dict[str, Any], calls: Sequence[Call], steps: Sequence[dict[str, Any]], store: str | None = None
) -> Story:
    """``calls``: what each model call of the run took; ``steps``: what happened, where the store has it; ``store``: its
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
    """The calls up to the stop, and those after it. Both are recorded by one clock, in order. A run that was
    stopped as a whole makes no further call: what is recorded later was in flight and belongs to what the stop cost."""
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
            call.at - begin, call.agent, "", *_named(call),
            tokens_in=call.tokens_in, tokens_out=call.tokens_out, usd=_usd(call), estimated=call.estimated,
        )
        for call in calls
    ]  # fmt: skip


def _named(call: Call) -> tuple[str, str, str]:
    """Kind, words and name of a row."""
    return ("tool", "tool call", call.tool) if call.is_tool else ("model", "model call", call.model)


def _usd(call: Call) -> Decimal | None:
    return to_usd(call.nano) if call.nano is not None else None


class _Timeline:
    """Converts steps to rows: one row per model call with its answer and price, one per tool call with its answer."""

    def __init__(self, steps: Sequence[dict[str, Any]]) -> None:
        self.rows: list[StoryRow] = []
        self._begin = next((at for step in steps if (at := number(step.get("t"))) is not None), 0.0)
        self._open_calls: list[StoryRow] = []  # model calls without an answer
        self._last_call: StoryRow | None = None  # the model call that the previous step started or withdrew
        self._has_stopped = False  # the step before
        self._numbered: dict[int, StoryRow] = {}  # model calls
        self._called: dict[str, StoryRow] = {}  # tool calls without an answer, by id
        self._tool_rows: dict[str, StoryRow] = {}  # all of them
        self._calls: Counter[tuple[str, str]] = Counter()
        self._answers: Counter[tuple[str, str, str]] = Counter()
        self._hands: Counter[tuple[str, str]] = Counter()
        for step in steps:
            fresh, stopped = self._last_call, self._has_stopped
            self._last_call, self._has_stopped = None, False
            match step.get("k"):
                case "enter":
                    self._row(step, "begin", "begins")
                case "hand":
                    self._hand(step)
                case "ask":
                    self._ask(step)
                case "got":
                    self._got(step)
                case "paid":
                    self._paid(step)
                case "tool_paid":
                    self._paid_tool(step)
                case "back":
                    self._take_back(self._model_call(step), NOT_MADE)
                case "unspent":
                    self._unspent(step, refused=stopped or bool(step.get("denied")))
                case "call":
                    self._call(step)
                case "answers":
                    self._answered(step)
                case "decision":
                    self._decided(step, fresh)

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

    def _unspent(self, step: dict[str, Any], *, refused: bool) -> None:
        """The call with this number was not made; in older records the last one that was asked. A refusal is decided
        just before or just after.
        """
        row = self._numbered.get(count(step.get("n"))) or (self._open_calls[-1] if self._open_calls else None)
        if row is not None and row.usd is None:
            self._take_back(row, REFUSED if refused else NOT_MADE)
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

    def _decided(self, step: dict[str, Any], fresh: StoryRow | None) -> None:
        row = self._row(step, "decision", word(step.get("rule")), word(step.get("tool")))
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
