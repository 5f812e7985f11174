"""Rules about failures: tools that do not get anywhere or ask to try again, and calls whose arguments did not arrive.

``engine/tools`` asks ``lacks_arguments`` about a failure and ``is_acknowledgement`` about an answer.
"""

import json
import re
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
from runguard.core.rules.rule import Rule, keep, worse

# ---- What keeps happening to one tool, or to one call.

# Members bound once: looking one up on its enum costs as much as the rest of a line.
_OK, _EMPTY, _REFUSED = Outcome.OK, Outcome.EMPTY, Outcome.REFUSED
_STREAKS_KEPT: Final = 64
_CALLS_KEPT: Final = 256  # of one streak


class _Streak:
    """What keeps happening, how often, when it was last counted, and which calls met it."""

    __slots__ = ("calls", "count", "is_command", "kind", "mark", "retries")

    def __init__(self, kind: str) -> None:
        self.kind, self.count, self.retries = kind, 0, 0
        self.mark: object = None  # of what counts once: a batch, or the work between two successes
        self.calls: set[bytes] = set()
        self.is_command = False  # the tool takes one free text: a shell, a query

    def count_once(self, mark: object) -> bool:
        """Return whether something that carries this mark counts, and remember the mark. An empty one always counts."""
        if mark != "" and mark == self.mark:
            return False
        self.mark = mark
        return True

    def meet(self, call: bytes) -> None:
        """Remember a call, unless there are too many already."""
        if len(self.calls) < _CALLS_KEPT:
            self.calls.add(call)


_Streaks = dict[bytes | str, _Streak]  # by tool, or by what else is counted


def _streak_of(streaks: _Streaks, key: bytes | str, kind: str) -> _Streak:
    """Return the streak of something, which begins anew with another kind. It is the one used last."""
    streak = streaks.get(key)
    if streak is None or streak.kind != kind:
        streak = _Streak(kind)
    return keep(streaks, key, streak, _STREAKS_KEPT)


# ---- Tools that do not get anywhere: the same failure, nothing found, one error after another.


class Stall(Rule):
    """One tool fails in the same way, whatever the arguments.

    Any tool's new answer that is no failure breaks the streak: edit, test, edit, test is work even while the test
    fails. Trying the very same call again is a wait for something rather than another attempt: ``free_retries`` of
    those are not counted. With free retries, a new command for a shell is not refused before it was tried.
    """

    name = "stall"
    unit: ClassVar[str] = EQUAL_FAILURES
    sees = (ToolCall, ToolResults)
    rests = sees

    def __init__(self, rungs: Rungs, free_retries: int = 0) -> None:
        self.rungs = rungs
        self._free = free_retries
        self.record: _Streaks = {}

    def observe(self, event: ToolCall | ToolResults) -> Finding | None:
        if isinstance(event, ToolCall):
            return self._attempt(event) if self.record else None
        if event.progress:
            self.record.clear()
            if not event.failures:
                return None
        worst: Finding | None = None
        for a in event.answers:
            if (a.outcome is _OK and not a.failure) or a.outcome is _EMPTY:
                self.record.pop(a.tool, None)  # the tool works, though it said nothing new
            if a.outcome not in FAILURES or (a.outcome is Outcome.FAILED and not a.counted):
                continue
            kind = self._kind(a.failure)
            if not kind:
                continue
            streak = self._add(a.tool, kind, event.batch, a.call)
            if self._free:
                streak.is_command = a.is_command = a.is_command or _is_command(a.args)
            reached = self.rungs.at(streak.count)
            if reached is not None and reached[0] is not Action.BLOCK:  # a block waits for the next call
                worst = worse(worst, self.found(streak.count, self.unit, event, a.tool, a.tool))
        return worst

    def _attempt(self, event: ToolCall) -> Finding | None:
        block, streak = self.rungs.block, self.record.get(event.tool)
        if block is None or streak is None or streak.count + (not self._is_free(streak, event.call)) < block:
            return None
        if streak.is_command and event.call not in streak.calls:
            return None  # it is tried for the first time; if it fails in the same way, its answer counts
        count = self._add(event.tool, streak.kind, event.batch, event.call).count
        return self.refused(count, block, self.unit, event, event.tool)

    def _add(self, tool: str, kind: str, batch: str, call: bytes) -> _Streak:
        """Count one more of ``kind``. Calls of one batch count once."""
        streak = _streak_of(self.record, tool, kind)
        if streak.count_once(batch):
            is_free = self._is_free(streak, call)
            streak.retries += is_free
            streak.count += not is_free
        if self._free:
            streak.meet(call)
        return streak

    def _is_free(self, streak: _Streak, call: bytes) -> bool:
        """Return whether this is one of the first retries of a call that has already failed like this."""
        return streak.retries < self._free and call in streak.calls

    def _kind(self, failure: str) -> str:
        """Return what is counted together; "" for a failure that does not count here."""
        return failure


class ToolFailures(Stall):
    """One tool fails again and again, each time in its own way: errors, timeouts, refusals by others.

    An answer that ends in an error of its own may be a report that was asked for; it is left out.
    """

    name = "tool_failures"
    unit = ANY_FAILURES

    def _kind(self, failure: str) -> str:
        return "" if failure.startswith(LATE) else "failure"


_NAMING: Final = "\0"  # in the class of a failure, before the items that it names
_NAMES_ITEMS: Final = Rungs(nudge=12)  # the items of a batch may well fail alike: no stop


class LastingFailures(Rule):
    """One call, or one tool whatever the arguments, fails in the same way again and again while other tools succeed.

    ``Stall`` starts anew with every success of another tool; this does not. Only a success of the call or of the tool
    itself does. A failure counts once between two successes of other tools. A tool is counted by different calls: one
    call that fails the same way after each edit is a test, and ``of_call`` has later limits for it.
    """

    name = "stall"
    sees = (ToolResults,)
    rests = sees
    _successes = 0  # responses in which some tool achieved something

    def __init__(self, of_call: Rungs, of_tool: Rungs) -> None:
        self.rungs = of_call
        self._of_tool = of_tool
        self.record: _Streaks = {}  # by call, and by tool

    def observe(self, event: ToolResults) -> Finding | None:
        if not event.failures and not self.record:
            return None
        self._successes += event.progress
        worst: Finding | None = None
        for a in event.answers:
            if a.outcome not in FAILURES:
                if a.outcome is not _REFUSED:
                    for key in (a.call, a.tool, f"{a.tool}{_NAMING}"):
                        self.record.pop(key, None)
            elif a.counted:
                counts = [
                    (self._add(a.call, a.ending or a.failure), self.rungs),
                    (self._add(a.tool, a.failure, a.call), self._of_tool),
                ]
                if _NAMING in a.failure:  # it says of each call what it was asked
                    counts.append((self._add(f"{a.tool}{_NAMING}", a.ending, a.call), _NAMES_ITEMS))
                for count, rungs in counts:
                    worst = worse(worst, self.found(count, LASTING, event, a.tool, a.tool, rungs=rungs))
        return worst

    def _add(self, key: bytes | str, kind: str, call: bytes = b"") -> int:
        """Count a failure and return how often this has failed in this way; 0 when it does not count.

        ``call``: counts only if it is another one than before; empty counts always.
        """
        streak = _streak_of(self.record, key, kind)
        if (call and call in streak.calls) or not streak.count_once(self._successes):
            return 0
        streak.count += 1
        if call:
            streak.meet(call)
        return streak.count


class EqualAnswers(Rule):
    """One tool gives the same answer again and again, whatever the arguments and whatever other tools do in between.

    In force only under an explicit ``max_identical_tool_results``. Acknowledgements have no ``identity`` and do not
    count. ``counts_failures``: equal failures count too.
    """

    name = "stall"
    sees = (ToolResults,)

    def __init__(self, limit: int, *, counts_failures: bool = True) -> None:
        self.rungs = Rungs(stop=limit)
        self._counts_failures = counts_failures
        self._streaks: _Streaks = {}

    def observe(self, event: ToolResults) -> Finding | None:
        found: Finding | None = None
        for a in event.answers:
            is_failure = a.outcome in FAILURES
            kind = a.failure if is_failure else a.identity
            if a.outcome is _REFUSED or (not a.counted and (not is_failure or a.outcome is Outcome.FAILED)):
                continue
            if not kind:
                self._streaks.pop(a.tool, None)
                continue
            streak = _streak_of(self._streaks, a.tool, kind)
            streak.count += streak.count_once(event.batch)
            if self._counts_failures or not is_failure:
                unit = EQUAL_FAILURES if is_failure else "equal answers"
                found = self.found(streak.count, unit, event, a.tool, a.tool) or found
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


class EmptyAnswers(Rule):
    """One tool finds nothing, again and again with new arguments: a sweep, so by default it is only nudged."""

    name = "empty"
    sees = (ToolResults,)
    rests = sees

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs
        self.record: _Streaks = {}

    def observe(self, event: ToolResults) -> Finding | None:
        worst: Finding | None = None
        for a in event.answers:
            if not a.counted:
                continue
            if a.outcome is _EMPTY:
                streak = _streak_of(self.record, a.tool, "empty")
                streak.count += streak.count_once(event.batch)
                worst = worse(worst, self.found(streak.count, EMPTY_ANSWERS, event, a.tool, a.tool))
            elif a.outcome in FAILURES:
                self.record.pop(a.tool, None)
            else:
                self.record.clear()  # a result of any tool shows that the work moves on
        return worst


def _is_command(args: object) -> bool:
    """Return whether a call has one argument, a text of several words."""
    if type(args) is not dict or len(args) != 1:
        return False
    text = next(iter(args.values()))
    return type(text) is str and " " in text.strip()


# ---- A tool that asks to try again, whatever it is asked: "retry later", "service is busy, please try again".

_WORDINGS: Final = 3  # a tool that asks in more ways than these tells different things
_NEWS_WORTH: Final = 3  # answers of this kind that one result makes up for; a stop needs all of them in a row


class _Row(_Streak):
    """What one tool has answered of this kind, and to which calls."""

    __slots__ = ("in_a_row", "wordings")

    def __init__(self) -> None:
        super().__init__("")
        self.in_a_row = 0
        self.wordings: set[str] = set()

    def add(self, wording: str, call: bytes, batch: str) -> bool:
        """Take in an answer. Return whether it counts: to a new call, in known wording or nearly so, once per batch."""
        if wording not in self.wordings and len(self.wordings) >= _WORDINGS:
            self.count = self.in_a_row = 0
            self.calls.clear()
            self.wordings.clear()
        self.wordings.add(wording)
        if call in self.calls or not self.count_once(batch):
            return False
        self.meet(call)
        self.count += 1
        self.in_a_row += 1
        return True


class RetryRequests(Rule):
    """Counts answers of one tool that ask to try again, each to another call.

    The same call once more is a retry and is not counted here. A result of any tool ends the row, so that a batch in
    which some calls get through is not stopped.
    """

    name = "stall"
    sees = (ToolResults,)
    rests = sees

    def __init__(self, rungs: Rungs) -> None:
        self.rungs = rungs
        self.record: dict[str, _Row] = {}

    def observe(self, event: ToolResults) -> Finding | None:
        if event.progress:
            self._relax()
            return None
        found: Finding | None = None
        for a in event.answers:
            if a.outcome is not _OK or not a.failure or not a.counted:
                continue
            row = keep(self.record, a.tool, self.record.get(a.tool) or _Row(), _STREAKS_KEPT)
            if row.add(a.failure, a.call, event.batch):
                about = (TRY_AGAIN, event, a.tool, f"{TRY_AGAIN}: {a.tool}", "")
                stop = self.found(row.in_a_row, *about, Rungs(stop=self.rungs.stop))
                found = stop or found or self.found(row.count, *about, Rungs(nudge=self.rungs.nudge))
        return found

    def _relax(self) -> None:
        """Reduce the counts after a success."""
        for tool, row in list(self.record.items()):
            row.in_a_row = 0
            row.count -= _NEWS_WORTH
            if row.count <= 0:
                del self.record[tool]


# ---- Calls whose arguments did not arrive: the response hit its output limit, so the call came empty or cut off.

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


class TruncatedCalls(Rule):
    """Nudges at the second call of one tool in a row whose arguments did not arrive.

    The tool's validation rejects such a call, and a model that does not know why repeats it. Equal calls are stopped by
    other rules.
    """

    name = "stall"
    sees = (ModelResult, ToolResults)
    rests = sees
    rungs = Rungs(nudge=2)

    def __init__(self) -> None:
        # by tool, since its last call that was not rejected; and under _CUT, if the last response hit its output limit
        self.record: dict[str, int] = {}

    def observe(self, event: ModelResult | ToolResults) -> Finding | None:
        if isinstance(event, ModelResult):
            self.record.pop(_CUT, None)
            if event.is_cut:
                self.record[_CUT] = 1
            return None
        if not event.failures and not self.record:
            return None
        is_cut = _CUT in self.record
        rejected = {a.tool for a in event.answers if a.outcome in FAILURES and (a.lacks_arguments or is_cut)}
        for answer in event.answers:
            if answer.tool not in rejected:
                self.record.pop(answer.tool, None)
        worst: Finding | None = None
        detail = "the response hit its output limit" if is_cut else "required arguments are missing"
        for tool in sorted(rejected):
            count = keep(self.record, tool, self.record.get(tool, 0) + 1, _STREAKS_KEPT)
            worst = self.found(count, CUT_OFF, event, tool, f"cut off: {tool}", detail) or worst
        return worst
