"""Masking: hide what differs between two versions of the same answer (times, ids, durations).

Counts, percentages, exit codes and line numbers stay: they are how an answer shows progress.
"""

import re
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
    if "\\" in text:  # an escaped line break of JSON would glue its letter to the next word
        text = text.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r")
    if len(text) <= _ONLY and _MEASUREMENT.match(text) is not None:
        return text
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
