"""Soft failures: recognise that an answer which looks like success says "no".

A tool that answers ``{"status": "partial_parse_error"}`` has failed for every purpose but Python's. The recognition is
deliberately narrow: a field must *say* failure (a status word, a non-empty ``error``, ``isError``), or a text must
*start* like an error. A word somewhere inside a page of search results is not a failure.
"""

import re
from typing import Any, Final

from runguard.core.absence import is_nothing, says_missing
from runguard.core.bounded_text import MAX_CHARS
from runguard.core.embedded import embedded_json, exit_code, has_output
from runguard.core.error_texts import HEAD, SAYS_ERROR, reports_failure
from runguard.core.events import FAILURES, Outcome
from runguard.core.masking import mask
from runguard.core.try_again import is_try_again, may_ask, says_try_again

# Members bound once: looking one up on its enum costs as much as the rest of a line.
_OK, _EMPTY, _FAILED, _UNKNOWN_TOOL = Outcome.OK, Outcome.EMPTY, Outcome.FAILED, Outcome.UNKNOWN_TOOL
_WRAPPED: Final = 32  # levels of {"result": …} that are opened; real answers have one or two
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

_MOST_KEYS: Final = 32_768
_HOLDERS: Final = frozenset({dict, list, tuple})
_FEW_KEYS: Final = 8  # of a dict that only asks to try again
_STATUS_KEYS: Final = ("status", "state", "outcome", "result_status", "response_type")
_HTTP_KEYS: Final = ("status", "status_code", "statusCode", "http_status")
_ERROR_KEYS: Final = ("error", "errors", "error_message", "error_code", "exception", "errorMessage", "errorCode")
_MESSAGE_KEYS: Final = ("message", "error", "detail", "reason", "text", "content")
_SAYING: Final = frozenset({*_STATUS_KEYS, *_MESSAGE_KEYS})
MISSING: Final = "missing"  # beside EMPTY: told as an error, so nothing was done
_NO_SUCH_PAGE: Final = (404, 410)
_REFUSED: Final = (401, 403, 407, 429)
# only these are asked for their truth: others may run code
_PLAIN: Final = frozenset({str, int, float, bool, dict, list, tuple})
_NO_ERROR: Final = ("0", "none", "None", "null", "ok", "OK")
_FLAG_KEYS: Final = ("ok", "success", "succeeded", "successful")
_EXIT_KEYS: Final = ("exit_code", "exitCode", "returncode", "return_code")
_OUTPUT_KEYS: Final = ("stderr", "stdout", "output")
_TELLING: Final = frozenset({"isError", "is_error", *_ERROR_KEYS, *_FLAG_KEYS, *_STATUS_KEYS, *_HTTP_KEYS, *_EXIT_KEYS})
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
        *_EXIT_KEYS,
        *_OUTPUT_KEYS,
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


def classify(answer: Any, depth: int = _WRAPPED) -> tuple[Outcome, str]:
    """The outcome of an answer and, for a failure, its class: equal for the same failure told about other particulars.

    OK with a class is an answer that looks like success and asks to try again.
    MISSING is like EMPTY, but the tool reported "nothing there" as an error. ``depth``: levels of wrapping to open.
    """
    if depth <= 0:
        return _OK, ""
    kind = type(answer)
    if kind is dict:
        return _of_dict(answer, depth)
    if kind is str:
        return _of_text(answer, depth)
    if answer is None or ((kind is list or kind is tuple) and not answer):
        return _EMPTY, ""
    if kind is list and len(answer) == 1 and type(answer[0]) is dict and answer[0].get("type") == "text":
        return classify(answer[0].get("text"), depth - 1)  # the content of an MCP answer
    return _OK, ""


def failure_class(text: str) -> str:
    """A failure's message without its particulars: the same failure with another path or number is still the same."""
    return _PARTICULARS.sub("#", mask(text if len(text) <= HEAD else f"{text[:HEAD]}\n{text[-_TAIL:]}"))


def _of_text(text: str, depth: int) -> tuple[Outcome, str]:
    head = text[:HEAD]
    if not head.strip():
        return _EMPTY, ""
    if len(text) <= HEAD and is_nothing(head):
        return (_UNKNOWN_TOOL, failure_class(text)) if _NO_SUCH_TOOL.search(head) else (_EMPTY, "")
    if (inside := embedded_json(text)) is not None:
        return classify(inside, depth - 1)
    code = exit_code(head)
    if code is not None and code != 1:
        return _failed(text)
    if code == 1 and len(text) <= HEAD and not has_output(text):
        return _EMPTY, ""  # as of grep or diff: nothing found
    if reports_failure(text):
        return _failed(text)
    return _OK, failure_class(text) if len(text) <= HEAD and says_try_again(text) else ""


def _of_dict(answer: dict[Any, object], depth: int) -> tuple[Outcome, str]:
    if not answer:
        return _EMPTY, ""
    if len(answer) > _MOST_KEYS:
        return _OK, ""  # a table: no tool's status looks like this
    telling = False
    for key in answer:
        if type(key) is not str:  # looking such a dict up may run a key's code; no tool's status looks like this
            return _OK, ""
        if key in _TELLING:
            telling = True
    found = (_told(answer, depth) if telling else None) or _of_body(answer, depth)
    if found[1] or _SAYING.isdisjoint(answer) or found[0] in FAILURES:
        return found
    words = _asks_again(answer)
    return (_OK, failure_class(words)) if words else found


def _told(answer: dict[str, object], depth: int) -> tuple[Outcome, str] | None:
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
    for key in _EXIT_KEYS:
        code = get(key)
        if type(code) is int and code and (any(k in answer for k in _OUTPUT_KEYS) or not _is_record(answer)):
            return _of_exit(code, answer, depth)
    for key in _STATUS_KEYS:
        status = get(key)
        if type(status) is str and len(status) <= HEAD:
            if is_nothing(status):
                return _EMPTY, ""
            if _BAD_STATUS.search(status):
                return (_OK, "") if _STATE.match(status) and _is_record(answer) else _failed(_said(answer), answer)
    return None


def _asks_again(answer: dict[str, object]) -> str:
    """The words by which a dict that holds no result asks to try again, or ""."""
    if len(answer) > _FEW_KEYS:
        return ""
    said: list[str] = []
    for key, value in answer.items():
        if type(value) is str:
            if key in _SAYING:
                said.append(value)
        elif type(value) in _HOLDERS and value:
            return ""  # a result
    words = "; ".join(said)
    if not may_ask(words):
        return ""
    for key in _STATUS_KEYS:
        status = answer.get(key)
        if type(status) is str and is_try_again(status):
            return words
    return words if not _is_record(answer) and says_try_again(words) else ""


def _of_exit(code: int, answer: dict[str, object], depth: int) -> tuple[Outcome, str]:
    """Exit code 1 without a message is how grep and diff say that something was or was not found."""
    errors, printed = answer.get("stderr"), answer.get("stdout", answer.get("output"))
    if code == 1 and (errors is None or (type(errors) is str and not errors.strip())):
        return classify(printed, depth - 1) if printed is None or type(printed) is str else (_OK, "")
    return _failed(_said(answer), answer)


def _of_body(answer: dict[str, object], depth: int) -> tuple[Outcome, str]:
    """One wrapping level: {"result": "..."} is how frameworks carry a bare string, None or list."""
    if len(answer) == 1:
        (key, value), *_ = answer.items()
        if key in _WRAPPERS and (value is None or type(value) in (str, list, dict)):
            return classify(value, depth - 1)
    elif _MCP_KEYS.issuperset(answer):
        content = answer.get("content")
        content = (
            content[0].get("text")
            if type(content) is list and len(content) == 1 and type(content[0]) is dict
            else content
        )
        if (type(content) is list and not content) or (
            type(content) is str
            and (
                not content.strip()
                or is_nothing(content[:HEAD])
                or SAYS_ERROR.match(content)
                or content.lstrip()[:1] in ("{", "[")
            )
        ):
            return classify(content, depth - 1)
    elif _BODY_KEYS.issuperset(answer):
        has_body = False
        for key, body in answer.items():
            if key not in _WRAPPERS:
                continue
            if body is not None and (type(body) not in (str, list, dict) or body):
                return _OK, ""
            has_body = True
        if has_body:
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
    if len(text) <= HEAD and _NO_SUCH_TOOL.search(text):
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
        fields: dict[object, object] = value
        value = next((fields[key] for key in _MESSAGE_KEYS if type(fields.get(key)) in (str, dict, list)), None)
    return value


def _said(value: Any, depth: int = 3) -> str:
    """The texts inside a failure, in a fixed order: its message, or else its status fields."""
    kind = type(value)
    if kind is str:
        content: str = value[:MAX_CHARS]
        return content
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
