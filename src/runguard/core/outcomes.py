"""Soft failures: recognise that an answer which looks like success says "no".

A tool that answers ``{"status": "partial_parse_error"}`` has failed for every purpose but Python's. The recognition is
deliberately narrow: a field must *say* failure (a status word, a non-empty ``error``, ``isError``), or a text must
*start* like an error. ``engine/tools``, ``calls/function_settings`` and ``replay/sources`` classify answers with it.
"""

import json
import re
from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple

from runguard.core.events import FAILURES, LATE, Outcome
from runguard.core.identity import ASIDE, BIG, MAX_CHARS, STR, answer_text, mask

# ---- What an answer comes to.

# Members bound once: looking one up on its enum costs as much as the rest of a line.
_OK, _EMPTY, _FAILED, _UNKNOWN_TOOL = Outcome.OK, Outcome.EMPTY, Outcome.FAILED, Outcome.UNKNOWN_TOOL
_WRAPPED: Final = 32  # levels of {"result": …} to open; real answers have one or two
_AROUND_TEXT: Final = 4  # of them around the only text of an answer
_FEW_CHARS: Final = 40

# What a tool did, not what it found: "rejected" or "denied" may be the verdict that was asked for.
_BAD_WORDS: Final = (
    r"error|errors|err|fail|failed|failure|unsuccessful|not[\s_]ok|fault|forbidden|unauthori[sz]ed|timeout|timed[\s_\-]?out|unavailable|"
    r"aborted|exception|throttled|rate[\s_\-]?limited|quota[\s_\-]?exceeded|(?:permission|access|request)[\s_\-]?(?:denied|refused|rejected)|invalid[\s_\-](?:request|argument|input|parameter)s?"
)
# A status is a few words; "no errors", "0 failed" and "without errors" say the opposite.
_BAD_STATUS: Final = re.compile(
    rf"(?<![a-z])(?<!\bno[\s_\-])(?<!\b0[\s_\-])(?<!\bwithout[\s_\-])(?:{_BAD_WORDS})(?![a-z])", re.IGNORECASE
)
_STATE: Final = re.compile(
    r"\W*(?:failed|failure|unsuccessful|not[\s_]ok|aborted|unavailable|timed[\s_\-]?out|forbidden|rejected)\W*$",
    re.IGNORECASE,
)  # what jobs and orders can be in
_NO_SUCH_TOOL: Final = re.compile(
    r"(?:tool|function|action)\s[`'\"]?[\w.\-]{0,80}[`'\"]?\s(?:is\s)?"
    r"(?:not found|does not exist|don't exist|not available|unknown)|"
    r"unknown (?:tool|function)|is not an? (?:known|available|valid) (?:tool|function)",
    re.IGNORECASE,
)
# What varies between two reports of one failure besides times and ids: quoted names, numbers, paths. The number of
# errors that are left stays, because it shows progress.
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
_MESSAGES: Final = ("message", "detail", "msg")  # of a dict with nothing else
MISSING: Final = "missing"  # class of an EMPTY answer that was reported as an error: nothing was done
_TRACEBACK: Final = "Traceback (most recent call last)"
_ZERO: Final = re.compile(r"\W{0,4}<returncode>0<")
_NO_SUCH_PAGE: Final = (404, 410)
_REFUSED: Final = (401, 403, 407, 429)
# only values of these types are tested for truth, because others may run code
_PLAIN: Final = frozenset({str, int, float, bool, dict, list, tuple})
_NO_ERROR: Final = frozenset({"0", "none", "null", "nil", "ok", "false", "no error", "no errors", "n/a", "-"})
_LONGEST_NO: Final = 12  # characters
_FLAG_KEYS: Final = ("ok", "success", "succeeded", "successful")
_EXIT_KEYS: Final = ("exit_code", "exitCode", "returncode", "return_code")
_OUTPUT_KEYS: Final = ("stderr", "stdout", "output")
_TELLING: Final = {  # and in which order they are looked at
    key: place
    for place, key in enumerate(
        ("isError", "is_error", *_ERROR_KEYS, *_FLAG_KEYS, *_EXIT_KEYS, *dict.fromkeys((*_HTTP_KEYS, *_STATUS_KEYS)))
    )
}
_WRAPPERS: Final = (
    *("result", "output", "response", "data", "results"),
    *("items", "content", "matches", "documents", "rows"),
)
_BODIES: Final = frozenset({*_WRAPPERS, "hits", "records", "entries", "files", "organic_results", "search_results"})
_WRAPPINGS: Final = _BODIES - _SAYING  # alone in a dict they hold the answer
_CARRIED: Final = frozenset({str, list, dict})
# What an error is wrapped in. Whatever else a dict says, it says about a thing.
_ENVELOPE: Final = frozenset(
    {
        *(*_TELLING, *_WRAPPERS, *_MESSAGE_KEYS, *_OUTPUT_KEYS),
        *("messages", "details", "code", "type", "hint", "help", "description", "traceback"),
        *("retry_after", "retryable", "body", "headers", "meta", "_meta", "structuredContent"),
        *("request_id", "requestId", "trace_id", "traceId"),
        *("timestamp", "time", "duration", "elapsed", "attempt", "attempts", "retries"),
    }
)
_MCP_KEYS: Final = frozenset({"content", "isError", "structuredContent", "meta", "_meta"})
# what may stand beside an empty body
_BODY_KEYS: Final = frozenset(
    {
        *(*_BODIES, *_STATUS_KEYS, "count", "total", "total_count", "total_results", "query", "next", "next_page"),
        *("next_cursor", "next_page_token", "nextPageToken", "cursor", "has_more", "page", "limit", "offset", "took"),
    }
)
_SENTENCE_KEYS: Final = ("message", "text", "answer")
_SENTENCE: Final = frozenset({*_STATUS_KEYS, *_FLAG_KEYS, *_SENTENCE_KEYS})  # a dict of one sentence


def was_done(answer: Any) -> bool:
    """Return whether a side effect with this answer happened."""
    outcome, why = classify(answer)
    return outcome is _OK or (outcome is _EMPTY and not why)


def classify(answer: Any, depth: int = _WRAPPED) -> tuple[Outcome, str]:
    """Return the outcome of an answer and, for a failure, its class.

    The class is equal for the same failure with other particulars. OK with a class is an answer that looks like success
    and asks to try again. EMPTY with the class MISSING: the tool reported "nothing there" as an error. ``depth``: how
    many levels of wrapping to open.
    """
    kind = type(answer)
    while kind is dict and len(answer) == 1:  # frameworks carry a bare string, None or list as ``{"result": "..."}``
        ((key, value),) = answer.items()
        if type(key) is not str or key not in _WRAPPINGS or (value is not None and type(value) not in _CARRIED):
            break
        answer, kind, depth = value, type(value), depth - 1
    if depth <= 0:
        return _OK, ""
    if kind is dict:
        return _of_dict(answer, depth)
    if kind is str:
        return _of_text(answer, depth)
    if answer is None or ((kind is list or kind is tuple) and not answer):
        return _EMPTY, ""
    if kind is list and len(answer) == 1 and type(answer[0]) is dict and answer[0].get("type") == "text":
        return classify(answer[0].get("text"), depth - 1)  # the content of an MCP answer
    return _OK, ""


def only_text(answer: object) -> str:
    """Return the text of an answer that is one text, bare or as frameworks and MCP wrap it; else an empty one."""
    for _ in range(_AROUND_TEXT):
        if type(answer) is dict and len(answer) == 1:
            (answer,) = answer.values()
        elif type(answer) is dict and _MCP_KEYS.issuperset(answer):
            answer = answer.get("content")
        elif type(answer) is list and len(answer) == 1 and type(answer[0]) is dict:
            answer = answer[0].get("text")
        else:
            break
    return answer if type(answer) is str else ""


def ending_class(answer: object, failure: str) -> str:
    """Return the class of the last line of a failure; ``failure``, its class, where it has no such line."""
    text = only_text(answer)
    line = last_line(text) if text[:_FEW_CHARS].lstrip()[:1] not in ("{", "[") else ""
    return failure_class(line) if line and line[0] not in "{[" else failure


def failure_class(text: str) -> str:
    """Return a failure's message without its particulars: with another path or number it is still the same failure."""
    return _PARTICULARS.sub("#", mask(text if len(text) <= HEAD else f"{text[:HEAD]}\n{text[-TAIL:]}"))


def _of_text(text: str, depth: int) -> tuple[Outcome, str]:
    if "<" in text[:44] or ">" in text[-44:]:
        text = bare(text)
    head = text[:HEAD]
    said = head.strip()
    if not said:
        return _EMPTY, ""
    if len(text) <= HEAD and _is_nothing(head):
        return (_UNKNOWN_TOOL, failure_class(text)) if _NO_SUCH_TOOL.search(head) else (_EMPTY, "")
    if said[0] in "{[" and (inside := embedded_json(text)) is not None:
        return classify(inside, depth - 1)
    exit_code = _EXIT.match(head)
    code = int(exit_code[1]) if exit_code is not None else 0
    if code not in (0, 1):
        return _failed(text)
    if exit_code is not None and code == 1 and len(text) <= HEAD and not _TAGS.sub("", text[exit_code.end() :]):
        return _EMPTY, ""  # grep and diff end with 1 when nothing was found
    if reports_failure(text):
        late = is_list_of_errors(text) or (_TRACEBACK in head and not said.startswith(_TRACEBACK))
        return _failed(text, late=late)
    if "{" in head and (around := failing_json(text)) is not None:
        found = classify(around, depth - 1)
        if found[0] in FAILURES:
            return found
    end = text[-LAST:].rstrip()
    if (
        MAY_END_BADLY.match(end, end.rfind("\n") + 1) is not None
        and ends_in_failure(text)
        and (code or _ZERO.match(head) is None)
    ):
        return _failed(text, late=True)
    return _OK, failure_class(text) if len(text) <= HEAD and _says_try_again(text) else ""


def _of_dict(answer: dict[Any, object], depth: int) -> tuple[Outcome, str]:
    if not answer:
        return _EMPTY, ""
    if len(answer) > _MOST_KEYS or not STR.issuperset(map(type, answer)):
        return _OK, ""  # a table, or keys whose code a look-up may run: no tool's status looks like this
    telling = sorted(_TELLING.keys() & answer.keys(), key=_TELLING.__getitem__)
    found = (_told(answer, telling, depth) if telling else None) or _of_body(answer, depth)
    if found[1] or _SAYING.isdisjoint(answer) or found[0] in FAILURES:
        return found
    words = _asks_again(answer)
    return (_OK, failure_class(words)) if words else found


def _told(answer: dict[str, object], telling: list[str], depth: int) -> tuple[Outcome, str] | None:
    """Return the outcome that the fields about success or failure tell, or None. ``telling``: their names."""
    get = answer.get
    if get("isError") is True or get("is_error") is True:
        return _failed(_said(answer), answer)
    for key in filter(_ERROR_KEYS.__contains__, telling):
        error = get(key)
        if error is None or (type(error) in _PLAIN and not error):
            continue
        if type(error) is str and len(error) <= _LONGEST_NO and error.strip(" .").lower() in _NO_ERROR:
            continue
        if type(error) is float or (type(error) is int and key == "errors"):
            continue  # a measurement or a count
        if type(error) is list and _is_record(answer):
            continue  # they were found in a thing: a linter's errors are its answer
        return _failed(_said(answer if error is True else error) or type(error).__name__, error)
    for key in filter(_FLAG_KEYS.__contains__, telling):
        if (flag := get(key)) is False or (type(flag) is str and flag in ("false", "False")):
            return _failed(_said(answer), answer)
    for key in filter(_HTTP_KEYS.__contains__, telling):
        code = get(key)
        if (
            type(code) is int
            and (code in _NO_SUCH_PAGE or code in _REFUSED or 500 <= code < 600)
            and not _is_record(answer)
        ):
            return (_EMPTY, MISSING) if code in _NO_SUCH_PAGE else _failed(_said(answer), answer)
    for key in filter(_EXIT_KEYS.__contains__, telling):
        code = get(key)
        if type(code) is int and code and (any(k in answer for k in _OUTPUT_KEYS) or not _is_record(answer)):
            return _of_exit(code, answer, depth)
    for key in filter(_STATUS_KEYS.__contains__, telling):
        status = get(key)
        if type(status) is str and len(status) <= HEAD:
            if _is_nothing(status):
                return _EMPTY, ""
            if _BAD_STATUS.search(status):
                return (_OK, "") if _STATE.match(status) and _is_record(answer) else _failed(_said(answer), answer)
    return None


def _asks_again(answer: dict[str, object]) -> str:
    """Return the words by which a dict that holds no result asks to try again, or ""."""
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
    if not _may_ask(words):
        return ""
    for key in _STATUS_KEYS:
        status = answer.get(key)
        if type(status) is str and len(status) <= _SHORT_ANSWER and _TRY_AGAIN.fullmatch(status) is not None:
            return words
    return words if not _is_record(answer) and _says_try_again(words) else ""


def _of_exit(code: int, answer: dict[str, object], depth: int) -> tuple[Outcome, str]:
    """Return the outcome of a command that ended with an exit code above 0.

    Exit code 1 without a message is how grep and diff say that something was or was not found.
    """
    errors, printed = answer.get("stderr"), answer.get("stdout", answer.get("output"))
    if code == 1 and (errors is None or (type(errors) is str and not errors.strip())):
        return classify(printed, depth - 1) if printed is None or type(printed) is str else (_OK, "")
    if type(errors) is str and type(printed) is str and unreadable_places(errors) > (not printed.strip()):
        return classify(printed, depth - 1)  # a search has gone on past places that it may not read
    return _failed(_said(answer), answer)


def _of_body(answer: dict[str, object], depth: int) -> tuple[Outcome, str]:
    """Return the outcome of an answer without telling fields, from what it wraps."""
    if len(answer) == 1:
        ((key, value),) = answer.items()
        if key in _BODIES and (value is None or type(value) in _CARRIED):
            return classify(value, depth - 1)
        if key in _MESSAGES and type(value) is str and reports_failure(value):
            return _of_text(value, depth)
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
                or _is_nothing(content[:HEAD])
                or says_error(content)
                or content.lstrip()[:1] in ("{", "[")
            )
        ):
            return classify(content, depth - 1)
    elif _BODY_KEYS.issuperset(answer):
        bodies = [body for key, body in answer.items() if key in _BODIES]
        if any(body is not None and (type(body) not in _CARRIED or body) for body in bodies):
            return _OK, ""
        if bodies:
            return _EMPTY, ""
    if _SENTENCE.issuperset(answer):
        for key in _SENTENCE_KEYS:
            words = answer.get(key)
            if type(words) is str and len(words) <= HEAD and _is_nothing(words):
                return _EMPTY, ""
    return _OK, ""


def _is_record(answer: dict[str, object]) -> bool:
    """Return whether a dict tells about a thing that was looked up.

    Its failed state is the answer then, and no failure of the tool.
    """
    return any(
        key not in _ENVELOPE and value is not None and type(value) in (str, int, float) for key, value in answer.items()
    )


def _failed(text: str, value: object = None, *, late: bool = False) -> tuple[Outcome, str]:
    if len(text) <= HEAD and _NO_SUCH_TOOL.search(text):
        return _UNKNOWN_TOOL, failure_class(text)
    message = _message_of(value)
    if says_missing(message if type(message) is str and message else text) or unreadable_places(text) > 1:
        return _EMPTY, MISSING
    return _FAILED, f"{LATE}{failure_class(text)}" if late else failure_class(text)


def _message_of(value: object) -> object:
    """Return the sentence of an error from where frameworks put it, such as ``{"error": {"message": ...}}``."""
    for _ in range(3):
        if type(value) is list and len(value) == 1:
            value = value[0]
        if type(value) is not dict:
            break
        fields: dict[object, object] = value
        value = next((fields[key] for key in _MESSAGE_KEYS if type(fields.get(key)) in (str, dict, list)), None)
    return value


def _said(value: Any, depth: int = 3) -> str:
    """Return the texts inside a failure in a fixed order, joined to one text."""
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


# ---- Answers that say that the work is not done yet: "pending", "incomplete", "retry later".

_UNFINISHED_STATUS_KEYS: Final = ("status", "state", "outcome", "result_status", "code", "result")
_UNFINISHED_MESSAGE_KEYS: Final = ("message", "detail", "reason", "text", "hint", "result", "note")
_UNFINISHED_KEYS: Final = frozenset({*_UNFINISHED_STATUS_KEYS, *_UNFINISHED_MESSAGE_KEYS})
_UNFINISHED: Final = re.compile(
    r"\W*(?:still[\s_\-])?(?:pending|incomplete|partial(?:ly)?(?:[\s_\-]\w+){0,2}|degraded|unfinished|busy|waiting|queued|running|processing"
    r"|in[\s_\-]?progress|not[\s_\-]?(?:ready|finished|complete|completed|available[\s_\-]?yet)|(?:please[\s_\-])?(?:re)?try(?:[\s_\-]?(?:later|again|required|needed|soon)){0,2})\W*",
    re.IGNORECASE,
)
_ASKS_TO_WAIT: Final = re.compile(
    r"\b(?:re)?try(?:ing)? (?:it |this )?(?:again|later|in \d)|\bcome back (?:later|in)\b"
    r"|\bnot (?:yet )?(?:ready|finished|complete)\b"
    r"|\bstill (?:pending|processing|running|working|loading)\b|\b(?:partial|incomplete) (?:result|data|parse"
    r"|answer|response)",
    re.IGNORECASE,
)
# One of each of these is in every text that _ASKS_TO_WAIT matches. Looking for them spares most answers the search.
_AMONG_ASKS_TO_WAIT: Final = ("try", "come back ", "still ", "not ", "partial ", "incomplete ")
_IN_ASKS_TO_WAIT: Final = (
    *("try again", "try later", "try in ", "try it ", "try this ", "trying ", "come back ", "still "),
    *("not yet ", "not ready", "not finished", "not complete", "partial ", "incomplete "),
)


def is_unfinished(answer: Any) -> bool:
    """Return whether an answer says that the work is not done yet.

    By default RunGuard treats such answers as polling. Only an explicit ``max_identical_tool_results`` counts them, and
    only when they are equal. Only plain values are looked at: others may run their own code.
    """
    if type(answer) is str:
        return _UNFINISHED.fullmatch(answer[:HEAD]) is not None or _asks_to_wait(answer)
    if type(answer) is not dict or len(answer) > _MOST_KEYS or not STR.issuperset(map(type, answer)):
        return False
    for key in _UNFINISHED_KEYS & answer.keys():
        value = answer[key]
        if type(value) is str and (
            (key in _UNFINISHED_STATUS_KEYS and len(value) <= HEAD and _UNFINISHED.fullmatch(value))
            or (key in _UNFINISHED_MESSAGE_KEYS and _asks_to_wait(value))
        ):
            return True
    return False


def _asks_to_wait(text: str) -> bool:
    head = text[:HEAD]
    holds = head.lower().__contains__
    if not (any(map(holds, _AMONG_ASKS_TO_WAIT)) and any(map(holds, _IN_ASKS_TO_WAIT))):
        return False
    return _ASKS_TO_WAIT.search(head) is not None


# ---- Which items of a call a failure names: "coupon SAVE-07 has expired", "Unknown column 'total'".

_SAID_CHARS: Final = 800  # characters of a failure in which items are looked for
_NAME: Final = 80  # characters of a name; a longer text that an error quotes is the whole argument
_LONG_ARGUMENT: Final = 16_384
# One expression for each kind of quotation mark: the text of a dict is full of others.
_QUOTED: Final = tuple(re.compile(rf"{mark}([^{mark}\n]{{2,{_NAME}}}){mark}") for mark in "'\"`")


def named_items(args: object, answer: object, volatile: Iterable[str] = ()) -> str:
    """Return the items of a call that its failure names, as one text; "" when it names none.

    The same message about other items is another failure: trying nine columns is a search, not a stall.
    """
    if type(args) is not dict:
        return ""
    said = answer_text(answer)
    said = said if len(said) <= _SAID_CHARS else f"{said[: _SAID_CHARS // 2]}\n{said[-_SAID_CHARS // 2 :]}"
    aside = ASIDE.union(volatile)
    given = [value for key, value in args.items() if type(key) is str and key not in aside]
    names = {name for value in given if (name := _name(value)) and _contains(said, name)}
    long = [value[:_LONG_ARGUMENT] for value in given if type(value) is str and len(value) > _NAME]
    if long:
        quoted = {name for pattern in _QUOTED for name in pattern.findall(said)}
        names |= {name for name in quoted if any(_contains(value, name) for value in long)}
    return "\0".join(sorted(names))  # in the same order, however a store keeps the arguments


def without_items(failure: str, items: str) -> str:
    """Return the class of a failure without the items that it names, which are those of ``named_items``."""
    for item in items.split("\0"):
        failure = failure.replace(failure_class(item), "#")
    return failure


def _name(value: object) -> str:
    name = value if type(value) is str else str(value) if type(value) is int and 9 < value < BIG else ""
    return name if 2 <= len(name) <= _NAME else ""


def _contains(text: str, name: str) -> bool:
    """Return whether ``name`` stands in ``text`` as a word of its own."""
    at = text.find(name)
    return at >= 0 and not (_in_word(text[max(at - 1, 0) : at]) or _in_word(text[at + len(name) : at + len(name) + 1]))


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "_"


# ---- How a provider refused a call, and how long a server asks to wait.


def provider_status(error: Exception) -> int | None:
    """Return the error status with which a provider refused a call, or None. A refused call was not billed."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("code", "status_code"):
            status = getattr(holder, name, None)
            if type(status) is int and 400 <= status < 600:
                return status
    return None


def seconds_to_wait(value: object, now: float) -> float | None:
    """Return the seconds that a ``Retry-After`` asks to wait, as a number or a date; None if it cannot be read."""
    if not isinstance(value, str):
        return None
    if is_number(value := value.strip()):
        return float(value)
    try:
        return max(parsedate_to_datetime(value).timestamp() - now, 0.0)
    except (ValueError, OverflowError, TypeError):
        return None


def is_number(text: str) -> bool:
    return len(text) < 20 and text.isascii() and text.replace(".", "", 1).isdigit()


# ---- Words that say that a thing which was looked up is missing or unavailable.

# That is an answer about the thing, and no failure of the tool: a sweep over a hundred customers meets many of them.
# What is needed to work at all (a file, a command, a key) is no such thing: without it the next call fails as well.

_SHORT_MESSAGE: Final = 120  # characters: a longer message tells a story
_THINGS: Final = (
    "results?|matches|match|data|records?|rows?|items?|entries|documents?|hits?|output|content|files?|pages?|e?mails?"
    "|messages?|events?|users?|customers?|tickets?|orders?|products?|articles?|papers?|flights?"
)
_KNOWLEDGE: Final = "information|info|data|details|forecast|records?|results?"

_NOTHING: Final = re.compile(
    r"^\W*(?:none|null|empty(?:[\s_\-]result)?|not[\s_\-]?found|nothing(?:\s(?:found|here|to\s\w+))?"
    r"|(?:found )?(?:0|zero) (?:results?|matches|rows?|hits?|files|documents|records|items|entries)"
    r"|no (?:changes?|modifications?) (?:(?:were|was|have been|has been) )?(?:made|applied|performed).{0,80}"
    r"|nothing (?:was|has been) (?:changed|modified|replaced)|the file (?:was|has) not (?:been )?(?:modified|changed)"
    r"|(?:replaced )?(?:0|zero) (?:occurrences?|replacements?)(?: (?:(?:was|were) )?(?:made|replaced))?.{0,80}"
    rf"|(?:sorry,? |(?:there|here) (?:are|were|is|was) |(?:search |query |i |we )?(?:found|returned|got) ){{0,2}}"
    rf"no[\s_\-](?:[^\W_]{{1,30}}[\s_\-]){{0,3}}(?:{_THINGS})"
    r"(?:\s(?:(?:were|was|are|is) )?(?:found|returned|available|matched?).{0,80})?"
    rf"|(?:we |i )?(?:could not|couldn't|did not|didn't) find any(?:thing\b|"
    rf" (?:[^\W_]{{1,30}} ){{0,3}}(?:{_THINGS})\b).{{0,80}}"
    rf"|your search .{{0,120}} match any (?:{_THINGS})\b.{{0,80}}|keine (?:ergebnisse|treffer)|i found nothing.{{0,80}}"
    r"|(?:\w[\s\w'\"-]{0,80}\s)?(?:not found|does not exist)\b.{0,120})\W*$",
    re.IGNORECASE | re.DOTALL,
)
_EDIT: Final = re.compile(
    r"\W{0,4}(?:tool_use_error>\W{0,4})?(?:the )?(?:string to replace|search text|old_?str|apply_patch|replacement text"
    r"|(?:could not|cannot|unable to|failed to) apply|(?:edit|patch) failed|no match(?:es)? (?:found )?for (?:the )?"
    r"(?:search block|old_?str)|parsing error)",
    re.IGNORECASE,
)
_NOT_THERE: Final = re.compile(
    r"(?<![a-z])not[\s_\-]?(?:be )?found(?![a-z])|(?<!file)(?<!module)(?<!command)notfound(?:error"
    r"|exception)?\b|\bNXDOMAIN\b|^\W*(?:http )?404\W*$"
    r"|\bno such\b|\bdo(?:es)?(?: not|n't) exist\b|\bcould not be located\b|\bnothing match(?:es|ed)\b|\bthere is no\b"
    r"|\b(?:could not|couldn't|cannot|can't|unable to|failed to) (?:find|locate)\b"
    r"|\bno (?:[\w'\"#.@\-]{1,60} ){1,4}?(?:found|available|with|for|matching|matched|named|called|listed"
    r"|exists?|on|at|under)\b"
    r"|\bno (?:matching |such )?(?:record|result|match|entry|data)(?:e?s)?\W*$"
    r"|\bnot in (?:the |our |this )?(?:catalog(?:ue)?|inventory|index|list|records|registry|collection|data ?set)\b"
    rf"|\b(?:{_KNOWLEDGE})\b[^.;]{{0,60}} (?:is|are)(?: not|n't) available\b"
    rf"|\b(?:do(?:es)?(?: not|n't) have|has no|have no) (?:[\w\-]{{1,40}} ){{0,4}}(?:{_KNOWLEDGE})\b"
    # German, French, Spanish, Portuguese, Italian, Russian, Chinese, Japanese, Korean
    r"|\bnicht (?:gefunden|vorhanden|verfügbar)|\bkeine?[nrs]? (?:\w+ ){0,3}(?:gefunden|vorhanden|verfügbar)"
    r"|\bexistiert nicht"
    r"|\bintrouvable|\bnon trouvée?s?\b|\bn['’]existe pas|\bn['’]a pas été trouvée?|\baucune? (?:\w+ ){0,3}trouvée?"
    r"|\bno (?:se (?:ha )?(?:encontr|hall)\w+|encontrad[oa]s?|existe)\b"
    r"|\bnão (?:foi |foram )?(?:encontrad[oa]s?|existe)|\bnon (?:è stat[oa] )?(?:trovat[oaie]|esiste)\b"
    r"|не найден|не существует|未找到|找不到|没有找到|沒有找到|不存在|見つかりません|存在しません|찾을 "
    r"수 없|존재하지 않",
    re.IGNORECASE,
)
_NOT_TO_BE_HAD: Final = re.compile(
    r"\b(?:already|currently|has been|is|are|was|were|fully) (?:already |currently |been |fully )?(?:taken"
    r"|booked|reserved|occupied|sold ?out|out of stock)\b"
    r"|\b(?:seat|slot|room|place|date|name|username) (?:taken|occupied|booked)\b|\b(?:not|n't"
    r"|no longer) available (?:on|at|for)\b|\balready exists\b",
    re.IGNORECASE,
)
_NEEDED: Final = re.compile(
    r"^\W*(?:bash|sh|zsh)\b|\b(?:command|tool|function|module|package|method|attribute|option|file|directory|folder|path|host|library|executable|key|token|credential"
    r"|session|database|table|column|schema|config(?:uration)?|variable|server|service|endpoint|model|driver|plugin|string|page|url|access|permission|connection|network"
    r"|quota|credit|memory|space|license|handler|distribution|version|argument|parameter|field|value|tag|quote|brace|bracket|delimiter"
    r"|container|pod|volume|namespace|branch|remote|repository|environment|socket|broker|worker|node|master|primary|replica|upstream|backend|cluster|gpu|capacity|response|internet"
    r"|event loop|thread|port|authori[sz]ation|subscription"
    r"|interpreter|runtime|binary|constructor|relation|transaction|certificate|proxy)s?\b"
    r"|\b(?:Runtime|Type|Attribute|Index|Name|Assertion|OS)Error\b|\bnot in (?:list|index)\b|\bENOTFOUND\b",
    re.IGNORECASE,
)
# A page of the web and a table of a restaurant are looked up like any thing.
_LOOKED_UP: Final = re.compile(
    r"\b404\b|^\W*(?:error:\s)?(?:the )?page\b.{0,80}(?:not found|does not exist)|\bno tables? (?:is "
    r"|are )?(?:available|free)\b",
    re.IGNORECASE,
)


def _is_nothing(text: str) -> bool:
    """Return whether a whole answer says "nothing". An edit whose text is not there has failed."""
    return _NOTHING.match(text) is not None and _EDIT.match(text) is None


def says_missing(message: str) -> bool:
    """Return whether an error is a short message that one of many things is missing or unavailable."""
    if len(message) > _SHORT_MESSAGE or _EDIT.match(message) is not None:
        return False
    if _NEEDED.search(message) is not None:
        return _LOOKED_UP.search(message) is not None
    return _NOT_THERE.search(message) is not None or _NOT_TO_BE_HAD.search(message) is not None or _is_nothing(message)


# ---- Texts that begin with the exit code of a command.

_EXIT: Final = re.compile(
    r"\W{0,4}(?:<returncode>|(?:(?:the )?(?:command|process) )?"
    r"(?:(?:exited|failed|finished|terminated|completed) with )?"
    r"(?:non-zero )?(?:(?:exit|return)[ _-]?|(?<=with ))(?:code|status)\W{0,3})(-?\d{1,6})\b",
    re.IGNORECASE,
)
_TAGS: Final = re.compile(r"</?\w{1,20}>|\b(?:std)?(?:out(?:put)?|err)\s*:|\(?no output\)?|\W", re.IGNORECASE)


# ---- Short answers that say "this did not work, try again" although they look like success.

# ``{"status": "retry later"}`` and "Service is busy, please try again" are no results: the next call will probably be
# answered alike. An answer that is accepted or pending, a thing that was not found and a verdict on what was asked
# ("wrong code, try again") are results.

_SHORT_ANSWER: Final = 200  # characters: a longer text has more to say

_TRY_AGAIN: Final = re.compile(
    r"\W*(?:please[\s_\-]?)?(?:(?:needs?|must|should)[\s_\-])?(?:re-?try|try[\s_\-]?again)"
    r"(?:[\s_\-]?(?:later|again|soon|required|needed)){0,3}(?:[\s_\-](?:in|after)[\s_\-].{1,20})?\W*"
    r"|\W*(?:(?:server|service|system|too|currently|temporarily)[\s_\-])+(?:is[\s_\-])?(?:busy|overloaded)\W*"
    r"|\W*overloaded\W*",
    re.IGNORECASE,
)
_ASKS: Final = re.compile(
    r"(?<!\bwill )(?<!\bI )(?<!'ll )\b(?:re-?try|try)(?: (?:it|this|that|(?:your|the|this) \w{1,20}))?,? "
    r"(?:again|later|after|once more|in (?:\d|a (?:few|moment|minute|while)))"
    r"|\b(?:server|service|system|api|backend|site|upstream|provider|gateway|endpoint)s?"
    r"(?: (?:is|are|was))?(?: (?:currently|temporarily|too|very))* (?:busy|overloaded)\b"
    r"|\btemporarily (?:unavailable|overloaded|busy|out of service|not available)\b"
    r"|\bsomething went wrong\b|\b(?:an|unexpected|internal|unknown) error (?:has )?occurred\b",
    re.IGNORECASE,
)
# One of these is in every text that _ASKS or _TRY_AGAIN matches. Looking for them first spares most answers the search.
_IN_ASKS: Final = ("try", "busy", "overloaded", "temporarily", "went wrong", "occurred")
# It was accepted, or it is being worked on.
_PENDING: Final = re.compile(
    r"\b(?:pending|queued?|running|processing|in[\s_]progress|still|being|preparing|generating|waiting|yet|started"
    r"|not (?:ready|finished|complete|done))\b|(?<!not )(?<!not be )\b(?:accepted|submitted|scheduled|received)\b",
    re.IGNORECASE,
)
# It says something about what was asked: a guess, a seat, a search that needs other words.
_VERDICT: Final = re.compile(
    r"(?<!went )\bwrong\b|\b(?:incorrect|guess|higher|lower|too (?:low|high|short|long|far|close|small|large|few)"
    r"|not (?:the )?(?:right|correct|quite)|held|locked|reserved|taken|booked|already|another|different)\b",
    re.IGNORECASE,
)


def _may_ask(text: str) -> bool:
    """Return False for most answers that ask for nothing. Every text that asks for another attempt passes."""
    return len(text) <= _SHORT_ANSWER and any(map(text.lower().__contains__, _IN_ASKS))


def _says_try_again(text: str) -> bool:
    """Return whether a short text asks for another attempt and reports neither a result nor a verdict."""
    return (
        _may_ask(text)
        and _ASKS.search(text) is not None
        and _PENDING.search(text) is None
        and _VERDICT.search(text) is None
        and not says_missing(text)
    )


# ---- Texts that report a failure, as one table with examples.
#
# ``core/outcomes`` asks ``reports_failure`` about texts, and ``bare`` for what a text holds beside reminders. To make
# RunGuard know one more wording, add a row to ``SAYINGS`` with an example; ``tests/core/test_failure_texts.py`` checks
# each row. A wording of one tool alone belongs into its ``ToolRule(failed=...)``.

HEAD: Final = 400  # characters: what a text says about its own success, it says at the start
TAIL: Final = 120  # characters: what a traceback says happened, it says at its end
LAST: Final = 400  # characters in which the last line is looked for
_LISTED: Final = 12  # lines that may show that a text is a list of errors


class Saying(NamedTuple):
    """One way to report a failure.

    ``begins``: every text that the pattern of a beginning matches starts with one of these, in small letters and
    without leading marks. Looking for them first spares most answers the search.
    """

    pattern: str
    examples: tuple[str, ...]
    begins: tuple[str, ...] = ()


# ---- How a text begins that reports a failure.

SAYINGS: Final = (
    Saying(
        r"(?:error|exception|traceback|fatal|failed|failure|invalid|unknown tool|unauthori[sz]ed|forbidden"
        r"|permission denied|access denied|no such file|command not found|syntax ?error|timed? ?out|could not|cannot"
        r"|unable to|[a-z]{1,60}(?:error|exception))(?![a-z]|-[a-z])",
        ("Error: disk full", "ValueError: invalid literal", "Permission denied", "Unable to reach the server"),
        (
            *("traceback", "fatal", "fail", "invalid", "unknown tool", "unauthori", "forbidden", "permission denied"),
            *("access denied", "no such file", "command not found", "syntax", "time", "could not", "cannot"),
            "unable to",
        ),
    ),
    Saying(
        r"(?:the )?(?:tool|function|api|code) (?:execution|call|parsing) failed(?![a-z])"
        r"|(?:the |your )?(?:edit|patch|upload|download|authentication|authori[sz]ation|navigation|search|fetch|parsing"
        r"|extraction|conversion) (?:has |was )?(?:failed|rejected|refused)"
        r"(?=\W*$|[.:;!]|\s(?:after|with|due|because)\b)"
        r"|(?:tool|parsing|format|runtime|server|api|database|network|connection|internal|request|unexpected) error:"
        r"|(?:the )?(?:tool|function|server|api|service) (?:has )?(?:returned|reported|responded with) an "
        r"(?:error|exception)(?=\W*$|[.:])",
        (
            "Tool execution failed: x",
            "The tool execution failed with the following error:",
            "Code parsing failed",
            "Upload failed: disk full",
            "Your edit was rejected.",
            "Parsing error: no action",
            "The server returned an error: 500",
        ),
        (
            *("the ", "your ", "tool ", "function ", "api ", "code ", "service ", "server ", "edit", "patch", "upload"),
            *("download", "auth", "navigation", "search", "fetch", "parsing", "extraction", "conversion"),
        ),
    ),
    Saying(  # what frameworks make of an exception of a tool, or of arguments that they cannot read
        r"an (?:error|exception) occurr?ed (?:\(\w{1,80}\) )?(?:while|during|when|in) (?:the )?(?:tool|function|code"
        r"|running|executing|execution|calling|invoking|parsing|processing your)\b"
        r"|(?:there was )?an (?:error|exception): |encountered (?:an )?error: "
        r"|i encountered an error while trying to use the tool"
        r"|(?:execution|runtime) error in |\d{1,3} validation errors?(?: for [\w.]{1,80})?\s{0,4}(?::|\n)"
        r"|(?:tool|function) \S{1,80} (?:raised|returned|failed with) an (?:error|exception)"
        r"|action '[^'\n]{1,80}' (?:don't|doesn't|does not) exist|[^\n:]{1,80} is not a valid (?:tool|function),"
        r"|tool_use_error>|mcp error -?\d"
        r"|exit ?code: \d{1,3} \(execution failed\)",
        (
            "An error occurred while running the tool. Please try again. Error: division by zero",
            "An error occurred (AccessDenied) when calling the ListBuckets operation: Access Denied",
            "I encountered an error while trying to use the tool. This was the error: x",
            "There was an error: x",
            "Encountered error: x",
            "exitcode: 1 (execution failed)\nCode output: x",
            "Execution error in tool: x",
            "2 validation errors for Order\nid\n  Field required",
            "Tool 'search' raised an exception: x",
            "Action 'find' don't exist, these are the only available Actions: search",
            "find is not a valid tool, try one of [search].",
            "<tool_use_error>String to replace not found in file.</tool_use_error>",
            "MCP error -32602: Invalid arguments for tool search",
        ),
        ("action '", "exitcode", "exit code"),
    ),
    Saying(
        r"(?:the |your )?(?:request|operation|query|connection|command|call|execution) (?:has )?"
        r"(?:timed out|(?:was )?refused|was reset|was aborted|failed)(?=\W*$|[.:;!]|\s(?:after|with|due|because)\b)",
        ("Your request has timed out.", "Connection refused: port 80"),
        ("the ", "your ", "request", "operation", "query", "connection", "command", "call ", "execution"),
    ),
    Saying(
        r"(?:connection refused|rate limit(?:ed| exceeded| reached)|too many requests|internal server error"
        r"|bad gateway|service unavailable|gateway time-?out|something went wrong)(?=\W*$|[.:;!(])"
        r"|rate limit reached for |(?:4(?!04)|5)\d\d (?:client|server) error: |https?connectionpool\("
        r"|(?:[\w.]{1,40}: )?net::err_[a-z_]{1,60}|(?:connect |getaddrinfo |read |write )?"
        r"e(?:timedout|connrefused|connreset|notfound|ai_again|pipe|hostunreach|acces|perm)\b",
        (
            "Rate limit exceeded.",
            "Bad gateway",
            "500 Server Error: Internal Server Error for url: https://a.example",
            "HTTPSConnectionPool(host='a.example', port=443): Max retries exceeded with url: /b",
            "page.goto: net::ERR_CONNECTION_REFUSED at https://a.example",
            "connect ECONNREFUSED 127.0.0.1:5432",
        ),
        (
            "connection",
            "rate limit",
            "too many",
            "internal s",
            "bad gateway",
            "service un",
            "gateway",
            "something went",
            *("httpsc", "httpc", "net::", "page.", "connect ", "getaddrinfo ", "read e", "write e"),
            *("etimedout", "econn", "enotfound", "eai_", "epipe", "ehostunreach", "eacces", "eperm"),
        ),
    ),
    Saying(  # runtimes, databases and command-line tools
        r"uncaught (?:\w{0,40}error|exception)|thread '[^'\n]{1,80}' panicked at "
        r"|(?:[a-z_]\w{0,40}\.){1,8}\w{0,60}(?:error|exception)(?=\W*$|[:)\n])"
        r"|errno -?\d{1,5}\]|ora-\d{5}:|sql error:|e: unable to "
        r"|(?:curl: \(\d|wget: unable to|ssh: (?:connect to host|could not resolve)|psql: error|docker: error)"
        r"|[^\n]{1,80} is not recognized as (?:an internal|the name of)"
        r"|(?:locator|page|frame|browser\w{0,20})\.\w{1,40}: (?:timeout \d|target )"
        r"|message: (?:no such element|stale element|element )",
        (
            "Uncaught ReferenceError: x is not defined",
            "thread 'main' panicked at src/main.rs:2:5:",
            "java.lang.NullPointerException: x\n\tat Main.main(Main.java:5)",
            '(psycopg2.errors.UndefinedTableError) relation "x" does not exist',
            "[Errno 13] Permission denied: 'x'",
            "ORA-00942: table or view does not exist",
            "E: Unable to locate package x",
            "curl: (6) Could not resolve host: a.example",
            "'x' is not recognized as an internal or external command,\noperable program or batch file.",
            "locator.click: Timeout 30000ms exceeded.",
            "Message: stale element reference: the page has changed",
        ),
        (
            *("uncaught", "thread '", "errno", "ora-", "sql error", "e: unable", "curl: (", "wget: unable", "ssh: co"),
            *("psql: err", "docker: err", "locator.", "page.", "frame.", "browser", "message: "),
        ),
    ),
    Saying(  # the tools of coding agents
        r"apply_patch verification failed|(?:\d{1,3} |the )?search(?:/replace)? blocks? failed to match"
        r"|file has (?:not been read yet|been (?:modified|changed|unexpectedly modified) since)"
        r"|(?:unrecogni[sz]ed|unsupported|unknown) (?:command|option|operation|argument|parameter|action|method)"
        r"|(?:argument|parameter) \S{1,60} is (?:required|missing)"
        r"|missing (?:\d{1,3} )?required (?:\w{1,20} )?(?:argument|parameter|field|propert|option|input)"
        r"|you do(?: not|n't) have (?:the )?permission to (?:perform|access|use|view|do|execute|call)\b",
        (
            "apply_patch verification failed: Failed to find expected lines in a.py",
            "❌ 1 SEARCH/REPLACE block failed to match!",
            "File has not been read yet. Read it first before writing to it.",
            "Unrecognized command 'x'",
            "Unknown parameter: x",
            "Argument 'x' is required",
            "Missing required argument: x",
        ),
        (
            *(
                "apply_patch",
                "search",
                "the ",
                *(f"{n} search" for n in range(1, 10)),
                "file has",
                "unrecogni",
                "unsupported",
            ),
            *("missing ", "you do", "unknown ", "argument", "parameter"),
        ),
    ),
    Saying(
        r"http(?:/[\d.]+)? (?:error )?(?:4(?!04)|5)\d\d(?=\W+\w)",
        ("HTTP 503 Service Unavailable",),
        ("http",),
    ),
    Saying(
        r"(?:fehler|erreur|errore|erro|ошибка)(?![a-z])|错误|錯誤|エラー|오류",
        ("Fehler: keine Verbindung", "エラー: 接続できません"),
        ("fehler", "erreur", "erro", "ошибка", "错误", "錯誤", "エラー", "오류"),
    ),
    Saying(
        r"usage:(?!\s?[~<>]?\d)(?:[^\n]{0,200}[-\[<]|\s?\S{1,40} (?-i:[A-Z]{2}))"
        r"|(?:/[\w./-]{1,60}/)?(?:bash|sh|zsh|dash)(?:: -c)?(?:: line \d+)?: ",
        ("usage: grep [-abc]", "/bin/bash: line 1: x: command not found"),
        ("usage:", "bash", "sh:", "zsh", "dash:", "/"),
    ),
    Saying(
        r"file \"[^\"\n]{1,200}\", line \d{1,7}\b[\s\S]{0,300}?\b[A-Z]\w{0,40}(?:Error|Exception)\b",
        ('  File "main.py", line 326\n    x = 1\nIndentationError: unexpected indent',),
        ('file "',),
    ),
    Saying(
        r"(?:the |your )?(?:proposed |last )?(?:edit|change|patch|replacement)s?(?: (?:that )?you (?:proposed|made))? "
        r"(?:(?:has |have |would |will )?introduc(?:ed?|es) (?:an? |the )?(?:new )?(?:syntax|lint|indent|errors?\b)"
        r"|(?:(?:was|were|could) not (?:be )?(?:applied|performed|made|saved)|did not apply|failed to apply)\b)",
        (
            "Your proposed edit has introduced new syntax error(s).",
            "The edit you proposed would introduce a syntax error",
            "The patch could not be applied to a.py",
        ),
        ("the ", "your ", "proposed", "last ", "edit", "change", "patch", "replacement"),
    ),
    Saying(
        r"no (?:replacement|edit)s? (?:was|were) (?:performed|made|applied)\b"
        r"|no match(?:es)? (?:found )?for (?:the )?(?:search block|old_?str)"
        r"|(?:the )?(?:string to replace|(?:search|replacement) text|old_?str(?:ing)?)\b.{0,300}?\b"
        r"(?:not found|is not unique|did not (?:appear|match))",
        (
            "No replacement was performed, old_str `x` did not appear verbatim in a.py.",
            "String to replace not found in file.",
            "No match found for old_string in a.py",
        ),
        (
            "no replacement",
            "no edit",
            "no match",
            "replacement",
            "the ",
            "string to",
            "search text",
            "old_str",
            "oldstr",
        ),
    ),
    Saying(
        r"(?:your|thoughts?|action|response|output|message|tool call|function call|arguments?|input)\b[^.\n]{0,80}?\b"
        r"(?:not (?:provided |given |written )?in (?:the |an? )?(?:correct|valid|right|expected|required) format"
        r"|(?:could not|cannot|can't) be parsed|(?:is|was) not (?:a )?valid (?:json|action|command|tool call))",
        ("Thought or action not provided in the correct format.", "Your response could not be parsed as JSON."),
        ("your ", "thought", "action", "response", "output", "message", "tool ", "function ", "argument", "input"),
    ),
    Saying(
        r"(?:please )?(?:always )?provide exactly one (?:\w{1,20} )?(?:action|tool call|code block|command)"
        r"|exactly one (?:\w{1,20} )?(?:action|tool call) must"
        r"|no (?:valid )?(?:action|tool call|function call|code block)s? (?:was |were )?(?:found|provided|detected)"
        r"|your (?:response|reply|output|message) (?:did|does) not (?:contain|include) (?:an? |any |the )?(?:valid )?"
        r"(?:action|tool call|function call|json|code block)",
        (
            "Please always provide EXACTLY ONE action in triple backticks, found 0 actions.",
            "Exactly one action must be given.",
            "No tool call found in your response.",
            "Your response did not contain a valid action.",
        ),
        ("please ", "provide exactly", "exactly one", "no action", "no valid", "no tool", "no function", "no code"),
    ),
    Saying(
        r"(?:you are )?not (?:authenticated|authori[sz]ed)(?=\W*$|[.:;!]| to )|authentication (?:is )?required"
        r"|your (?:session|token) (?:has |is )?expired|access to (?:this|the) \w{1,20} (?:is|was) denied",
        (
            "Not authenticated",
            "You are not authorized to perform this action.",
            "Authentication required",
            "Your session has expired. Please log in again.",
            "Access to this resource is denied.",
        ),
        ("you are not", "not auth", "auth", "your ", "access to"),
    ),
    Saying(
        r"npm err!|panic: |segmentation fault|killed(?=\W*$)|out of memory"
        r"|(?:compilation|build|execution|installation) (?:failed|timed out)"
        r"(?=\W*$|[.:;!]|\s(?:after|with|due|because)\b)",
        ("npm ERR! code ERESOLVE", "Segmentation fault (core dumped)", "Build failed: 3 errors"),
        (
            "npm err",
            "panic",
            "segmentation",
            "killed",
            "out of memory",
            "compilation",
            "build",
            "execution",
            "installation",
        ),
    ),
)
# ---- How the last line reads of a text that reports a failure: a log, or what a script has printed.

LAST_LINES: Final = (
    Saying(
        r"(?:[\w.]{1,80}\.)?[A-Z]\w{0,60}(?:Error|Exception|Interrupt)(?::\s.{0,400})?",
        ("UnboundLocalError: local variable 'x' referenced before assignment", "requests.exceptions.HTTPError: 500"),
    ),
    Saying(
        r"(?i:(?:fatal(?: error)?|error|panic|npm err!)(?::\s|\s(?=[^:]{1,80}:\s)).{1,400}|npm err! .{1,400})",
        ("Error: 'name' is a required property", "fatal: no upstream branch", "error TS2304: Cannot find name 'x'."),
    ),
    Saying(
        r"g?make(?:\[\d+\])?: \*\*\* .{1,300}",
        ("make: *** [Makefile:12: all] Error 2",),
    ),
    Saying(
        r"(?i:\W?(?:the )?(?:command|process|script|execution|program|job) (?:has )?(?:timed out|was killed|crashed"
        r"|(?:exited|failed|finished|terminated) with (?:non-zero )?(?:exit )?(?:code|status)\W{1,3}(?!0\b|1\b)-?\d+)\b"
        r".{0,120})",
        ("Command timed out after 30 s", "Process exited with code 139"),
    ),
    Saying(
        r"Node\.js v\d[\d.]{1,20}|exit status (?![01]\b)\d{1,3}",
        ("Node.js v20.1.0", "exit status 2"),
    ),
    Saying(
        r"(?:Segmentation fault|Killed|Aborted|Bus error)(?: \(core dumped\))?",
        ("Segmentation fault (core dumped)", "Killed"),
    ),
)


# ---- Answers that only begin like an error: figures, names of files and settings, the head of a table, a verdict.

_NUMBER: Final = r"[-+~<>]?\s?\d[\d,]{0,20}"
_END: Final = r"\s?(?=$|[\n;|()]|,(?!\s?\d)|(?:after|of|per|on|at|in|since) )"
LOOK_ALIKES: Final = (
    Saying(
        r"(?!invalid)(?:[a-z]{1,20}[ _-]){1,3}(?:rate|count|budget|ratio|share|percentage|total)s?"
        rf"(?: (?:remaining|left|used|is|was))?\s?[:=]?\s?{_NUMBER}",
        ("Error rate: 2 %", "error_count=0", "Error budget remaining: 93 %", "Failure rate < 1 %"),
    ),
    Saying(
        r"(?:(?:failed|failing|fatal|forbidden) (?:[a-z]{1,20} )?(?!arguments|parameters|inputs|options|flags)"
        r"[a-z]{1,20}(?<![su])s|invalid (?:records|rows|entries|lines|items|votes|files|documents|messages|events))"
        rf"\s?[:=]\s?{_NUMBER}\s?%?{_END}",
        ("Invalid records: 3", "Invalid votes: 3 %", "Failed logins: 12 since Monday", "Fatal accidents: 3,400"),
    ),
    Saying(
        r"(?!invalid)[a-z]{1,20}(?: [a-z]{1,20})?(?:\s?[:=]\s?|\s)"
        rf"(?:[-+~<>]{{0,2}}\d{{0,20}}\.\d{{1,20}}(?:e[-+]?\d{{1,3}})?\s?%?|{_NUMBER}\s?%|0)(?![\w.:]){_END}",
        ("error: 0.0231", "Error = 1.5e-3 after 30 epochs", "Failed: 0", "Failure: 12 % of all", "error 0.2 (best)"),
    ),
    Saying(
        rf"(?:failed|errors?|invalid)\s?[:=]?\s?{_NUMBER}\s?[,;|/]\s?(?:passed|ok|valid|succeeded|successful|skipped|total)",
        ("Failed: 2, passed: 10", "Invalid: 3; valid: 90"),
    ),
    Saying(
        r"time-?_?out(?:_\w{1,20})?\s?(?:=\s?\d|:\s?\d{1,9}\s?m?s?\n[\w-]{1,40}\s?:\s)|error_(?:log|page)\s",
        ("timeout = 30", "timeout: 30\nretries: 3", "timeout_ms = 30", "error_log /var/log/a.log;"),
    ),
    Saying(
        r"(?:error|exception|fatal|failed|failure|timeout)s?[\w-]{0,60}\.[a-z]{1,5}(?=\s|$)"
        r"|[a-z_]{1,30}(?:\s?[,;|\t]\s?[a-z_]{1,30}){1,20}\s{0,4}\n|invalid\W*$",
        ("error.tsx\nlayout.tsx", "failed_jobs.csv", "error,count\n404,3", "Invalid"),
    ),
)


_LOOK_ALIKE: Final = re.compile(rf"^\W{{0,4}}(?:{'|'.join(saying.pattern for saying in LOOK_ALIKES)})", re.IGNORECASE)
_BAD_TEXT: Final = re.compile(rf"^\W{{0,4}}(?:{'|'.join(saying.pattern for saying in SAYINGS)})", re.IGNORECASE)
_BAD_STARTS: Final = tuple(dict.fromkeys(word for saying in SAYINGS for word in saying.begins))
_LAST_LINE: Final = re.compile("|".join(f"(?:{saying.pattern})" for saying in LAST_LINES))
MAY_END_BADLY: Final = re.compile(rf"\s{{0,40}}(?:{_LAST_LINE.pattern}|</|```)")
_SAYS_ERROR: Final = re.compile(
    r"\W{0,4}(?:[a-z]{0,60}(?:error|exception)\s?:|error (?:executing|calling|running|in tool))", re.IGNORECASE
)
_ERROR_PAGE: Final = re.compile(r"<(?:title|h1)>\s*(?:http )?(?:error )?(?:4(?!04)\d\d|5\d\d)\b", re.IGNORECASE)
_LEADING: Final = " \t\r\n\"'`*#[({<-:>|!~.❌✗✘✖⚠️🚫"
_TRACE: Final = ("Traceback (most recent call last)", '  File "')
_ENDS: Final = ("Node.js v", "exit status ")  # written after all errors
_CLOSING: Final = re.compile(r"</?[\w-]{1,30}>|`{3,}|\W*")  # a line that says nothing


def reports_failure(text: str) -> bool:
    """Return whether a text starts like an error. A word inside a page of search results is not a failure."""
    head = text[:HEAD]
    if _TRACE[0] in head:
        return True
    # most texts that are fine are told by their first words; the regular expression decides about the others
    start = head[:80].lower().lstrip(_LEADING)
    may_be_bad = start.startswith(_BAD_STARTS) or "error" in start or "exception" in start or " is not " in start
    if may_be_bad and _BAD_TEXT.match(head) and not _LOOK_ALIKE.match(head):
        return True
    if "<" in head[:80] and _ERROR_PAGE.search(head):
        return True
    if len(text) <= HEAD and _SERVER_ERROR.match(head) is not None:
        return True
    return ": " in head[:80] and _is_complaint(text)


def says_error(text: str) -> bool:
    """Return whether a text begins with "ValueError:" or the like."""
    return _SAYS_ERROR.match(text) is not None


def ends_in_failure(text: str) -> bool:
    """Return whether the last line of a text is an error, and the text is no list of errors that was asked for.

    ``MAY_END_BADLY`` matches the last line of all such texts. Asking it first spares most answers a call.
    """
    last = last_line(text)
    if _LAST_LINE.fullmatch(last) is None or _LOOK_ALIKE.match(last) is not None:
        return False
    lines = text[-8 * LAST :].splitlines()[-_LISTED:]
    is_listed = sum(_LAST_LINE.fullmatch(line.strip()) is not None for line in lines) > 1
    return not is_listed or any(mark in text for mark in _TRACE) or last.startswith(_ENDS) or "***" in last


def last_line(text: str) -> str:
    """Return the last line that says something; an empty text when there is none."""
    for line in reversed(text[-LAST:].splitlines()):
        if line and _CLOSING.fullmatch(line) is None:
            return line.strip()
    return ""


def is_list_of_errors(text: str) -> bool:
    """Return whether a text that starts like an error consists of several such lines."""
    lines = [line for line in text[: 8 * HEAD].splitlines()[:_LISTED] if line.strip()]
    return len(lines) > _FEW and all(says_error(line) for line in lines)


_FEW: Final = 2
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


# one of these is in each complaint: asking for them first spares most long answers the expression
_COMPLAINER: Final = re.compile(
    r"[\w./+$~-]{1,60}: |try '", re.IGNORECASE
)  # how a complaint begins, unless it says "-c"
_COMPLAINING: Final = (
    *("directory", "denied", "not found", "not permitted", "missing", "error", "failed to", "cannot", "option"),
    *("argument", "operand", "recogni", "for more information", " line "),
)


def _is_complaint(text: str) -> bool:
    """Return whether every line is a command's complaint: a line of output beside it would be a result.

    A text that is longer than ``_MOST_CHARS`` must consist of one complaint, again and again.
    """
    if len(text) > HEAD:
        first = text[:HEAD].lstrip().partition("\n")[0]
        said = first.lower()
        if _COMPLAINER.match(first) is None and ": -c: line " not in said:
            return False
        if not any(map(said.__contains__, _COMPLAINING)) or _COMPLAINT.match(first) is None:
            return False
        text = text.strip()
    if len(text) > _MOST_CHARS:
        return text.endswith(first) and text.count(f"{first}\n") == text.count("\n")
    return all(_COMPLAINT.match(line) is not None for line in text.splitlines() if line.strip())


# what a search of a whole tree says of each place that it may not read; what it has found stands beside it
_UNREADABLE: Final = re.compile(r"(?:find|[efz]?grep|rg|ag|fd|du|tree|ls): [^\n]{0,300}: Permission denied\s*$")


def unreadable_places(text: str) -> int:
    """Return how many places a search may not read; 0 where it says anything else."""
    if "Permission denied" not in text or len(text) > _MOST_CHARS:
        return 0
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) if all(_UNREADABLE.match(line) is not None for line in lines) else 0


# ---- Texts that contain JSON, as some servers send it, with or without a note, a code fence or a reminder around it.

_MOST_CHARS: Final = 4_096  # a longer text is data, unless it starts like a report of a failure
_MOST_OF_A_FAILURE: Final = 16_384
_NOTE_BEFORE, _NOTE_AFTER = 240, 400  # characters around JSON that are looked through
_TELLING_JSON: Final = re.compile(
    r'"(?=[cdefhimors])'  # how each name begins: most others are left at once
    r"(?:is_?error|errors?|error_?(?:message|code)|exception|ok|success|succeeded|successful|state|outcome|result_status"
    r"|(?:http_)?status(?:_?code)?|response_type|exit_?code|return_?code|result|results|output|response|data|items|content"
    r'|matches|documents|rows|hits|records|entries|files|organic_results|search_results)"\s{0,4}:',
    re.IGNORECASE,
)
_FAILING: Final = re.compile(
    r'"(?:is_?error"\s{0,4}:\s{0,4}true|error(?:_?message|_?code)?"\s{0,4}:\s{0,4}(?!null|false|""|\[\]|\{\}|0)'
    r'|(?:ok|success|succeeded|successful)"\s{0,4}:\s{0,4}false|status"\s{0,4}:\s{0,4}"(?:error|fail))',
    re.IGNORECASE,
)
_REMINDER: Final = re.compile(
    r"\s{0,40}<((?:system[_-])?(?:reminder|note|warning))>[\s\S]{0,4000}?</\1>\s{0,40}", re.IGNORECASE
)
_decoder: Final = json.JSONDecoder()


def bare(text: str) -> str:
    """Return a text without a reminder that a harness has put before or after it."""
    if text[:44].lstrip()[:1] == "<" and (found := _REMINDER.match(text)) is not None:
        text = text[found.end() :]
    if text[-44:].rstrip().endswith(_REMINDER_ENDS):
        begins = [tag.start() for tag in _REMINDER_BEGINS.finditer(text, max(len(text) - _MOST_OF_A_REMINDER, 0))]
        if begins and (found := _REMINDER.match(text, begins[-1])) is not None and found.end() == len(text):
            text = text[: begins[-1]].rstrip()
    return text


_MOST_OF_A_REMINDER: Final = 4_200  # characters, with its tags
_REMINDER_BEGINS: Final = re.compile(r"<(?:system[_-])?(?:reminder|note|warning)>")
_REMINDER_ENDS: Final = ("reminder>", "note>", "warning>")


def embedded_json(text: str) -> Any:
    """Return the dict or list that a text consists of, or None. Only what may tell an outcome is parsed."""
    if len(text) > _MOST_OF_A_FAILURE:
        return None
    start, end = text[:40].lstrip()[:1], text[-40:].rstrip()[-1:]
    if (start, end) not in (("{", "}"), ("[", "]")):
        return None
    if len(text) > _MOST_CHARS:
        if _FAILING.search(text, 0, HEAD) is None:
            return None
    elif len(text) > 8 and _TELLING_JSON.search(text) is None:  # "[]" and "{}" tell an outcome, too
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def failing_json(text: str) -> Any:
    """Return the dict inside a text with a note or a code fence around it; None unless it may be a failure."""
    at = text.find("{", 0, _NOTE_BEFORE)
    if at < 0 or len(text) > _MOST_OF_A_FAILURE or _FAILING.search(text, at, at + HEAD) is None:
        return None
    try:
        value, end = _decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    return value if len(text) - end <= _NOTE_AFTER else None
