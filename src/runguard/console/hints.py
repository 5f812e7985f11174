"""Commands for users to copy. Names in them are quoted, so that a shell reads each as one word."""

import shlex
from urllib.parse import urlsplit

from runguard.core.decision import printable


def hint(name: str, scope: str, store: str | None, more: str = "") -> str:
    """Return ``runguard resume SCOPE`` with the named store; a URL with a password becomes the word URL."""
    at = "" if store is None else f" --store {'URL' if _holds_password(store) else _quoted(store)}"
    return f"runguard {name} {_quoted(scope)}{at}{more}"


def _quoted(word: str) -> str:
    if printable(word) == word:
        return shlex.quote(word)
    # escape control characters in the form that bash and zsh read back
    return "$'" + "".join(_escaped(sign) for sign in word) + "'"


def _escaped(sign: str) -> str:
    if sign in "\\'":
        return f"\\{sign}"
    return sign if printable(sign) == sign else f"\\u{ord(sign):04x}"


def _holds_password(url: str) -> bool:
    parts = urlsplit(url)
    return parts.password is not None or "pass" in parts.query.lower()
