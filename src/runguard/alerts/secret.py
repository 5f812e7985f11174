"""Secrets: a string that only ``reveal()`` shows, and texts in which secrets are masked."""

import os
import re
from typing import Any, Final, Self

from runguard.core.errors import PolicyError

_FROM_ENVIRONMENT: Final = "env:"
HIDDEN: Final = "***"
MAX_CHARS: Final = 1_000
_BEYOND: Final = 512  # read beyond the limit, so that a key across it is recognized and masked
_WORD: Final = 64
_SECRET_NAME: Final = (
    r"(?:(?:api|access|private|routing)[_-]?key|token|secret|passwd|password|authorization|credential|cookie)"
)
_GAPS: Final = re.compile(r"[\x00-\x20\x7f-\x9f\u2028\u2029]+")
# Zero-width and direction characters could hide a key or reverse a name.
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


class Secret:
    """Only ``reveal()`` returns the text. A secret from the environment is pickled as the name of its variable.

    Other secrets cannot be pickled, unless they are ``public``.
    """

    __slots__ = ("_public", "_text", "_variable")

    def __init__(self, text: str, variable: str = "", public: bool = False) -> None:
        self._text = text
        self._variable = variable
        self._public = public

    @classmethod
    def of(cls, value: object, where: str) -> Self:
        """Create a secret from a setting: the text itself, or ``env:NAME``.

        PolicyError names the setting and the variable, never the text.
        """
        if not isinstance(value, str):
            raise PolicyError(f"{where}: must be a text, not a {type(value).__name__}")
        if not value.startswith(_FROM_ENVIRONMENT):
            if not value:
                raise PolicyError(f"{where}: is empty; remove it, or write env:NAME to read a variable")
            return cls(value)
        variable = value.removeprefix(_FROM_ENVIRONMENT).strip()
        if not variable.replace("_", "").isalnum() or not variable.isascii():
            raise PolicyError(f"{where}: env: must be followed by the name of an environment variable")
        text = os.environ.get(variable, "").strip()  # secrets mounted from files end in a line break
        if not text:
            raise PolicyError(
                f"{where}: the environment variable {variable} is {'empty' if variable in os.environ else 'not set'}"
            )
        return cls(text, variable)

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Secret({_FROM_ENVIRONMENT + self._variable if self._variable else '***'})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self._public:
            return type(self), (self._text, "", True)
        if not self._variable:
            raise TypeError("a literal secret cannot be pickled; write env:NAME, and set the variable where it is read")
        return type(self).of, (_FROM_ENVIRONMENT + self._variable, "alerts")


def mask(text: str, limit: int = MAX_CHARS) -> str:
    """Return one line of at most ``limit`` characters with secrets as ``***`` and URLs reduced to scheme and host."""
    return mask_also(text, (), limit)


def mask_also(text: str, secrets: tuple[str, ...], limit: int = MAX_CHARS) -> str:
    """Mask a text, including the given secrets."""
    seen = text[: limit + _BEYOND]
    is_whole = len(seen) == len(text)
    line = _one_line(seen if is_whole else _without_last_word(seen))
    for secret in secrets:
        line = line.replace(secret, HIDDEN)
    line = _masked(line)
    return line if is_whole and len(line) <= limit else f"{line[: limit - 1]}…"


def names_a_secret(name: str) -> bool:
    """Return whether a fact of this name is secret: ``api_key``, ``db_password``; ``tokens`` is a count."""
    return _IS_SECRET_NAME.search(name[-64:]) is not None


def _one_line(text: str) -> str:
    """Remove line breaks and control characters."""
    return _INVISIBLE.sub("", _GAPS.sub(" ", text)).strip()


def _masked(text: str) -> str:
    text = _PEM.sub(HIDDEN, text)
    text = _URL.sub(_bare_url, text)
    text = _AUTHORISED.sub(lambda found: f"{found[1] or found[2]} {HIDDEN}", text)  # keeps the scheme
    text = _PROVIDER.sub(HIDDEN, text)
    return _NAMED.sub(lambda found: f"{found[1]}{found[2]}{HIDDEN}", text)  # keeps the name


def _bare_url(found: re.Match[str]) -> str:
    scheme, host, rest = found.groups()
    return f"{scheme}{host}{'/' + HIDDEN if rest and rest != '/' else ''}"


def _without_last_word(text: str) -> str:
    """Mask the last word, which may be the first half of a key."""
    head, gap, _ = text[-_WORD:].rpartition(" ")
    return text[:-_WORD] + head if gap else text
