"""Commands to be copied: names in them come from users, so a shell must read them as one word and nothing more."""

import shlex
from urllib.parse import urlsplit

from runguard.core.printable import printable


def hint(name: str, scope: str, store: str | None, more: str = "") -> str:
    """``runguard resume SCOPE``, with the store that was named; for a URL that holds a password stands the word URL."""
    at = "" if store is None else f" --store {'URL' if _holds_password(store) else _quoted(store)}"
    return f"runguard {name} {_quoted(scope)}{at}{more}"


def _quoted(word: str) -> str:
    if printable(word) == word:
        return shlex.quote(word)
    # what a terminal would obey is written out, and read back by bash and zsh
    return "$'" + "".join(_escaped(sign) for sign in word) + "'"


def _escaped(sign: str) -> str:
    if sign in "\\'":
        return f"\\{sign}"
    return sign if printable(sign) == sign else f"\\u{ord(sign):04x}"


def _holds_password(url: str) -> bool:
    parts = urlsplit(url)
    return parts.password is not None or "pass" in parts.query.lower()
