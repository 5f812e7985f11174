"""Inputs of the fuzzers: any value as readable JSON, made up and changed by a seeded generator.

JSON cannot name every value that a tool or a provider can return. A dict with one key that begins with ``$`` names the
others: ``{"$float": "nan"}``, ``{"$deep": [5000, "result", null]}``. So an input that failed is a file that a person
can read, and it stays the same input in later versions. ``build`` accepts any JSON: a form with unexpected contents
is a plain dict.
"""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from random import Random
from types import SimpleNamespace
from typing import Any, Final

_MOST_COPIES: Final = 100_000
_MOST_MEMBERS: Final = 3_000
_MOST_DIGITS: Final = 6_000


class Hostile:
    """Every way to use it fails."""

    def _fail(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("hostile")

    __getattr__ = __eq__ = __bool__ = __len__ = __iter__ = __getitem__ = __repr__ = __str__ = __contains__ = _fail
    __int__ = __float__ = __index__ = __lt__ = __format__ = _fail
    __hash__ = object.__hash__


def build(form: Any) -> Any:
    """Return the value that a form names. Every call makes a new one."""
    if type(form) is list:
        return [build(part) for part in form]
    if type(form) is not dict:
        return form
    if len(form) == 1:
        ((name, given),) = form.items()
        if name in _FORMS:
            try:
                return _FORMS[name](given)
            except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError):
                return _copy(form)  # a value may be changed, a form may not
    return {key: build(value) for key, value in form.items()}


def _deep(given: Any) -> Any:
    times, key, inner = given
    value = build(inner)
    for _ in range(min(times, _MOST_COPIES)):
        value = {key: value} if type(key) is str else [value]
    return value


def _cycle(given: Any) -> Any:
    value = build(given)
    if type(value) is dict:
        value["again"] = value
    else:
        value.append(value)
    return value


def _text_of_json(given: Any) -> str:
    try:
        return json.dumps(build(given), default=lambda _: None)
    except (RecursionError, ValueError):  # too deep, or cyclic
        return "{"


_FORMS: Final[dict[str, Callable[[Any], Any]]] = {
    "$float": float,
    "$int": lambda given: int(given[0]) * 10 ** min(given[1], _MOST_DIGITS),
    "$bytes": bytes.fromhex,
    "$decimal": Decimal,
    "$time": lambda given: datetime.fromtimestamp(given, UTC),
    "$tuple": lambda given: tuple(build(part) for part in given),
    "$set": lambda given: {build(part) for part in given},
    "$object": lambda given: SimpleNamespace(**build(given)),
    "$pairs": lambda given: {build(key): build(value) for key, value in given},
    "$long": lambda given: str(given[1])[:40] * min(given[0], _MOST_COPIES),
    "$many": lambda given: [build(given[1])] * min(given[0], _MOST_MEMBERS),
    "$deep": _deep,
    "$cycle": _cycle,
    "$json": _text_of_json,
    "$hostile": lambda _: Hostile(),
}
_CASES: Final = (
    *(None, True, False, 0, 1, -1, 3, 404, 500, 2**31, 2**63, 10**12, 10**15, 1e308, -0.5, 1.0, "", " ", "0", "\x00"),
    *(
        "ok",
        "error",
        "Error: no such file",
        "not found",
        "No results found.",
        "exit code: 1",
        "\ud800",
        "é" * 3,
        "AUDIO",
    ),
    *("2026-01-01T00:00:00Z", "9999-12-31T23:59:59-23:59", "[]", "{}", '{"error": "x"}', "/a/b", "x" * 700),
    *({"$float": "nan"}, {"$float": "inf"}, {"$int": [-7, 400]}, {"$bytes": "00ff"}),
    *({"$decimal": "sNaN"}, {"$time": 0}, {"$hostile": 0}, {"$set": [1, "a", None]}),
    *(
        {"$deep": [40, "k", 1]},
        {"$pairs": [[1, 2], [None, 3]]},
        {"$json": {"error": "x"}},
        {"$object": {"usage": {"input_tokens": 3}}},
        {"$tuple": [1, "a"]},
    ),
)
_MONSTERS: Final = (  # large, deep or endless, so they are rare
    *({"$long": [50_000, "ab "]}, {"$many": [3_000, {"a": 1}]}, {"$deep": [30_000, None, 0]}, {"$cycle": [1]}),
    *({"$deep": [3_000, "result", "x"]}, {"$cycle": {"a": 1}}, {"$decimal": "1e400000"}, {"$int": [1, 5_000]}),
)


class Mutator:
    """Makes and changes forms. The same random numbers give the same forms."""

    def __init__(self, random: Random, names: tuple[str, ...]) -> None:
        self._random, self._names = random, names

    def make(self, depth: int = 3) -> Any:
        """Return a form: a case, a list or a dict with names that the readers look for."""
        random = self._random
        if depth <= 0 or random.random() < 0.4:
            return _copy(random.choice(_MONSTERS if random.random() < 0.01 else _CASES))
        if random.random() < 0.3:
            return [self.make(depth - 1) for _ in range(random.randrange(4))]
        return {random.choice(self._names): self.make(depth - 1) for _ in range(random.randrange(1, 5))}

    def change(self, form: Any, times: int) -> Any:
        """Return a copy of a form with so many changes, each at a random place."""
        form = _copy(form)
        for _ in range(times):
            form = self._change(form)
        return form

    def _change(self, form: Any) -> Any:
        holders = [place for place in _places(form) if place]
        if not holders or self._random.random() < 0.02:
            return self._other(form)
        holder = self._random.choice(holders)
        key = self._random.choice(list(holder) if type(holder) is dict else range(len(holder)))
        kind = self._random.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and type(holder) is dict:
            holder[self._random.choice(self._names)] = _copy(holder[key])
        elif kind == 1:
            holder.insert(key, _copy(holder[key]))
        elif kind == 2 and type(holder) is dict:
            holder[self._random.choice(self._names)] = self.make(2)
        elif kind == 3:
            holder[key] = _copy(self._random.choice(holders))
        else:
            holder[key] = self._other(holder[key])
        return form

    def _other(self, value: Any) -> Any:
        random = self._random
        if type(value) is str and random.random() < 0.6:
            at = random.randrange(len(value) + 1)
            return value[:at] + random.choice(_TEXTS) + value[at + random.randrange(3) :]
        if type(value) in (int, float) and random.random() < 0.6:
            return random.choice((value + 1, -value, value * 1_000, value * 0.5, str(value), value == value))
        return self.make(2)


_TEXTS: Final = (
    *"{}[]\"':,-0179 \n\t\\/éx\x00",
    *("\ud800", "Error", "not found", "null", "=" * 40, "1" * 40, "a/" * 30),
)


def _copy(form: Any) -> Any:
    return json.loads(json.dumps(form))


def _places(form: Any) -> list[Any]:
    """The dicts and lists of a form."""
    found, pending = [], [form]
    while pending:
        item = pending.pop()
        if type(item) is dict or type(item) is list:
            found.append(item)
            pending += item.values() if type(item) is dict else item
    return found


def shrink(form: Any, fails: Callable[[Any], bool], tries: int = 300) -> Any:
    """Return a smaller form that still fails: remove one part after another, for a limited number of tries."""
    while True:
        for smaller in _smaller(form):
            tries -= 1
            if tries < 0:
                return form
            if fails(smaller):
                form = smaller
                break
        else:
            return form


def _smaller(form: Any) -> Any:
    parts = list(form.values()) if type(form) is dict else form if type(form) is list else ()
    yield from parts
    text = json.dumps(form)
    for number, place in enumerate(_places(form)):
        for key in list(place) if type(place) is dict else range(len(place)):
            copy = json.loads(text)
            del _places(copy)[number][key]
            yield copy
