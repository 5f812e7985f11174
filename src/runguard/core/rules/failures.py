"""Rules about failures: tools that do not get anywhere or ask to try again, and calls whose arguments did not arrive.

``engine/runs`` makes the detectors of a run. ``engine/tools`` asks ``lacks_arguments`` about a failure and
``is_acknowledgement`` about an answer.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import ClassVar, Final

from runguard.core.decision import (
    ANY_FAILURES,
    CUT_OFF,
    EMPTY_ANSWERS,
    EQUAL_FAILURES,
    LASTING,
    TRY_AGAIN,
    Action,
    Finding,
    Rungs,
)
from runguard.core.events import FAILURES, LATE, ModelResult, Outcome, ToolCall, ToolResults
from runguard.core.rules.repetition import evidence_of

# ---- Tools that do not get anywhere: the same failure, nothing found, one error after another.

# Members bound once: looking one up on its enum costs as much as the rest of a line.
_OK, _EMPTY = Outcome.OK, Outcome.EMPTY
_TOOLS_KEPT: Final = 64
_CALLS_KEPT: Final = 16  # of one streak


class _Streak:
    """What keeps happening to one tool, how often in a row, in which batch it was last counted, which calls met it."""

    __slots__ = ("batch", "calls", "count", "is_command", "kind", "retries")

    def __init__(self, kind: str, batch: str) -> None:
        self.kind, self.batch, self.count, self.retries = kind, batch, 1, 0
        self.calls: set[bytes] = set()
        self.is_command = False  # the tool takes one free text: a shell, a query

    def is_new_command(self, call: bytes) -> bool:
        """Return whether this is another text for a tool that takes any, and so may differ in all that matters."""
        return self.is_command and call not in self.calls

    def is_free(self, call: bytes, free: int) -> bool:
        """Return whether this is one of the first ``free`` retries of a call that has already failed like this."""
        return self.retries < free and call in self.calls


class _Streaks:
    """Counts per tool. The first ``free`` retries of earlier calls do not count: an agent that waits tries again."""

    __slots__ = ("_free", "by_tool")

    def __init__(self, free: int = 0) -> None:
        self.by_tool: OrderedDict[str, _Streak] = OrderedDict()
        self._free = free

    def get(self, tool: str) -> _Streak | None:
        return self.by_tool.get(tool)

    def next_count(self, streak: _Streak, call: bytes) -> int:
        """Return the number that the next failure of this call would be."""
        return streak.count + (not streak.is_free(call, self._free))

    def add(self, tool: str, kind: str, batch: str, call: bytes) -> int:
        """Count one more of ``kind`` and return how many are in a row.

        Calls of one batch count once; another kind starts at one.
        """
        streak = self.by_tool.pop(tool, None)
        if streak is None or streak.kind != kind:
            streak = _Streak(kind, batch)
        elif not batch or batch != streak.batch:
            if streak.is_free(call, self._free):
                streak.retries += 1
            else:
                streak.count += 1
            streak.batch = batch
        if self._free and len(streak.calls) < _CALLS_KEPT:
            streak.calls.add(call)
        self.by_tool[tool] = streak
        if len(self.by_tool) > _TOOLS_KEPT:
            self.by_tool.popitem(last=False)
        return streak.count

    def mark(self, tool: str, *, is_command: bool) -> None:
        self.by_tool[tool].is_command = is_command

    def clear(self, tool: str | None = None) -> None:
        if tool is None:
            self.by_tool.clear()
        else:
            self.by_tool.pop(tool, None)


class Stall:
    """One tool fails in the same way, whatever the arguments.

    Any tool's new answer that is no failure breaks the streak: edit, test, edit, test is work even while the test
    fails. Trying the very same call again is a wait for something rather than another attempt: ``free_retries`` of
    those are not counted. With free retries, a new command for a shell is not refused before it was tried.
    """

    sees: ClassVar[tuple[type, ...]] = (ToolCall, ToolResults)
    rests = sees
    rule: ClassVar[str] = "stall"
    unit: ClassVar[str] = EQUAL_FAILURES
    __slots__ = ("_patient", "_streaks", "record", "rungs")

    def __init__(self, rungs: Rungs, free_retries: int = 0) -> None:
        self.rungs, self._patient = rungs, free_retries > 0
        self._streaks = _Streaks(free_retries)
        self.record = self._streaks.by_tool

    def observe(self, event: ToolCall | ToolResults) -> Finding | None:
        if type(event) is ToolCall:
            return self._attempt(event) if self.record else None
        assert isinstance(event, ToolResults)
        if event.progress:
            if self.record:
                self._streaks.clear()
            if not event.failures:
                return None
        worst: Finding | None = None
        for a in event.answers:
            if (a.outcome is _OK and not a.failure) or a.outcome is _EMPTY:
                self._streaks.clear(a.tool)  # the tool works, though it said nothing new
            if a.outcome not in FAILURES or (a.outcome is Outcome.FAILED and not a.counted):
                continue
            kind = self._kind(a.failure)
            if not kind:
                continue
            count = self._streaks.add(a.tool, kind, event.batch, a.call)
            if self._patient:
                a.is_command = a.is_command or _is_command(a.args)
                self._streaks.mark(a.tool, is_command=a.is_command)
            reached = self.rungs.at(count)
            if reached is None or reached[0] is Action.BLOCK or (worst and worst.action >= reached[0]):
                continue
            action, limit = reached
            worst = Finding(self.rule, action, count, limit, self.unit, "lane", a.tool, a.tool, "", evidence_of(event))
        return worst

    def _attempt(self, event: ToolCall) -> Finding | None:
        block = self.rungs.block
        streak = self._streaks.get(event.tool) if block is not None else None
        if block is None or streak is None or self._streaks.next_count(streak, event.call) < block:
            return None
        if streak.is_new_command(event.call):
            return None  # it is tried for the first time; if it fails in the same way, its answer counts
        count = self._streaks.add(event.tool, streak.kind, event.batch, event.call)
        action, limit = self.rungs.at(count) or (Action.BLOCK, block)
        evidence = ({"event": "", "tool": event.tool, "call": event.call.hex(), "answer": ""},)
        return Finding(self.rule, action, count, limit, self.unit, "lane", event.tool, event.tool, "", evidence)

    def _kind(self, failure: str) -> str:
        """Return what is counted together; "" for a failure that does not count here."""
        return failure


class ToolFailures(Stall):
    """One tool fails again and again, each time in its own way: errors, timeouts, refusals by others.

    An answer that ends in an error of its own may be a report that was asked for; it is left out.
    """

    rule: ClassVar[str] = "tool_failures"
    unit: ClassVar[str] = ANY_FAILURES
    __slots__ = ()

    def _kind(self, failure: str) -> str:
        return "" if failure.startswith(LATE) else "failure"


_LASTING_KEPT: Final = 64
_NAMING: Final = "\0"  # in the class of a failure, before the items that it names
_NAMES_ITEMS: Final = Rungs(nudge=12)  # the items of a batch may well fail alike: no stop
_DISTINCT_KEPT: Final = 256


class _Lasting:
    """A failure that comes back: how often, and from which calls."""

    __slots__ = ("at", "calls", "count", "kind")

    def __init__(self, kind: str) -> None:
        self.kind, self.count, self.at = kind, 0, -1
        self.calls: set[bytes] = set()


class LastingFailures:
    """One call, or one tool whatever the arguments, fails in the same way again and again while other tools succeed.

    ``Stall`` starts anew with every success of another tool; this does not. Only a success of the call or of the tool
    itself does. A failure counts once between two successes of other tools. A tool is counted by different calls: one
    call that fails the same way after each edit is a test, and ``of_call`` has later limits for it.
    """

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("_kept", "_of_call", "_of_tool", "_successes")

    def __init__(self, of_call: Rungs, of_tool: Rungs) -> None:
        self._of_call, self._of_tool = of_call, of_tool
        self._kept: OrderedDict[bytes | str, _Lasting] = OrderedDict()  # by call, and by tool
        self._successes = 0  # responses in which some tool achieved something

    def observe(self, event: ToolResults) -> Finding | None:
        if not event.failures and not self._kept:
            return None
        self._successes += event.progress
        worst: Finding | None = None
        for a in event.answers:
            if a.outcome not in FAILURES:
                if a.outcome is not Outcome.REFUSED:
                    self._kept.pop(a.call, None)
                    self._kept.pop(a.tool, None)
                    self._kept.pop(f"{a.tool}{_NAMING}", None)
            elif a.counted:
                counted = [
                    (self._add(a.call, a.ending or a.failure), self._of_call),
                    (self._add(a.tool, a.failure, a.call), self._of_tool),
                ]
                if _NAMING in a.failure:  # it says of each call what it was asked
                    counted.append((self._add(f"{a.tool}{_NAMING}", a.ending, a.call), _NAMES_ITEMS))
                for count, rungs in counted:
                    reached = rungs.at(count)
                    if reached is not None and (worst is None or reached[0] > worst.action):
                        about = (LASTING, "lane", a.tool, a.tool, "", evidence_of(event))
                        worst = Finding("stall", reached[0], count, reached[1], *about)
        return worst

    def _add(self, key: bytes | str, kind: str, call: bytes = b"") -> int:
        """Count a failure and return how often this has failed in this way; 0 when it does not count.

        ``call``: counts only if it is another one than before; empty counts always.
        """
        lasting = self._kept.pop(key, None)
        if lasting is None or lasting.kind != kind:
            lasting = _Lasting(kind)
        self._kept[key] = lasting
        if len(self._kept) > _LASTING_KEPT:
            self._kept.popitem(last=False)
        if lasting.at == self._successes or (call and call in lasting.calls):
            return 0
        lasting.at = self._successes
        lasting.count += 1
        if call and len(lasting.calls) < _DISTINCT_KEPT:
            lasting.calls.add(call)
        return lasting.count


class EqualAnswers:
    """One tool gives the same answer again and again, whatever the arguments and whatever other tools do in between.

    In force only under an explicit ``max_identical_tool_results``. Acknowledgements have no ``identity`` and do not
    count. ``counts_failures``: equal failures count too.
    """

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    __slots__ = ("_counts_failures", "_streaks", "limit")

    def __init__(self, limit: int, *, counts_failures: bool = True) -> None:
        self.limit, self._counts_failures = limit, counts_failures
        self._streaks = _Streaks()

    def observe(self, event: ToolResults) -> Finding | None:
        found: Finding | None = None
        for a in event.answers:
            is_failure = a.outcome in FAILURES
            kind = a.failure if is_failure else a.identity
            if a.outcome is Outcome.REFUSED or (not a.counted and (not is_failure or a.outcome is Outcome.FAILED)):
                continue
            if not kind:
                self._streaks.clear(a.tool)
                continue
            count = self._streaks.add(a.tool, kind, event.batch, a.call)
            if count >= self.limit and (self._counts_failures or not is_failure):
                unit = Stall.unit if is_failure else "equal answers"
                found = Finding(
                    *("stall", Action.STOP, count, self.limit, unit, "lane", a.tool, a.tool, ""), evidence_of(event)
                )
        return found


# Answers that say that a call was carried out and nothing else. A batch gets many of them.
_ACKNOWLEDGED: Final = frozenset(
    {
        *("ok", "okay", "done", "success", "succeeded", "successful", "saved", "stored", "recorded", "written", "sent"),
        *("created", "updated", "added", "removed", "deleted"),
    }
)
_ABOUT_A_TEXT: Final = frozenset(("type", "isError", "is_error", "meta", "_meta"))  # fields of an MCP answer
_LEVELS: Final = 6
_MOST_LEAVES: Final = 16
_LONGEST: Final = 400  # characters of an acknowledgement in JSON


def is_acknowledgement(answer: object) -> bool:
    """Return whether an answer only says that the call was carried out.

    Its values are true, words like "ok" or a count.
    """
    words = counts = 0
    leaves = _leaves(answer, _LEVELS)
    for leaf in islice(leaves, _MOST_LEAVES):
        if leaf is True or (type(leaf) is str and leaf.strip(" .!").lower() in _ACKNOWLEDGED):
            words += 1
        elif type(leaf) is int and leaf >= 0:
            counts += leaf > 0
        elif leaf is not None:
            return False
    return (words > 0 or counts == 1) and next(leaves, None) is None


def _leaves(value: object, levels: int, *, counts: bool = True) -> Iterator[object]:
    """Yield the values inside of a dict, of a list, and of a short text that is JSON.

    ``counts``: a number may be a count. Among several entries of a list it is yielded as a text.
    """
    if type(value) is str and len(value) <= _LONGEST and value.strip()[:1] == "{":
        with suppress(ValueError):
            value = json.loads(value)
    inner: Iterable[object] | None = None
    if type(value) is dict:
        inner = (entry for key, entry in value.items() if type(key) is not str or key not in _ABOUT_A_TEXT)
    elif type(value) is list and value:
        inner, counts = value, counts and len(value) == 1
    if inner is None or not levels:
        yield value if counts or type(value) is not int else str(value)
        return
    for entry in inner:
        yield from _leaves(entry, levels - 1, counts=counts)


class EmptyAnswers:
    """One tool finds nothing, again and again with new arguments: a sweep, so by default it is only nudged."""

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    rests = sees
    __slots__ = ("_streaks", "record", "rungs")

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs
        self._streaks = _Streaks()
        self.record = self._streaks.by_tool

    def observe(self, event: ToolResults) -> Finding | None:
        worst: Finding | None = None
        for a in event.answers:
            if not a.counted:
                continue
            if a.outcome is not _EMPTY:
                if self.record:
                    # a result of any tool shows that the work moves on
                    self._streaks.clear(a.tool if a.outcome in FAILURES else None)
                continue
            count = self._streaks.add(a.tool, "empty", event.batch, a.call)
            reached = self.rungs.at(count)
            if reached is not None and (worst is None or reached[0] > worst.action):
                worst = Finding(
                    "empty",
                    reached[0],
                    count,
                    reached[1],
                    EMPTY_ANSWERS,
                    "lane",
                    a.tool,
                    a.tool,
                    "",
                    evidence_of(event),
                )
        return worst


def _is_command(args: object) -> bool:
    """Return whether a call has one argument, a text of several words."""
    if type(args) is not dict or len(args) != 1:
        return False
    text = next(iter(args.values()))
    return type(text) is str and " " in text.strip()


# ---- A tool that asks to try again, whatever it is asked: "retry later", "service is busy, please try again".

_ROWS_KEPT: Final = 16
_ROW_CALLS_KEPT: Final = 32
_WORDINGS: Final = 3  # a tool that asks in more ways than these tells different things
_NEWS_WORTH: Final = 3  # answers of this kind that one result makes up for; a stop needs all of them in a row


class _Row:
    """What one tool has answered of this kind, and to which calls."""

    __slots__ = ("batch", "calls", "count", "in_a_row", "wordings")

    def __init__(self) -> None:
        self.batch = ""
        self.count = self.in_a_row = 0
        self.calls: set[bytes] = set()
        self.wordings: set[str] = set()

    def add(self, wording: str, call: bytes, batch: str) -> bool:
        """Take in an answer. Return whether it counts: to a new call, in known wording or nearly so, once per batch."""
        if wording not in self.wordings and len(self.wordings) >= _WORDINGS:
            self.count = self.in_a_row = 0
            self.calls.clear()
            self.wordings.clear()
        self.wordings.add(wording)
        if call in self.calls or (batch and batch == self.batch):
            return False
        self.batch = batch
        if len(self.calls) < _ROW_CALLS_KEPT:
            self.calls.add(call)
        self.count += 1
        self.in_a_row += 1
        return True


class AskedAgain:
    """Counts answers of one tool that ask to try again, each to another call.

    The same call once more is a retry and is not counted here. A result of any tool ends the row, so that a batch in
    which some calls get through is not stopped.
    """

    sees: ClassVar[tuple[type, ...]] = (ToolResults,)
    rests = sees
    __slots__ = ("_rows", "record", "rungs")

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs
        self.record = self._rows = OrderedDict[str, _Row]()

    def observe(self, event: ToolResults) -> Finding | None:
        if event.progress:
            if self._rows:
                self._relax()
            return None
        found: Finding | None = None
        for a in event.answers:
            if a.outcome is not _OK or not a.failure or not a.counted:
                continue
            row = self._rows.pop(a.tool, None) or _Row()
            self._rows[a.tool] = row
            if len(self._rows) > _ROWS_KEPT:
                self._rows.popitem(last=False)
            if not row.add(a.failure, a.call, event.batch):
                continue
            stop, nudge = self.rungs.stop, self.rungs.nudge
            if stop is not None and row.in_a_row >= stop:
                what = (Action.STOP, row.in_a_row, stop)
            elif nudge is not None and row.count >= nudge and found is None:
                what = (Action.NUDGE, row.count, nudge)
            else:
                continue
            key = f"{TRY_AGAIN}: {a.tool}"
            found = Finding("stall", *what, TRY_AGAIN, "lane", a.tool, key, "", evidence_of(event))
        return found

    def _relax(self) -> None:
        """Reduce the counts after a success."""
        for tool, row in list(self._rows.items()):
            row.in_a_row = 0
            row.count -= _NEWS_WORTH
            if row.count <= 0:
                del self._rows[tool]


# ---- Calls whose arguments did not arrive: the response hit its output limit, so the call came empty or cut off.

_NUDGE_AT: Final = 2
_SAID: Final = 800
_CUT: Final = "\0"  # cannot be the name of a tool
# ADK's own words, whatever the arguments are.
_REJECTED: Final = re.compile(r"mandatory input parameters? (?:are|is) not present", re.IGNORECASE)
# Other validators, believed only where the arguments are empty: code that is being debugged says such things, too.
_MISSING: Final = re.compile(
    r"\bmissing (?:\d+ )?(?:required|mandatory)\b|\b(?:required|mandatory) (?:arg|param|prop|field|input|key)\w*"
    r"|\bfield required\b|\bis a required property\b"
    r"|\b(?:arguments?|parameters?|input) (?:were|was|is|are) (?:empty|missing)"
    r"|\b(?:unterminated string|unexpected end of (?:json|input))\b",
    re.IGNORECASE,
)


def lacks_arguments(args: object, said: str) -> bool:
    """Return whether a failure says that the call came without arguments that it needs."""
    head = said[:_SAID]
    if _REJECTED.search(head) is not None:
        return True
    is_empty = args is None or (type(args) is dict and not any(args.values()))
    return is_empty and _MISSING.search(head) is not None


class CutOff:
    """Nudges at the second call of one tool in a row whose arguments did not arrive.

    The tool's validation rejects such a call, and a model that does not know why repeats it. Equal calls are stopped by
    other rules.
    """

    sees: ClassVar[tuple[type, ...]] = (ModelResult, ToolResults)
    rests = sees
    __slots__ = ("record",)

    def __init__(self) -> None:
        # by tool, since its last call that was not rejected; and under _CUT, if the last response hit its output limit
        self.record = OrderedDict[str, int]()

    def observe(self, event: ModelResult | ToolResults) -> Finding | None:
        if type(event) is ModelResult:
            if event.is_cut:
                self.record[_CUT] = 1
            else:
                self.record.pop(_CUT, None)
            return None
        assert isinstance(event, ToolResults)
        if not event.failures and not self.record:
            return None
        is_cut = _CUT in self.record
        rejected = {a.tool for a in event.answers if a.outcome in FAILURES and (a.lacks_arguments or is_cut)}
        for answer in event.answers:
            if answer.tool not in rejected:
                self.record.pop(answer.tool, None)
        worst: Finding | None = None
        for tool in sorted(rejected):
            count = self.record[tool] = self.record.pop(tool, 0) + 1
            if len(self.record) > _TOOLS_KEPT:
                self.record.popitem(last=False)
            if count >= _NUDGE_AT:
                worst = Finding(
                    "stall",
                    Action.NUDGE,
                    count,
                    _NUDGE_AT,
                    CUT_OFF,
                    tool=tool,
                    key=f"cut off: {tool}",
                    detail="the response hit its output limit" if is_cut else "required arguments are missing",
                    evidence=evidence_of(event),
                )
        return worst
