"""What a budget counts by: a run, a session, a user, an app, an agent, a model, a tool or a label."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Self

from runguard.core.exceptions import PolicyError
from runguard.core.mistakes import nearest

KINDS: Final = ("run", "session", "user", "app", "agent", "model", "tool", "label")
_SHARED: Final = frozenset({"run", "session", "user", "app", "label"})  # once spent, the whole run must stop


@dataclass(frozen=True, slots=True)
class Scope:
    """Whom a budget is about. A callable amount gets this: ``usd=lambda scope: 5 if is_pro(scope.user) else 1``."""

    kind: str
    key: str
    app: str = ""
    user: str = ""
    session: str = ""
    run: str = ""
    agent: str = ""
    model: str = ""
    tool: str = ""
    labels: Mapping[str, str] | None = None


def scope_part(text: str) -> str:
    """A part of a scope's key: the separator cannot come from inside a name, so two names never make one key."""
    plain = text.replace("%", "%25").replace("/", "%2F")
    if plain.isascii() and "\0" not in plain:
        return plain
    # What no store can write as text: half of a surrogate pair, and NUL.
    return "".join(f"%{ord(c):X}" if c == "\0" or "\ud800" <= c <= "\udfff" else c for c in plain)


@dataclass(frozen=True, slots=True)
class Per:
    """What a budget counts by: a kind of scope, its name or pattern where given, or several kinds at once."""

    parts: tuple[tuple[str, str], ...]  # kind and glob ("*": each of them by itself); for a label its name

    @classmethod
    def parse(cls, text: object) -> Self:
        if not isinstance(text, str) or not text:
            raise PolicyError(f"per = {text!r}: give one of {', '.join(KINDS)}")
        parts: list[tuple[str, str]] = []
        for part in text.split("+"):
            kind, colon, name = part.partition(":")
            if kind not in KINDS:
                raise PolicyError(f"per = {text!r}: no scope '{kind}'; {nearest(kind, KINDS)}")
            if kind == "label" and not name:
                raise PolicyError("per = 'label': which one? Write per='label:team'")
            if colon and not name:
                raise PolicyError(f"per = {text!r}: nothing after the colon")
            if colon and kind in ("run", "session"):
                raise PolicyError(f"per = {text!r}: a {kind} has no name to choose by; write per='{kind}'")
            if kind in [k for k, _ in parts if k != "label"]:
                raise PolicyError(f"per = {text!r}: '{kind}' twice")
            parts.append((kind, name or "*"))
        return cls(tuple(parts))

    @property
    def kind(self) -> str:
        return "+".join(kind for kind, _ in self.parts)

    @property
    def stops_run(self) -> bool:
        """Whether a spent budget stops the whole run; otherwise it stops the agent, model or tool that spent it."""
        return all(kind in _SHARED for kind, _ in self.parts)

    def key(self, scope: Scope) -> str | None:
        """The scope's key for this budget, or None when the budget is not about it."""
        values: list[str] = []
        for kind, pattern in self.parts:
            if kind == "label":
                value = (scope.labels or {}).get(pattern)
                if value is None:
                    return None
                values.append(f"{scope_part(pattern)}={scope_part(value)}")
                continue
            name: str = getattr(scope, kind)
            if (kind == "tool" and not name) or (pattern != "*" and not fnmatchcase(name, pattern)):
                return None
            if kind in ("user", "agent", "tool"):
                values.append(f"{scope_part(scope.app)}/{scope_part(name)}")
            elif kind == "session":
                values.append(f"{scope_part(scope.app)}/{scope_part(scope.user)}/{scope_part(name)}")
            else:
                values.append(scope_part(name))
        if len(values) > 1:
            values = [value.replace("+", "%2B") for value in values]
        return f"{self.kind}:{'+'.join(values)}"
