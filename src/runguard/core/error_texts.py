"""Texts that report a failure: an answer of a tool that starts like an error, or consists of a shell's complaints."""

import re
from typing import Final

HEAD: Final = 400  # what a text says about its own success, it says at the start

_BAD_TEXT: Final = re.compile(
    r"^\W{0,4}(?:(?:error|exception|traceback|fatal|failed|failure|invalid|unknown tool|unauthori[sz]ed"
    r"|forbidden|permission denied|access denied|"
    r"no such file|command not found|syntax ?error|timed? ?out|could not|cannot|unable to"
    r"|(?:tool|function|api) (?:execution|call) failed|[a-z]{1,60}(?:error|exception)"
    r"|(?:the |your )?(?:request|operation|query|connection|command|call|execution) (?:has )?"
    r"(?:timed out|(?:was )?refused|was reset|was aborted|failed)"
    r"(?=\W*$|[.:;!]|\s(?:after|with|due|because)\b)"
    r"|(?:connection refused|rate limit(?:ed| exceeded| reached)|too many requests|internal server error"
    r"|bad gateway|service unavailable|gateway time-?out"
    r"|something went wrong)(?=\W*$|[.:;!(])"
    r"|http(?:/[\d.]+)? (?:error )?(?:4(?!04)|5)\d\d(?=\W+\w)|fehler|erreur|errore|erro|ошибка)(?![a-z])"
    r"|错误|錯誤|エラー|오류|usage:|(?:/[\w./-]{1,60}/)?(?:bash|sh|zsh|dash)(?:: -c)?(?:: line \d+)?: )",
    re.IGNORECASE,
)
SAYS_ERROR: Final = re.compile(
    r"\W{0,4}(?:[a-z]{0,60}(?:error|exception)\s?:|error (?:executing|calling|running|in tool))", re.IGNORECASE
)
_ERROR_PAGE: Final = re.compile(r"<(?:title|h1)>\s*(?:http )?(?:error )?(?:4(?!04)\d\d|5\d\d)\b", re.IGNORECASE)
_LEADING: Final = " \t\r\n\"'`*#[({<-:>|!~."
_BAD_STARTS: Final = (
    *(
        "traceback",
        "fatal",
        "fail",
        "invalid",
        "unknown tool",
        "unauthori",
        "forbidden",
        "permission denied",
        "access denied",
        "no such file",
    ),
    *(
        "command not found",
        "syntax",
        "time",
        "could not",
        "cannot",
        "unable to",
        "tool ",
        "function ",
        "api ",
        "usage:",
        "bash",
        "sh:",
        "zsh",
        "dash:",
        "/",
    ),
    *(
        "the ",
        "your ",
        "request",
        "operation",
        "query",
        "connection",
        "command",
        "call ",
        "execution",
        "rate limit",
        "too many",
    ),
    *(
        "internal s",
        "bad gateway",
        "service un",
        "gateway",
        "something went",
        "http",
        "fehler",
        "erreur",
        "erro",
        "ошибка",
        "错误",
        "錯誤",
        "エラー",
        "오류",
    ),
)


def reports_failure(text: str) -> bool:
    """Whether a text starts like an error. A word somewhere inside a page of search results is not a failure."""
    head = text[:HEAD]
    if "Traceback (most recent call last)" in head or (_may_be_bad(head) and _BAD_TEXT.match(head)):
        return True
    if "<" in head[:80] and _ERROR_PAGE.search(head):
        return True
    return len(text) <= HEAD and (_SERVER_ERROR.match(head) is not None or _is_complaint(head))


def _may_be_bad(head: str) -> bool:
    """A quick look at the first words, for the many texts that are fine; the regular expression decides."""
    start = head[:80].lower().lstrip(_LEADING)
    return start.startswith(_BAD_STARTS) or "error" in start or "exception" in start


# A status line as the whole answer or its first line; inside a log it is a line of the log.
_SERVER_ERROR: Final = re.compile(
    r"\W{0,4}(?:4(?!04)\d\d|5\d\d)\W{1,3}(?:internal server error|bad gateway|service unavailable|gateway time-?out"
    r"|too many requests|unauthori[sz]ed|forbidden|bad request|request time-?out)\b",
    re.IGNORECASE,
)
# "cat: f: No such file or directory", "ls: cannot access 'x'", "/bin/bash: line 7: x: command not found"
_COMPLAINT: Final = re.compile(
    r"(?:[\w./+$~-]{1,60}: [^\n]{0,300}?\b(?:no such file or directory|permission denied|command not found"
    r"|not a directory|is a directory|operation not permitted|missing (?:operand|argument)|syntax error|failed to"
    r"|cannot (?:access|stat|open|execute|create|remove|find|read|write|overwrite)"
    r"|(?:invalid|unrecogni[sz]ed|illegal|unknown) (?:option|argument|operand)|not recognized)[^\n]*"
    r"|[^\n]{0,80}: -c: line \d+: [^\n]*|try '[^\n]{1,80}' (?:or '[^\n]{1,80}' )?for more information\.?)\s*$",
    re.IGNORECASE,
)


def _is_complaint(text: str) -> bool:
    """Whether every line is a command's complaint: a line of output beside it would be a result."""
    if ": " not in text[:80]:
        return False
    lines = [line for line in text.splitlines() if line.strip()]
    return all(_COMPLAINT.match(line) is not None for line in lines)
