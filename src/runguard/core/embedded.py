"""What a plain text contains: JSON that a server sent as a string, or the exit code of a command."""

import json
import re
from typing import Any, Final

_MOST_CHARS: Final = 4_096  # a longer text is data, unless it starts like a report of a failure
_MOST_OF_A_FAILURE: Final = 16_384
_HEAD: Final = 400
_TELLING: Final = re.compile(
    r'"(?:is_?error|errors?|error_?(?:message|code)|exception|ok|success|succeeded|successful|state|outcome|result_status'
    r"|(?:http_)?status(?:_?code)?|response_type|exit_?code|return_?code|result|results|output|response|data|items|content"
    r'|matches|documents|rows)"\s{0,4}:',
    re.IGNORECASE,
)
_FAILING: Final = re.compile(
    r'"(?:is_?error"\s{0,4}:\s{0,4}true|error(?:_?message|_?code)?"\s{0,4}:\s{0,4}(?!null|false|""|\[\]|\{\}|0)'
    r'|(?:ok|success|succeeded|successful)"\s{0,4}:\s{0,4}false|status"\s{0,4}:\s{0,4}"(?:error|fail))',
    re.IGNORECASE,
)
_EXIT: Final = re.compile(
    r"\W{0,4}(?:<returncode>|(?:(?:the )?(?:command|process) )?(?:(?:exited|failed|finished|terminated) with )?"
    r"(?:non-zero )?(?:exit|return)[ _-]?(?:code|status)\W{0,3})(-?\d{1,6})\b",
    re.IGNORECASE,
)
_TAGS: Final = re.compile(r"</?\w{1,20}>|\b(?:std)?(?:out(?:put)?|err)\s*:|\(?no output\)?|\W", re.IGNORECASE)


def embedded_json(text: str) -> Any:
    """The dict or list that a text consists of, or None. Only what may tell an outcome is parsed."""
    if len(text) > _MOST_OF_A_FAILURE:
        return None
    start, end = text[:40].lstrip()[:1], text[-40:].rstrip()[-1:]
    if (start, end) not in (("{", "}"), ("[", "]")):
        return None
    if len(text) > _MOST_CHARS:
        if _FAILING.search(text, 0, _HEAD) is None:
            return None
    elif len(text) > 8 and _TELLING.search(text) is None:  # "[]" and "{}" tell an outcome, too
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def exit_code(text: str) -> int | None:
    """The exit code that a text begins with, unless it is 0."""
    found = _EXIT.match(text)
    return (int(found[1]) or None) if found is not None else None


def has_output(text: str) -> bool:
    """Whether anything is left of a text that begins with an exit code."""
    found = _EXIT.match(text)
    return found is None or bool(_TAGS.sub("", text[found.end() :]))
