"""Whether an answer says that the work is not done yet: "pending", "incomplete", "retry later".

By default RunGuard treats such answers as polling. Only an explicit ``max_identical_tool_results`` counts them, and
only when they are equal.
"""

import re
from typing import Any, Final

_HEAD: Final = 400
_STATUS_KEYS: Final = ("status", "state", "outcome", "result_status", "code", "result")
_MESSAGE_KEYS: Final = ("message", "detail", "reason", "text", "hint", "result", "note")
_KEYS: Final = frozenset({*_STATUS_KEYS, *_MESSAGE_KEYS})
_STATUS: Final = re.compile(
    r"\W*(?:still[\s_\-])?(?:pending|incomplete|partial(?:ly)?(?:[\s_\-]\w+){0,2}|degraded|unfinished|busy|waiting|queued|running|processing"
    r"|in[\s_\-]?progress|not[\s_\-]?(?:ready|finished|complete|completed|available[\s_\-]?yet)|(?:please[\s_\-])?(?:re)?try(?:[\s_\-]?(?:later|again|required|needed|soon)){0,2})\W*",
    re.IGNORECASE,
)
_MESSAGE: Final = re.compile(
    r"\b(?:re)?try(?:ing)? (?:it |this )?(?:again|later|in \d)|\bcome back (?:later|in)\b"
    r"|\bnot (?:yet )?(?:ready|finished|complete)\b"
    r"|\bstill (?:pending|processing|running|working|loading)\b|\b(?:partial|incomplete) (?:result|data|parse"
    r"|answer|response)",
    re.IGNORECASE,
)


# One of these is in every text that _MESSAGE matches. Looking for them first spares most answers the search.
_IN_MESSAGE: Final = (
    *("try again", "try later", "try in ", "try it ", "try this ", "trying ", "come back ", "still "),
    *("not yet ", "not ready", "not finished", "not complete", "partial ", "incomplete "),
)


def is_unfinished(answer: Any) -> bool:
    """Only plain values are looked at: others may run their own code."""
    if type(answer) is str:
        return _STATUS.fullmatch(answer[:_HEAD]) is not None or _asks_to_wait(answer)
    if type(answer) is not dict:
        return False
    for key in _KEYS if len(answer) > len(_KEYS) else answer:
        value = answer.get(key) if type(key) is str and key in _KEYS else None
        if type(value) is str and (
            (key in _STATUS_KEYS and len(value) <= _HEAD and _STATUS.fullmatch(value))
            or (key in _MESSAGE_KEYS and _asks_to_wait(value))
        ):
            return True
    return False


def _asks_to_wait(text: str) -> bool:
    head = text[:_HEAD]
    return any(map(head.lower().__contains__, _IN_MESSAGE)) and _MESSAGE.search(head) is not None
