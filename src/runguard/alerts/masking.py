"""What must not leave: keys, tokens, passwords and the paths of URLs are masked in every text of an alert.

The time is linear in the length looked at, and that length is bounded: each pattern begins with fixed letters and goes
on with one class of characters, so there is nothing to try again.
"""

import re
from typing import Final

HIDDEN: Final = "***"
MAX_CHARS: Final = 1_000
_BEYOND: Final = 512  # looked at beyond the cut, so that a key that crosses it is seen whole and masked
_WORD: Final = 64
_SECRET_NAME: Final = (
    r"(?:(?:api|access|private|routing)[_-]?key|token|secret|passwd|password|authorization|credential|cookie)"
)

_GAPS: Final = re.compile(r"[\x00-\x20\x7f-\x9f\u2028\u2029]+")
# Zero width and direction: they could hide a key, or turn a name round.
_INVISIBLE: Final = re.compile(r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]+")
_URL: Final = re.compile(
    r"(?i)([a-z][a-z0-9+.-]{1,20}://)(?:[^\s/@]{0,256}@)?([^\s/?#@\"'<>]{0,255})([/?#][^\s\"'<>]*)?"
)
_AUTHORISED: Final = re.compile(r"(?i)\b(?:(bearer)[ :]{1,3}[\w.~+/=-]{8,}|(basic)[ :]{1,3}[\w+/=-]{16,})")
_NAMED: Final = re.compile(rf"(?i)({_SECRET_NAME})([\"']?\s{{0,2}}[=:]\s{{0,2}}[\"']?)[^\s\"',;&]{{3,}}")
_PROVIDER: Final = re.compile(
    r"\b(?:"
    r"sk[-_][\w-]{12,}"
    r"|[pr]k_(?:live|test)_\w{8,}"
    r"|AIza[\w-]{16,}"
    r"|ya29\.[\w.-]{8,}"
    r"|GOCSPX-[\w-]{8,}"
    r"|(?:xox[a-z]|xapp)-[\w-]{6,}"
    r"|gh[a-z]_\w{16,}"
    r"|github_pat_\w{16,}"
    r"|glpat-[\w-]{12,}"
    r"|hf_\w{16,}"
    r"|gsk_\w{16,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}"
    r"|eyJ[\w-]{6,}[\w.-]*"
    r")"
)
_PEM: Final = re.compile(r"-----BEGIN [A-Z ]{0,40}KEY-----[^-]*(?:-----END [A-Z ]{0,40}KEY-----)?")
_IS_SECRET_NAME: Final = re.compile(rf"(?i){_SECRET_NAME}$")


def mask(text: str, limit: int = MAX_CHARS) -> str:
    """One line of at most ``limit`` characters in which secrets read ``***``; of a URL only scheme and host stay."""
    return mask_also(text, (), limit)


def mask_also(text: str, secrets: tuple[str, ...], limit: int = MAX_CHARS) -> str:
    """``mask``, and the given secrets, whatever they look like."""
    seen = text[: limit + _BEYOND]
    is_whole = len(seen) == len(text)
    line = _one_line(seen if is_whole else _without_last_word(seen))
    for secret in secrets:
        line = line.replace(secret, HIDDEN)
    line = _masked(line)
    return line if is_whole and len(line) <= limit else f"{line[: limit - 1]}…"


def names_a_secret(name: str) -> bool:
    """Whether a fact of this name is better not told: ``api_key``, ``db_password``; ``tokens`` is a count."""
    return _IS_SECRET_NAME.search(name[-64:]) is not None


def _one_line(text: str) -> str:
    """Neither a line break for the log nor a control character for a terminal."""
    return _INVISIBLE.sub("", _GAPS.sub(" ", text)).strip()


def _masked(text: str) -> str:
    text = _PEM.sub(HIDDEN, text)
    text = _URL.sub(_bare_url, text)
    text = _AUTHORISED.sub(_keep_scheme, text)
    text = _PROVIDER.sub(HIDDEN, text)
    return _NAMED.sub(_keep_name, text)


def _bare_url(found: re.Match[str]) -> str:
    scheme, host, rest = found.groups()
    return f"{scheme}{host}{'/' + HIDDEN if rest and rest != '/' else ''}"


def _keep_scheme(found: re.Match[str]) -> str:
    return f"{found[1] or found[2]} {HIDDEN}"


def _keep_name(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}{HIDDEN}"


def _without_last_word(text: str) -> str:
    """The last word may be the first half of a key, too short to look like one."""
    head, gap, _ = text[-_WORD:].rpartition(" ")
    return text[:-_WORD] + head if gap else text
