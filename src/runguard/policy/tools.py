"""What is declared about tools, by the policy or beside their code, and so when two calls are the same.

``engine/guard``, ``engine/runs`` and ``engine/tools`` ask ``Tools``. ``adk/tool_hooks`` describes the parameters of a
tool as ``Fields``.
"""

import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter, ValidationError

from runguard.core.events import Answer, ToolCall
from runguard.core.identity import DIGEST_SIZE, answer_text, call_fingerprint
from runguard.policy.settings import Policy, ToolRule

# ---- The identity of a side effect: which calls of a ``once`` tool are the same call.

_INVISIBLE: Final = {0x200B: None, 0x2060: None, 0xFEFF: None}
_SCALARS: Final = (str, int, float)
_CLOSE: Final = object()


@dataclass(slots=True)
class Each:
    """A list whose items, or a mapping whose values, are declared as ``kind``."""

    kind: "Kind" = None


@dataclass(slots=True)
class Fields:
    """A function's parameters, or the fields of a model: what is declared under which name."""

    kinds: dict[str, "Kind"] = field(default_factory=dict)
    defaults: dict[str, object] = field(default_factory=dict)
    # other names under which a field is accepted, first choice first
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    drops_others: bool = False  # values under other names are never received

    def received(self, given: Mapping[Any, object]) -> dict[Any, object]:
        """Return the given values that arrive, under the declared names."""
        found: dict[Any, object] = dict(self.defaults)
        taken: set[str] = set()
        for name in self.kinds:
            for accepted in self.names.get(name, (name,)):
                if accepted in given:
                    found[name] = given[accepted]
                    taken.add(accepted)
                    break
        if not self.drops_others:
            found.update((name, value) for name, value in given.items() if name not in taken)
        return found


Kind = type[int] | type[float] | type[bool] | Each | Fields | None  # None: nothing is known, the value counts as it is


def once_identity(
    tool: str,
    args: object,
    declared: Fields | None = None,
    *,
    identity: Iterable[str] | None = None,
    volatile: Iterable[str] = (),
) -> bytes:
    """Return the digest of a side effect, the same in every process.

    A match refuses the call, so a wrong match refuses a new payment, and a missed match pays twice. Two calls are the
    same when the tool receives the same values: arguments that never reach it are dropped, defaults are filled in, and
    a value for a declared ``int``, ``float`` or ``bool`` is read as one. Texts are compared in Unicode form C without
    U+200B, U+2060 and U+FEFF. Whole numbers are equal however they are written (``5``, ``5.0``), and a list is the same
    as a tuple. Nothing else is made equal: white space, case, ``None``, the order of a list and every character of a
    long text count. The loop rules have an identity of their own (``core/identity``), which is wider on purpose.

    ``declared``: the tool's parameters; None where they are unknown, then every argument counts as it was given.
    ``identity`` names the only arguments that count, ``volatile`` those that never do.
    """
    if isinstance(args, dict):
        args = declared.received(args) if declared is not None else dict(args)
        for name in volatile:
            args.pop(name, None)
        if identity is not None:
            args = {name: args[name] for name in identity if name in args}
    kinds = Fields(declared.kinds) if declared is not None else None
    return blake2b(
        "".join([_text(tool), *_tokens(args, kinds)]).encode("utf-8", "surrogatepass"),
        digest_size=DIGEST_SIZE,
        person=b"runguard.once",
    ).digest()


def _tokens(value: Any, kind: Kind) -> list[str]:
    """Return one text per value, each saying where it ends.

    It is not recursive: arguments may be nested as deep as they like.
    """
    out: list[str] = []
    inside: set[int] = set()  # containers around the value at hand
    pending: list[tuple[Any, Any]] = [(value, kind)]
    while pending:
        value, kind = pending.pop()
        if kind is _CLOSE:
            inside.discard(id(value))
        elif isinstance(value, dict | list | tuple | BaseModel):
            if id(value) in inside:
                out.append("c;")
                continue
            inside.add(id(value))
            pending.append((value, _CLOSE))
            if isinstance(value, dict | BaseModel):
                entries = _entries(
                    value if isinstance(value, dict) else {**value.__dict__, **(value.__pydantic_extra__ or {})}, kind
                )
                out.append(f"d{len(entries)};")
                for key, item, of_item in reversed(entries):
                    pending.append((item, of_item))
                    pending.append((key, None))
            else:
                out.append(f"l{len(value)};")
                of_items = kind.kind if isinstance(kind, Each) else None
                pending.extend((item, of_items) for item in reversed(value))
        else:
            out.append(_leaf(_coerced(value._value_ if isinstance(value, Enum) else value, kind)))
    return out


def _entries(mapping: dict[Any, Any], kind: Kind) -> list[tuple[Any, Any, Kind]]:
    """Return keys, values and what is declared for them, in one order for all processes."""
    if isinstance(kind, Fields):
        kinds = kind.kinds
        mapping = kind.received(mapping)
        found = [(key, item, kinds.get(key) if isinstance(key, str) else None) for key, item in mapping.items()]
    else:
        of_values = kind.kind if isinstance(kind, Each) else None
        found = [(key, item, of_values) for key, item in mapping.items()]
    return sorted(found, key=lambda entry: (_leaf(entry[0]), answer_text(entry[0])))


def _leaf(value: Any) -> str:
    """Return the text of a single value, with its type.

    Only methods of the base classes are called: a subclass may bring code of its own.
    """
    if value is None:
        return "n;"
    if value is True:
        return "t;"
    if value is False:
        return "f;"
    if isinstance(value, str):
        return _text(str.__getitem__(value, slice(None)))
    if isinstance(value, int):
        return f"i{int.__format__(value, 'x')};"  # in hex: long numbers have no other text at once
    if isinstance(value, float):
        if float.is_integer(value):
            return f"i{float.__int__(value):x};"
        return f"r{float.__repr__(value)};"
    if isinstance(value, bytes):
        return f"b{bytes.hex(value)};"
    text = answer_text(value)
    return f"o{len(text)}:{text}"


def _text(text: str) -> str:
    text = _clean(text)
    return f"s{len(text)}:{text}"


def _clean(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFC", text.translate(_INVISIBLE))


# ---- Values of a declared ``int``, ``float`` or ``bool``.

_INT: Final = TypeAdapter(int)
_FLOAT: Final = TypeAdapter(float)
_BOOL: Final = TypeAdapter(bool)


def _coerced(value: Any, kind: Any) -> Any:
    """Return a value as the declared type, read as pydantic reads it, or as it is if it cannot be read exactly."""
    if kind not in (int, float, bool) or not isinstance(value, _SCALARS):
        return value
    given = _clean(value) if type(value) is str else value
    if kind is bool:
        return _read(_BOOL, given, value)
    whole = _read(_INT, given, None)
    if whole is not None:
        return whole  # also for a float: two large numbers that a float cannot tell apart may still arrive as two
    if kind is int:
        return value
    number = _read(_FLOAT, given, None)
    return number if number is not None and math.isfinite(number) else value


def _read(adapter: TypeAdapter[Any], given: Any, otherwise: Any) -> Any:
    try:
        return adapter.validate_python(given)
    except ValidationError:
        return otherwise


# ---- The rules of all tools.

_KEPT: Final = 4_096  # hallucinated names must not fill memory


class _Found(dict[str, ToolRule | None]):
    """The rules of the tools that were asked about, each found once."""

    def __init__(self, find: Callable[[str], ToolRule | None]) -> None:
        self._find = find

    def __missing__(self, tool: str) -> ToolRule | None:
        rule = self._find(tool)
        if len(self) < _KEPT:
            self[tool] = rule
        return rule


class Tools:
    """The rules of tools, by name."""

    def __init__(self, policy: Policy) -> None:
        self._declared: dict[str, ToolRule] = {}
        self._found = _Found(lambda tool: policy.tool_rule(tool) or self._declared.get(tool))
        # returns the rule of a tool, from the policy or from beside its code; None where there is none
        self.rule: Callable[[str], ToolRule | None] = self._found.__getitem__
        self.has_prices = any(rule.price is not None for rule in policy.tools.values())
        self.limited = {name for name, rule in policy.tools.items() if rule.max_calls is not None}

    def declare(self, tool: str, rule: ToolRule) -> None:
        """Keep a rule that was declared beside the tool's code. The policy's own rule for that name wins."""
        if tool not in self._declared and len(self._declared) < _KEPT:
            self._declared[tool] = rule
            self.has_prices = self.has_prices or rule.price is not None
            if rule.max_calls is not None:
                self.limited.add(tool)
            self._found.pop(tool, None)

    def is_polling(self, tool: str) -> bool:
        rule = self.rule(tool)
        return rule is not None and rule.polling

    def max_calls(self, tool: str) -> int | None:
        """Return how many calls of a tool are allowed in one run."""
        rule = self.rule(tool)
        return rule.max_calls if rule is not None else None

    def fingerprint(self, tool: str, args: object, received: frozenset[str] | None = None) -> bytes:
        """Return the identity of a call for the loop rules.

        ``received``: the arguments that the tool takes, where it never sees any other; None where that is not known.
        """
        if received is not None and type(args) is dict and not received.issuperset(args):
            args = {name: value for name, value in args.items() if name in received}
        rule = self.rule(tool)
        if rule is None:
            return call_fingerprint(tool, args)
        return call_fingerprint(tool, args, identity=rule.identity, volatile=rule.volatile, exact=rule.once)

    def effect_of(self, call: ToolCall | Answer) -> bytes:
        """Return the side effect of a call, or nothing for a tool that is not declared ``once``.

        The call's digest names it where nothing better was compared.
        """
        tool = call.tool
        rule = self.rule(tool)
        return (call.once or call.call) if rule is not None and rule.once else b""

    def once_identity(self, tool: str, args: object, declared: Fields | None = None) -> bytes:
        """Return a side effect's identity by its arguments, or nothing for a tool that is not declared ``once``."""
        rule = self.rule(tool)
        if rule is None or not rule.once:
            return b""
        return once_identity(tool, args, declared, identity=rule.identity, volatile=rule.volatile)
