"""Soft failures: recognise that an answer which looks like success says "no".

A tool that answers ``{"status": "partial_parse_error"}`` has failed for every purpose but Python's. The recognition is
deliberately narrow: a field must *say* failure (a status word, a non-empty ``error``, ``isError``), or a text must
*start* like an error. A word somewhere inside a page of search results is not a failure.
"""

import re
from typing import Any, Final

from runguard.core.absence import is_nothing, says_missing
from runguard.core.events import Outcome
from runguard.core.fingerprint import MAX_CHARS, mask

# Members bound once: looking one up on its enum costs as much as the rest of a line.
_OK, _EMPTY, _FAILED, _UNKNOWN_TOOL = Outcome.OK, Outcome.EMPTY, Outcome.FAILED, Outcome.UNKNOWN_TOOL
_HEAD: Final = 400  # what a text says about its own success, it says at the start
_TAIL: Final = 120  # and what a traceback says happened, at its end

_BAD_WORDS: Final = (
    r"error|errors|err|fail|failed|failure|fault|forbidden|unauthori[sz]ed|timeout|timed[\s_\-]?out|unavailable|"
    r"aborted|exception|throttled|rate[\s_\-]?limited|quota[\s_\-]?exceeded|(?:permission|access|request)[\s_\-]?(?:denied|refused|rejected)|invalid[\s_\-](?:request|argument|input|parameter)s?"
)
# What a tool did, not what it found: "rejected" or "denied" may be the verdict that was asked for.
# A status is a few words; "no errors", "0 failed" and "without errors" say the opposite.
_BAD_STATUS: Final = re.compile(
    rf"(?<![a-z])(?<!\bno[\s_\-])(?<!\b0[\s_\-])(?<!\bwithout[\s_\-])(?:{_BAD_WORDS})(?![a-z])", re.IGNORECASE
)
_STATE: Final = re.compile(
    r"\W*(?:failed|failure|aborted|unavailable|timed[\s_\-]?out|forbidden|rejected)\W*$", re.IGNORECASE
)  # what jobs and orders can be in
_BAD_TEXT: Final = re.compile(
    r"^\W{0,4}(?:(?:error|exception|traceback|fatal|failed|failure|invalid|unknown tool|unauthori[sz]ed"
    r"|forbidden|permission denied|access denied|"
    r"no such file|command not found|syntax ?error|timed? ?out|could not|cannot|unable to|tool execution failed"
    r"|[a-z]{1,60}(?:error|exception)"
    r"|(?:the |your )?(?:request|operation|query|connection|command|call|execution) (?:has )?"
    r"(?:timed out|(?:was )?refused|was reset|was aborted|failed)"
    r"(?=\W*$|[.:;!]|\s(?:after|with|due|because)\b)"
    r"|(?:connection refused|rate limit(?:ed| exceeded| reached)|too many requests|internal server error"
    r"|bad gateway|service unavailable|gateway time-?out"
    r"|something went wrong)(?=\W*$|[.:;!(])"
    r"|http(?:/[\d.]+)? (?:error )?(?:4(?!04)|5)\d\d(?=\W+\w)|fehler|erreur|errore|erro|ошибка)(?![a-z])"
    r"|错误|錯誤|エラー|오류|usage:|(?:bash|sh|zsh)(?:: line \d+)?: )",
    re.IGNORECASE,
)
_SAYS_ERROR: Final = re.compile(
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
        "tool execution failed",
        "usage:",
        "bash",
        "sh:",
        "zsh",
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
_NO_SUCH_TOOL: Final = re.compile(
    r"(?:tool|function)\s[`'\"]?[\w.\-]{0,80}[`'\"]?\s(?:is\s)?(?:not found|does not exist|not available|unknown)|"
    r"unknown (?:tool|function)|is not an? (?:known|available|valid) (?:tool|function)",
    re.IGNORECASE,
)
# What varies between two reports of one failure besides times and ids: quoted names, numbers, paths. How many errors
# are left is no such thing.
_PARTICULARS: Final = re.compile(
    r"'[^'\n]{0,200}'|\"[^\"\n]{0,200}\"|`[^`\n]{0,200}`|\S{0,200}/\S{0,200}"
    r"|\d+(?! (?:[a-z]{1,20} )?(?:errors?|failures?|failed|failing|remaining|left|passed|to go)\b)(?!\d)"
)

_STATUS_KEYS: Final = ("status", "state", "outcome", "result_status", "response_type")
_HTTP_KEYS: Final = ("status", "status_code", "statusCode", "http_status")
_ERROR_KEYS: Final = ("error", "errors", "error_message", "error_code", "exception", "errorMessage", "errorCode")
_MESSAGE_KEYS: Final = ("message", "error", "detail", "reason", "text", "content")
MISSING: Final = "missing"  # beside EMPTY: told as an error, so nothing was done
_NO_SUCH_PAGE: Final = (404, 410)
_REFUSED: Final = (401, 403, 407, 429)
# only these are asked for their truth: others may run code
_PLAIN: Final = frozenset({str, int, float, bool, dict, list, tuple})
_NO_ERROR: Final = ("0", "none", "None", "null", "ok", "OK")
_FLAG_KEYS: Final = ("ok", "success", "succeeded", "successful")
_TELLING: Final = frozenset({"isError", "is_error", *_ERROR_KEYS, *_FLAG_KEYS, *_STATUS_KEYS, *_HTTP_KEYS})
_WRAPPERS: Final = (
    "result",
    "output",
    "response",
    "data",
    "results",
    "items",
    "content",
    "matches",
    "documents",
    "rows",
)
# What an error is wrapped in. Whatever else a dict says, it says about a thing.
_ENVELOPE: Final = frozenset(
    {
        *_STATUS_KEYS,
        *_ERROR_KEYS,
        *_FLAG_KEYS,
        *_WRAPPERS,
        *_MESSAGE_KEYS,
        *_HTTP_KEYS,
        "isError",
        "is_error",
        "messages",
        "details",
        "code",
    }
    | {
        "type",
        "hint",
        "help",
        "description",
        "exit_code",
        "exitCode",
        "returncode",
        "return_code",
        "stderr",
        "stdout",
        "traceback",
        "retry_after",
        "retryable",
    }
    | {"body", "headers", "meta", "_meta", "structuredContent", "request_id", "requestId", "trace_id", "traceId"}
    | {"timestamp", "time", "duration", "elapsed", "attempt", "attempts", "retries"}
)
_MCP_KEYS: Final = frozenset({"content", "isError", "structuredContent", "meta", "_meta"})
# what may stand beside an empty body
_BODY_KEYS: Final = frozenset({*_WRAPPERS, *_STATUS_KEYS, "count", "total", "query"})


def was_done(answer: Any) -> bool:
    """Whether a side effect with this answer happened."""
    outcome, why = classify(answer)
    return outcome is _OK or (outcome is _EMPTY and not why)


def classify(answer: Any) -> tuple[Outcome, str]:
    """The outcome of an answer and, for a failure, its class: equal for the same failure told about other particulars.

    Beside EMPTY stands MISSING where "nothing there" was told as an error.
    """
    kind = type(answer)
    if kind is dict:
        return _of_dict(answer)
    if kind is str:
        return _of_text(answer)
    if answer is None or ((kind is list or kind is tuple) and not answer):
        return _EMPTY, ""
    return _OK, ""


def failure_class(text: str) -> str:
    """A failure's message without its particulars: the same failure with another path or number is still the same."""
    return _PARTICULARS.sub("#", mask(text if len(text) <= _HEAD else f"{text[:_HEAD]}\n{text[-_TAIL:]}"))


def _of_text(text: str) -> tuple[Outcome, str]:
    head = text[:_HEAD]
    if not head.strip():
        return _EMPTY, ""
    if len(text) <= _HEAD and is_nothing(head):
        return (_UNKNOWN_TOOL, failure_class(text)) if _NO_SUCH_TOOL.search(head) else (_EMPTY, "")
    if "Traceback (most recent call last)" in head or (_may_be_bad(head) and _BAD_TEXT.match(head)):
        return _failed(text)
    if "<" in head[:80] and _ERROR_PAGE.search(head):
        return _failed(text)
    return _OK, ""


def _may_be_bad(head: str) -> bool:
    """A quick look at the first words, for the many texts that are fine; the regular expression decides."""
    start = head[:80].lower().lstrip(_LEADING)
    return start.startswith(_BAD_STARTS) or "error" in start or "exception" in start


def _of_dict(answer: dict[Any, object]) -> tuple[Outcome, str]:
    if not answer:
        return _EMPTY, ""
    telling = False
    for key in answer:
        if type(key) is not str:  # looking such a dict up may run a key's code; no tool's status looks like this
            return _OK, ""
        if key in _TELLING:
            telling = True
    return (_told(answer) if telling else None) or _of_body(answer)


def _told(answer: dict[str, object]) -> tuple[Outcome, str] | None:
    """What the fields that speak of success or failure say, or None."""
    get = answer.get
    if get("isError") is True or get("is_error") is True:
        return _failed(_said(answer), answer)
    for key in _ERROR_KEYS:
        error = get(key)
        if error is None or (type(error) in _PLAIN and (not error or error in _NO_ERROR)):
            continue
        if type(error) is list and _is_record(answer):
            continue  # what was found in a thing: a linter's errors are its answer
        return _failed(_said(answer if error is True else error) or type(error).__name__, error)
    for key in _FLAG_KEYS:
        if get(key) is False:
            return _failed(_said(answer), answer)
    for key in _HTTP_KEYS:
        code = get(key)
        if (
            type(code) is int
            and (code in _NO_SUCH_PAGE or code in _REFUSED or 500 <= code < 600)
            and not _is_record(answer)
        ):
            return (_EMPTY, MISSING) if code in _NO_SUCH_PAGE else _failed(_said(answer), answer)
    for key in _STATUS_KEYS:
        status = get(key)
        if type(status) is str and len(status) <= _HEAD:
            if is_nothing(status):
                return _EMPTY, ""
            if _BAD_STATUS.search(status):
                return (_OK, "") if _STATE.match(status) and _is_record(answer) else _failed(_said(answer), answer)
    return None


def _of_body(answer: dict[str, object]) -> tuple[Outcome, str]:
    """One wrapping level: {"result": "..."} is how frameworks carry a bare string, None or list."""
    if len(answer) == 1:
        (key, value), *_ = answer.items()
        if key in _WRAPPERS and (value is None or type(value) in (str, list, dict)):
            if type(value) is list and value:
                return _OK, ""
            return classify(value)
    elif _MCP_KEYS.issuperset(answer):
        content = answer.get("content")
        said = (
            content[0].get("text")
            if type(content) is list and len(content) == 1 and type(content[0]) is dict
            else content
        )
        if (type(said) is list and not said) or (
            type(said) is str and (not said.strip() or is_nothing(said[:_HEAD]) or _SAYS_ERROR.match(said))
        ):
            return classify(said)
    elif _BODY_KEYS.issuperset(answer):
        bodies = [answer[key] for key in answer if key in _WRAPPERS]
        if bodies and all(body is None or (type(body) in (str, list, dict) and not body) for body in bodies):
            return _EMPTY, ""
    return _OK, ""


def _is_record(answer: dict[str, object]) -> bool:
    """Whether a dict tells about a thing that was looked up: its failed state is the answer, and no failure of the
    tool.
    """
    return any(
        key not in _ENVELOPE and value is not None and type(value) in (str, int, float) for key, value in answer.items()
    )


def _failed(text: str, value: object = None) -> tuple[Outcome, str]:
    if len(text) <= _HEAD and _NO_SUCH_TOOL.search(text):
        return _UNKNOWN_TOOL, failure_class(text)
    message = _message_of(value)
    if says_missing(message if type(message) is str and message else text):
        return _EMPTY, MISSING
    return _FAILED, failure_class(text)


def _message_of(value: object) -> object:
    """The one sentence of an error, where frameworks put it:

    {"message": ...}, {"error": {"message": ...}}, [{"text": ...}].
    """
    for _ in range(3):
        if type(value) is list and len(value) == 1:
            value = value[0]
        if type(value) is not dict:
            break
        told: dict[object, object] = value
        value = next((told[key] for key in _MESSAGE_KEYS if type(told.get(key)) in (str, dict, list)), None)
    return value


def _said(value: Any, depth: int = 3) -> str:
    """The texts inside a failure, in a fixed order: its message, or else its status fields."""
    kind = type(value)
    if kind is str:
        said: str = value[:MAX_CHARS]
        return said
    if kind in (int, float, bool):
        return f"{value}" if kind is not int or value.bit_length() < 256 else "#"
    if depth and kind is dict:
        parts = [f"{key}={_said(value[key], depth - 1)}" for key in sorted(k for k in value if type(k) is str)[:32]]
        return ";".join(part for part in parts if not part.endswith("="))
    if depth and kind is list:
        return ";".join(_said(item, depth - 1) for item in value[:8])
    return ""


def provider_status(error: Exception) -> int | None:
    """The provider's own refusal: it answered with an error status, so it billed nothing."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("code", "status_code"):
            status = getattr(holder, name, None)
            if type(status) is int and 400 <= status < 600:
                return status
    return None
