"""Masking: hide what differs between two versions of the same answer (times, ids, durations).

Counts, percentages, exit codes and line numbers stay: they are how an answer shows progress.
"""

import re
from itertools import islice
from typing import Final

# Where a word begins, its first letter says which of these it may be: trying them all at every letter would take three
# times as long.
_VOLATILE: Final = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?"  # 2026-11-15T09:30:00Z
    r"|\b(?:(?=[0-9a-fA-F])(?:"
    r"\d\d:\d\d:\d\d(?:[.,]\d+)?\b"  # 09:30:00
    r"|[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"  # UUID
    r"|0x[0-9a-fA-F]{4,}\b"  # addresses
    r"|(?=[0-9a-fA-F]{0,63}[0-9])(?=[0-9a-fA-F]{0,63}[a-fA-F])[0-9a-fA-F]{12,64}\b"  # hashes, object ids
    r"|1[4-9]\d{8}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?\b"  # seconds, ms, us, ns since 1970
    r"|\d+(?:\.\d+)?\s?(?:ns|us|µs|ms|secs?|seconds?|mins?|minutes?|hours?|s)\b)"  # durations
    r"|(?=[rtscmejRTSCMEJ])(?i:(?:request|req|trace|span|correlation|session|call|message|msg|event|job_run)[ _-]?id\b"
    r"[\"']?\s{0,2}[:=]?\s{0,2}[\"']?<?[\w.@-]{1,80})"
    r"|(?=[etdlupqrETDLUPQR])(?i:(?:elapsed\w{0,8}|took\w{0,4}|duration\w{0,8}|latency\w{0,8}|uptime|timestamp|pid"
    r"|(?:execution|exec|query|response|processing|run)_?time\w{0,8})[\"']?\s{0,2}[:=]\s{0,2}[\"']?[\w.:+-]{1,40})"
    r"|(?i:\w{1,24}_at[\"']?\s{0,2}[:=]\s{0,2}[\"']?[\w.:+-]{1,40}))"
)


def mask(text: str) -> str:
    """``text`` with volatile parts replaced; counts, percentages, exit codes and line numbers stay."""
    return _unescaped(text) if _is_measurement(text) else _mask_parts(text)


def are_alike(one: str, other: str) -> bool:
    """Whether two texts differ in volatile parts alone: ``mask(one) == mask(other)``, but only what differs is masked.

    A text is cut only where no volatile part can reach from one side to the other. So the masks of its pieces, put
    together, are the mask of the whole, and the answer True is always right. The answer False comes early, when no cut
    shortly after a difference makes the pieces before it alike. So it may be wrong where a volatile part of another
    kind took the place of one, such as a duration that of a date: the answer then counts as new.
    """
    if _is_measurement(one) or _is_measurement(other):
        return mask(one) == mask(other)
    at_one = at_other = 0
    for _ in range(_PIECES):
        equal = _equal_chars(one, at_one, other, at_other)
        if at_one + equal == len(one) and at_other + equal == len(other):
            return True
        back = _cut_before(one, at_one, at_one + equal) - at_one
        at_one, at_other = at_one + back, at_other + back
        cut = _alike_until(one, at_one, other, at_other)
        if cut is None:
            return False
        at_one, at_other = cut
    return _mask_parts(one[at_one:]) == _mask_parts(other[at_other:])


def _alike_until(one: str, at_one: int, other: str, at_other: int) -> tuple[int, int] | None:
    """The next place in both texts up to which they are alike; None: there is none within a few cuts."""
    cuts = list(islice(_CUT.finditer(one, at_one), _CUTS_TRIED))
    compared = 0
    for found in cuts:
        to_one = found.end()
        # the same words stand around the cut in the other text
        begin, end = (found.start() - 1, found.end(1)) if found[1] is not None else found.span()
        there = other.find(one[begin:end], at_other, at_other + to_one - at_one + _SHIFT)
        if there >= 0:
            to_other = there + to_one - begin
            if _mask_parts(one[at_one:to_one]) == _mask_parts(other[at_other:to_other]):
                return to_one, to_other
            compared += 1
            if compared == _COMPARED:
                return None
    is_end = len(cuts) < _CUTS_TRIED
    return (len(one), len(other)) if is_end and _mask_parts(one[at_one:]) == _mask_parts(other[at_other:]) else None


def _unescaped(text: str) -> str:
    """An escaped line break of JSON would glue its letter to the next word."""
    if "\\" in text:
        text = text.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r")
    return text


def _is_measurement(text: str) -> bool:
    """Whether a text is nothing but ids or durations."""
    if len(text) > 2 * _ONLY:
        return False
    text = _unescaped(text)
    return len(text) <= _ONLY and _MEASUREMENT.match(text) is not None


def _mask_parts(text: str) -> str:
    text = _unescaped(text)
    masked, count = _VOLATILE.subn("~", text)
    return _VOLATILE.sub(_hidden, text) if count and _LEFT.search(text) is not None else masked


def _hidden(found: re.Match[str]) -> str:
    """Mask a time, but keep durations that show progress or remaining work. A date to wait for changes with each
    report anyway.
    """
    whole, (start, end) = found.string, found.span()
    before = _LEFT_BEFORE.search(whole, max(start - 40, 0), start)
    if (before is not None and (before[1] is None or found[0][4:5] != "-")) or _LEFT_AFTER.match(
        whole, end
    ) is not None:
        return found[0]
    return "~"


_LEFT_WORDS: Final = "eta|remaining|left|lag|until|up ?to|through|watermark|progress|position"
_LEFT: Final = re.compile(rf"{_LEFT_WORDS}|to go", re.IGNORECASE)
_LEFT_BEFORE: Final = re.compile(
    rf"(?:\b|_)(?:(eta|until|remaining|left)|{_LEFT_WORDS})(?:_\w{{1,12}})?" + r"[\"']?\s{0,2}[:=]?\s{0,2}[\"']?$",
    re.IGNORECASE,
)
_LEFT_AFTER: Final = re.compile(r"\s(?:remaining|left|to go)\b", re.IGNORECASE)
# Nothing but ids or durations, with or without the name of their field: they are the answer. A clock is none, it moves
# by itself.
_ONLY: Final = 1_024
_MEASUREMENT: Final = re.compile(
    r"\W*(?:(?:\"(?:result|output|value|uuid)\"\W{1,4})?(?:(?:[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}|(?=\d{0,63}[a-f])[0-9a-f]{12,64})\b\W*)+"
    r"|(?:\"(?!\w{0,24}(?:elapsed|took|duration|latency|uptime|time|_at)|pid)\w{1,40}\"\W{1,4})?(?:\d+(?:\.\d+)?\s?(?:ns|us|µs|ms|s)\b\W*)+)$",
    re.IGNORECASE,
)

# ---- where a text may be cut ----------------------------------------------------------------------------------------

_PIECES: Final = 64  # compared one by one; the rest of a text that differs more often is masked at once
_CUTS_TRIED: Final = 8
_COMPARED: Final = 2
_SHIFT: Final = 1_024  # how much longer the other piece may be
_LOOK: Final = 160
# After a character that is in no volatile part, or between two plain words. Exceptions are words that belong to what
# follows or precedes: "request id 7", "left 5 s", "5 s left".
_CUT: Final = re.compile(
    r"[{}\[\]();|/!?*#%$&>^`]"
    r"|(?<=\s)(?!(?:request|req|trace|span|correlation|session|call|message|msg|event|id"
    r"|eta|remaining|left|lag|until|up|to|upto|through|watermark|progress|position)\s)"
    r"[a-z]+\s(?!(?:remaining|left|to)\b)(?=([a-z]+\W))",
    re.IGNORECASE,
)


def _equal_chars(one: str, at_one: int, other: str, at_other: int) -> int:
    """How many characters are equal from two positions on: in growing steps, then in halves."""
    most = min(len(one) - at_one, len(other) - at_other)
    equal, step = 0, _LOOK
    while equal < most and step:
        to = min(equal + step, most)
        if one[at_one + equal : at_one + to] == other[at_other + equal : at_other + to]:
            equal, step = to, 2 * step
        else:
            most, step = to - 1, min(step, to - equal) // 2
    return equal


def _cut_before(text: str, start: int, end: int) -> int:
    """The last place near ``end`` where the text may be cut, else ``start``."""
    begin = max(start, end - _LOOK)
    cuts = [found.end() for found in _CUT.finditer(text[begin:end])]
    return begin + cuts[-1] if cuts else start
