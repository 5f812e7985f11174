"""Money: amounts, the scopes and periods that budgets count by, thresholds, and ``Budget``.

The ledger, the engine and the reports count with these amounts; ``policy/settings`` takes the budgets. Money is integer
nano-USD inside and ``Decimal`` at the edge.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta, tzinfo
from decimal import Decimal, InvalidOperation
from fnmatch import fnmatchcase
from fractions import Fraction
from importlib import import_module
from itertools import pairwise
from math import isqrt
from typing import Any, Final, Literal, NamedTuple, Self, get_args

from runguard.core.decision import dollars_text
from runguard.core.errors import Checked, InvalidValueError, PolicyError, did_you_mean

# ---- Amounts: dollars, tokens and calls, their arithmetic and their texts.

# The three counts of an Amount go together everywhere. It is a plain tuple, because it is made for every model call.
UNITS: Final = ("usd", "tokens", "calls")
Amount = tuple[int, int, int]  # nano-USD, tokens, calls: in the order of UNITS
NOTHING: Final[Amount] = (0, 0, 0)
UNLIMITED: Final = 1 << 62
NANO: Final = 1_000_000_000
MOST_USD: Final = 1_000_000_000  # more than that is a slip of the keyboard, and stays exact in every store
MOST_COUNT: Final = 10**15
_LEAST_USD: Final = Decimal("1e-9")
_SHOWN_CHARS: Final = 80
_LONGEST: Final = 64  # characters of an amount


def to_nano(value: object, name: str = "usd", *, least: int = 1) -> int:
    """Return dollars as nano-USD. A fraction of a nano is dropped, so that a cap is never wider than it was written.

    ``least``: 1 rejects 0, as for a fixed cap; 0 accepts it, as from a function. Raise PolicyError for anything that is
    not such an amount.
    """
    try:
        dollars = dollars_of(value, least=least)
    except ValueError as error:
        raise PolicyError(f"{name} = {shown(value)}: {error}") from None
    return nanos(dollars)


def nanos(usd: Decimal | int, *, up: bool = False) -> int:
    """Return dollars as whole nano-USD. A fraction is dropped, or with ``up`` counted as one more."""
    if 0 < usd < _LEAST_USD:  # its ratio may be too large to calculate with
        return int(up)
    # by integers: Decimal arithmetic obeys a context that the host program may have changed
    numerator, denominator = usd.as_integer_ratio()
    return -(-numerator * NANO // denominator) if up else numerator * NANO // denominator


def dollars_of(value: object, *, least: int = 1) -> Decimal:
    """Return an amount of dollars, which ``least`` 0 lets be 0. Raise ValueError with what is wrong, on one line."""
    too_much = f"the largest accepted value is {MOST_USD:,} dollars; leave it out for no limit"
    if isinstance(value, bool) or not isinstance(value, int | float | str | Decimal):
        raise ValueError("give dollars as a number or a decimal string such as '2.50'")
    if isinstance(value, int) and abs(value) > MOST_COUNT:
        raise ValueError(too_much if value > 0 else "must be greater than 0")
    if isinstance(value, str) and len(value) > _LONGEST:
        raise ValueError(f"longer than {_LONGEST} characters")
    try:
        # 0.1 means a tenth, not the binary fraction nearest to it; a class of its own may write itself in another way
        dollars = Decimal(float.__repr__(value) if isinstance(value, float) else value)
    except InvalidOperation:
        raise ValueError("not a number of dollars") from None
    if not dollars.is_finite():
        raise ValueError("must be finite; leave it out for no limit")
    if dollars < 0 or (dollars == 0 and least > 0):
        raise ValueError("must be greater than 0")
    if dollars > MOST_USD:
        raise ValueError(too_much)
    if dollars < _LEAST_USD and least > 0:
        raise ValueError("less than a billionth of a dollar")
    return dollars


def stated_usd(value: object) -> Decimal | None:
    """Return a cost that somebody stated in dollars: a number or its text, finite, from 0 to ``MOST_USD``.

    None: it cannot be right, so the cost is unknown. An amount between 0 and a billionth of a dollar counts as a
    billionth.
    """
    try:
        usd = dollars_of(value, least=0)
    except ValueError:
        return None
    return _LEAST_USD if 0 < usd < _LEAST_USD else usd


def stated_nano(value: object) -> int | None:
    """Return a stated cost as nano-USD, rounded up so that it is never lower than stated; None as in ``stated_usd``."""
    usd = stated_usd(value)
    return None if usd is None else nanos(usd, up=True)


def shown(value: object) -> str:
    """Return a value for an error message: short, on one line, and without running code of a foreign object."""
    if isinstance(value, int) and abs(value) >= 10**30:  # Python refuses to write out more than 4,300 digits
        return f"{'-' if value < 0 else ''}(a number of {value.bit_length() * 3 // 10} digits)"
    if value is None or type(value) in (bool, int, float, str, Decimal):
        text = repr(value)
        return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
    return f"a {type(value).__name__}"


def to_usd(nano: int) -> Decimal:
    """Return nano-USD as dollars, exact and without trailing zeros."""
    whole, rest = divmod(abs(nano), NANO)
    text = f"{whole}.{rest:09d}".rstrip("0").rstrip(".")
    return Decimal(text if nano >= 0 else f"-{text}")  # from text, which no context rounds


def usd_text(nano: int) -> str:
    """Return an amount as ``$0.10``: with two decimals, or as many as it needs."""
    return dollars_text(to_usd(nano))


def amount_text(unit: int, number: int) -> str:
    return (
        usd_text(number) if unit == 0 else f"{number:,} {UNITS[unit] if number != 1 else UNITS[unit].removesuffix('s')}"
    )


def edge(unit: int, number: int) -> Decimal | int:
    """Return a count as users see it: dollars as ``Decimal``, tokens and calls as they are."""
    return to_usd(number) if unit == 0 else number


def to_count(value: object, name: str, *, least: int = 1) -> int:
    """Return a whole number from ``least`` to ``MOST_COUNT``. Raise PolicyError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            value = int(value)
        else:
            raise PolicyError(f"{name} = {shown(value)}: give a whole number")
    if value < least:
        raise PolicyError(f"{name} = {shown(value)}: must be {'greater than' if least else 'at least'} 0")
    if value > MOST_COUNT:
        raise PolicyError(
            f"{name} = {shown(value)}: the largest accepted value is {MOST_COUNT:,}; leave it out for no limit"
        )
    return int(value)


def cap_from_function(value: object, unit: int) -> int:
    """Return the cap that a function gave: 0 is a cap, None means no limit.

    Raise PolicyError for anything else that is not an amount. ``unit``: the index in ``UNITS``.
    """
    if value is None:
        return UNLIMITED
    return to_nano(value, least=0) if unit == 0 else to_count(value, UNITS[unit], least=0)


def share_of(limit: Amount, granted: Amount, percent: float) -> Amount:
    """Return what must be spent to reach a share of a limit, counted in integers: 7 of 100 is 7 %, whatever floats say.

    Unlimited stays unlimited. It is at least 1: no share of a limit of 0 is reached while nothing is spent.
    ``granted``: what was added to the limit. ``percent``: a fraction, 1 for the whole.
    """
    share = Fraction(str(percent))
    usd, tokens, calls = (
        UNLIMITED if cap >= UNLIMITED else max(math.ceil((cap + more) * share), 1)
        for cap, more in zip(limit, granted, strict=True)
    )
    return usd, tokens, calls


def unit_reached(spent: Amount, needed: Amount) -> int | None:
    """Return the first unit in which as much is spent as needed, as an index in ``UNITS``; None when there is none."""
    return next((unit for unit in range(3) if needed[unit] < UNLIMITED and spent[unit] >= needed[unit]), None)


# ---- What a budget counts by: a run, a session, a user, an app, an agent, a model, a tool or a label.

KINDS: Final = ("run", "session", "user", "app", "agent", "model", "tool", "label")
_SHARED: Final = frozenset({"run", "session", "user", "app", "label"})  # when one is spent, the whole run must stop


@dataclass(frozen=True, slots=True)
class Scope:
    """The run, user, model and so on that a budget is about.

    A callable amount gets this: ``usd=lambda scope: 5 if is_pro(scope.user) else 1``.
    """

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
    """Return a part of a scope's key with the separator escaped, so that two names never make one key."""
    plain = text.replace("%", "%25").replace("/", "%2F")
    if plain.isascii() and "\0" not in plain:
        return plain
    # no store can write half of a surrogate pair or NUL as text
    return "".join(f"%{ord(c):X}" if c == "\0" or "\ud800" <= c <= "\udfff" else c for c in plain)


@dataclass(frozen=True, slots=True)
class Per:
    """What a budget counts by: a kind of scope, its name or pattern where given, or several kinds at once."""

    parts: tuple[tuple[str, str], ...]  # kind and glob ("*": each of them by itself); for a label its name

    @classmethod
    def parse(cls, text: object) -> Self:
        """Return what a text such as ``"run+agent:research*"`` stands for. Raise PolicyError when it is not valid."""
        if not isinstance(text, str) or not text:
            raise PolicyError(f"per = {text!r}: give one of {', '.join(KINDS)}")
        parts: list[tuple[str, str]] = []
        for part in text.split("+"):
            kind, colon, name = part.partition(":")
            if kind not in KINDS:
                raise PolicyError(f"per = {text!r}: no scope '{kind}'; {did_you_mean(kind, KINDS)}")
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
        """Return the scope's key for this budget, or None when the budget is not about it."""
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


# ---- Windows of budgets: periods of a fixed length, or of the calendar.

_WINDOW: Final = re.compile(r"([1-9]\d{0,5})([smhdw])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600}
_WINDOW_NAMES: Final = {"s": "second", "m": "minute", "h": "hour", "d": "day", "w": "week"}
_DAY: Final = 86_400
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Window:
    """A recurring period: seconds, minutes and hours by UTC, days, weeks and months by the calendar of ``tz``."""

    text: str
    tz: str = "UTC"

    @classmethod
    def parse(cls, text: object, tz: object = None) -> Self:
        """Return the window that a text such as ``"6h"`` or ``"month"`` stands for.

        ``tz``: the time zone of days, weeks and months; None is UTC. Raise PolicyError when a value is not valid.
        """
        if not isinstance(text, str):
            raise PolicyError(f"window = {text!r}: give a text such as '1h', '1d', '1w' or 'month'")
        found = _WINDOW.fullmatch(text)
        if text != "month" and found is None:
            raise PolicyError(
                f"window = {text!r}: not a window; use a number with s, m, h, d or w ('1h', '1d', '1w'), or 'month'"
            )
        if found is not None and found[2] in _SECONDS:
            length = int(found[1]) * _SECONDS[found[2]]
            if length > _DAY or _DAY % length:
                raise PolicyError(
                    f"window = {text!r}: must divide a day evenly, so that windows begin at the same times "
                    "every day; use '1h', '6h', '1d'"
                )
            if tz is not None:
                raise PolicyError(
                    f"tz = {tz!r} does nothing for window = {text!r}: only days, weeks and months begin by the calendar"
                )
        if found is not None and found[2] in "dw" and int(found[1]) * (7 if found[2] == "w" else 1) > 3_660:
            raise PolicyError(f"window = {text!r}: windows longer than ten years are not supported; leave it out")
        name = "UTC" if tz is None else tz
        _zone(name)
        return cls(text, str(name))

    @property
    def length(self) -> float:
        """Seconds of a window; of days and months those of the first one, in January 1970."""
        _, begins, ends = self.bounds(0.0)
        return ends - begins

    def bounds(self, at: float) -> tuple[str, float, float]:
        """Return the name of the period that ``at`` falls into, when it begins and when it ends."""
        if self.text[-1] in _SECONDS and self.text != "month":
            length = int(self.text[:-1]) * _SECONDS[self.text[-1]]
            number = int(at // length)
            return str(number), float(number * length), float((number + 1) * length)
        zone = _zone(self.tz)
        local = (_EPOCH + timedelta(seconds=at)).astimezone(zone)
        found = self._period_of(local.toordinal(), zone)
        if at >= found[2]:  # clocks were set back over midnight: the hour that comes twice belongs to the new period
            found = self._period_of(local.toordinal() + 1, zone)
        return found

    def _period_of(self, ordinal: int, zone: tzinfo) -> tuple[str, float, float]:
        day = datetime.fromordinal(ordinal)
        if self.text == "month":
            begin, after = (
                day.replace(day=1),
                day.replace(year=day.year + day.month // 12, month=day.month % 12 + 1, day=1),
            )
            name = day.strftime("%Y-%m")
        else:
            days = int(self.text[:-1]) * (7 if self.text[-1] == "w" else 1)
            # day 1 of the calendar was a Monday, so weeks begin on Mondays
            begin = day - timedelta(days=(ordinal - 1) % days)
            after, name = begin + timedelta(days=days), begin.strftime("%Y-%m-%d")
        return name, begin.replace(tzinfo=zone).timestamp(), after.replace(tzinfo=zone).timestamp()


def window_words(window: str) -> str:
    """Return a window as people say it: day, 15 minutes, month."""
    if window == "month":
        return window
    number, name = int(window[:-1]), _WINDOW_NAMES[window[-1]]
    return name if number == 1 else f"{number} {name}s"


def begin_of(window: str, ends: float) -> float:
    """Return about when the period of a window began that ends at ``ends``.

    An hour of daylight saving time is ignored.
    """
    if window == "month":
        first = (_EPOCH + timedelta(seconds=ends - 15 * _DAY)).replace(day=1)  # of that month, whatever the time zone
        after = first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
        return ends - (after - first).days * _DAY
    return ends - int(window[:-1]) * {**_SECONDS, "d": _DAY, "w": 7 * _DAY}[window[-1]]


def _zone(name: object) -> tzinfo:
    if name == "UTC":
        return UTC
    if not isinstance(name, str):
        raise PolicyError(f"tz = {name!r}: give the name of a time zone such as 'Europe/Berlin'")
    from zoneinfo import ZoneInfo  # most calendars are UTC and do without it

    try:
        return ZoneInfo(name)
    except Exception:  # a missing zone, a path, an empty text: each with its own exception
        raise PolicyError(
            f"tz = {name!r}: no such time zone here; use a name such as 'Europe/Berlin' or 'UTC'"
        ) from None


# ---- A checkpoint of a budget: at which share of it what happens, and its form as plain data.

ThresholdAction = Literal["warn", "nudge", "stop"]
_ACTIONS: Final = get_args(ThresholdAction)


@dataclass(frozen=True, slots=True)
class Threshold(metaclass=Checked):
    """What to do when a budget's ``utilization`` reaches ``percent``, a fraction above 0 and up to 1.

    ``callback`` gets the live budget. A threshold fires once until it is re-armed; a ``recurring`` one fires on every
    record at or above it. ``action`` is what happens beside the callback: nothing (``"warn"``), a notice to the model
    (``"nudge"``), or a stop.

    ``model``: from here on, send the calls of an agent to this cheaper model of the same model class, until the window
    of the budget ends or the budget is extended. ``agents``: only those agents, by name or glob; by default all.

    Use it in ``Budget(thresholds=...)`` to react before calls are refused, or in a ``BudgetPolicy`` that only counts
    tokens. A threshold alone limits nothing: that is what ``Budget`` is for.
    """

    percent: float
    callback: Callable[[Any], Any] | None = None
    recurring: bool = False
    action: ThresholdAction = "warn"
    model: str | None = None
    agents: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.percent, bool) or not isinstance(self.percent, int | float) or not 0 < self.percent <= 1:
            raise InvalidValueError(
                f"percent must be a fraction above 0 and up to 1, such as 0.8 for 80 %, not {self.percent!r}"
            )
        if self.callback is not None and not callable(self.callback):
            raise InvalidValueError(f"callback must be callable or None, not {self.callback!r}")
        if not isinstance(self.recurring, bool):
            # the text "false" would count as true
            raise InvalidValueError(f"recurring must be True or False, not {self.recurring!r}")
        if self.action not in _ACTIONS:
            raise InvalidValueError(f"action must be one of {', '.join(_ACTIONS)}, not {self.action!r}")
        self._check_model()

    def _check_model(self) -> None:
        if self.model is None:
            if self.agents:
                raise InvalidValueError("agents= chooses whose model is switched; add model=")
            return
        if not isinstance(self.model, str) or not self.model.strip():
            raise InvalidValueError(f"model must be the name of a model, not {self.model!r}")
        if self.action == "stop":
            raise InvalidValueError("action='stop' and model= exclude each other; give two thresholds")
        if not isinstance(self.agents, list | tuple) or not all(isinstance(a, str) and a for a in self.agents):
            raise InvalidValueError(f"agents must be a list of names such as ['research*'], not {self.agents!r}")
        object.__setattr__(self, "agents", tuple(self.agents))

    def is_for(self, agent: str) -> bool:
        """Return whether ``model`` is meant for the calls of this agent."""
        return not self.agents or any(fnmatchcase(agent, name) for name in self.agents)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for YAML, TOML or JSON; the callback becomes ``"package.module:function"``.

        Raise InvalidValueError when the callback cannot be imported by such a path.
        """
        path = None if self.callback is None else _path_of(self.callback)
        data = {"percent": self.percent, "callback": path, "recurring": self.recurring, "action": self.action}
        return data if self.model is None else {**data, "model": self.model, "agents": list(self.agents)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the threshold that ``to_dict`` wrote. Raise InvalidValueError when the data is not valid.

        It imports the module that the callback names: read only data that you trust.
        """
        if not isinstance(data, Mapping):
            raise InvalidValueError(f"a threshold must be a mapping, not {data!r}")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(str(key) for key in data if key not in known):
            raise InvalidValueError(
                f"{unknown[0]}: no such setting of a threshold; {did_you_mean(unknown[0], sorted(known))}"
            )
        if "percent" not in data:
            raise InvalidValueError("a threshold needs 'percent'")
        values = dict(data)
        if values.get("callback") is not None:
            values["callback"] = _load(values["callback"])
        return cls(**values)


def _path_of(callback: Callable[[Any], Any]) -> str:
    module, name = getattr(callback, "__module__", None), getattr(callback, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name:
        raise InvalidValueError(
            f"{callback!r} has no import path: only a function at the top of a module can be written as data, "
            "no lambda, closure or partial"
        )
    if module == "__main__":
        raise InvalidValueError(
            f"{name} is defined in the script itself, where nobody else can import it: move it to a module"
        )
    path = f"{module}:{name}"
    if _load(path) != callback:
        raise InvalidValueError(
            f"{callback!r} is not what {path} names: a method of an object cannot be written as data"
        )
    return path


def _load(path: object) -> Callable[[Any], Any]:
    module, colon, name = path.partition(":") if isinstance(path, str) else ("", "", "")
    if not module or not colon or not name:
        raise InvalidValueError(f"a callback is written 'package.module:function', not {path!r}")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing runs the module, which can fail in any way
        raise InvalidValueError(f"the callback {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise InvalidValueError(f"{path!r} is not callable")
    return found  # type: ignore[no-any-return]


# ---- Budgets: a limit in USD, tokens or calls on a scope, with an optional window.

DEFAULT_THRESHOLDS: Final = (Threshold(0.5), Threshold(0.8), Threshold(0.95))
_LONGEST_WAIT_S: Final = 3_600.0  # as long as ``max_wait_seconds`` may be
UsdAmount = int | float | str | Decimal | Callable[[Scope], Any] | None
CountAmount = int | Callable[[Scope], Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(metaclass=Checked):
    """A limit on a scope. Every amount given holds.

    Each amount may be a function of the ``Scope``, which returns an amount, 0, or None for no limit.

    ``per``: run, session, user, app, agent, model, tool or ``label:<name>``; ``"agent:research*"`` chooses by name,
    ``"run+agent"`` counts each agent of each run. ``window``: ``"1m"``, ``"1h"``, ``"1d"``, ``"1w"``, ``"month"``;
    none: for as long as the ledger lives. ``on_exhausted``: ``"refuse"``, or ``"wait"`` for a rate limit: calls wait
    in line until a window has room, at most ``max_wait_seconds``; without ``thresholds=`` it warns of nothing.
    ``burn_alert``: warn once per period when it is spent so fast that it will not last until the window ends.

    Use it in ``budgets=``: it holds before each call. To only count tokens over all turns and react at thresholds,
    use ``BudgetMonitor``.
    """

    usd: UsdAmount = None
    tokens: CountAmount = None
    calls: CountAmount = None
    per: str = "run"
    window: str | None = None
    tz: str | None = None
    thresholds: Sequence[Threshold] = DEFAULT_THRESHOLDS
    on_exhausted: Literal["refuse", "wait"] = "refuse"
    burn_alert: bool = False

    def __post_init__(self) -> None:
        if self.usd is None and self.tokens is None and self.calls is None:
            raise PolicyError("a Budget without an amount limits nothing; give usd=, tokens= or calls=")
        if self.usd is not None and not callable(self.usd):
            to_nano(self.usd)
        for name in ("tokens", "calls"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                to_count(value, name)
        per = Per.parse(self.per)
        if self.window is not None:
            Window.parse(self.window, self.tz)
            if per.parts == (("run", "*"),) and (self.window == "month" or self.window[-1] in "dw"):
                raise PolicyError(
                    f"per='run' with window={self.window!r}: a run ends before its window does; leave the "
                    "window out, or count per session, user or app"
                )
        elif self.tz is not None:
            raise PolicyError(f"tz = {self.tz!r} without a window does nothing; add window='1d', '1w' or 'month'")
        self._check_waiting()
        if not isinstance(self.thresholds, list | tuple):
            raise PolicyError(
                f"thresholds = {self.thresholds!r}: give a list such as [0.5, 0.8]; an empty one for none"
            )
        if not isinstance(self.burn_alert, bool):
            raise PolicyError(f"burn_alert = {shown(self.burn_alert)}: give True or False")
        if self.burn_alert and self.window is None:
            raise PolicyError("burn_alert = True without a window: nothing to last until; add window='1d' or 'month'")
        thresholds = tuple(_threshold(entry) for entry in self.thresholds)
        for position, threshold in enumerate(thresholds):
            if threshold in thresholds[:position]:
                raise PolicyError(f"thresholds: {threshold.percent:g} twice with the same action; keep one")
        if self.thresholds is DEFAULT_THRESHOLDS and self.on_exhausted == "wait":
            thresholds = ()  # a rate limit is meant to be reached: nothing to warn of
        object.__setattr__(self, "thresholds", thresholds)

    def _check_waiting(self) -> None:
        if self.on_exhausted not in ("refuse", "wait"):
            raise PolicyError(f"on_exhausted = {self.on_exhausted!r}: give 'refuse' or 'wait'")
        if self.on_exhausted == "wait" and (self.window is None or Window.parse(self.window).length > _LONGEST_WAIT_S):
            raise PolicyError(
                f"on_exhausted='wait' with window={self.window!r}: calls wait until the next window begins; give "
                "window='1m', '1h' or another one of at most an hour"
            )

    @classmethod
    def of(cls, entry: object) -> Self:
        """Return a budget from its table in a policy file, or as it is. Raise PolicyError when it is not valid."""
        if isinstance(entry, cls):
            return entry
        if not isinstance(entry, Mapping):
            raise PolicyError(
                f"budgets takes Budget(...) or a table such as {{usd = 5, per = 'user', window = '1d'}}, not a "
                f"{type(entry).__name__}"
            )
        for name in entry:
            if name not in cls.__dataclass_fields__:
                raise PolicyError(
                    f"{name}: no such setting of a budget; {did_you_mean(str(name), cls.__dataclass_fields__)}"
                )
        return cls(**entry)

    def limits(self, scope: Scope) -> Amount:
        """Return the amounts in force for a scope. Functions are called now.

        Raise PolicyError when a function returns something that is not an amount.
        """
        usd, tokens, calls = (self._limit(unit, scope) for unit in range(3))
        return usd, tokens, calls

    def _limit(self, unit: int, scope: Scope) -> int:
        function = self.function(unit)
        if function is None:
            return self.fixed(unit)
        given = function(scope)
        try:
            return cap_from_function(given, unit)
        except PolicyError as error:
            raise PolicyError(f"the function for {UNITS[unit]} gave {shown(given)} for {scope.key}: {error}") from None

    def function(self, unit: int) -> Callable[[Scope], Any] | None:
        """Return the function that gives the amount of a unit, if there is one. ``unit``: the index in ``UNITS``."""
        value = getattr(self, UNITS[unit])
        return value if callable(value) else None

    def fixed(self, unit: int) -> int:
        """Return the amount of a unit where it is a plain number; no limit where it is not."""
        value = getattr(self, UNITS[unit])
        if value is None or callable(value):
            return UNLIMITED
        return to_nano(value) if unit == 0 else to_count(value, UNITS[unit])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for digests and comparison. A function shows only as the fact that there is one."""
        data: dict[str, Any] = {"per": self.per}
        for name in UNITS:
            value = getattr(self, name)
            if value is not None:
                data[name] = "callable" if callable(value) else str(value)
        if self.window is not None:
            data["window"], data["tz"] = self.window, self.tz or "UTC"
        if self.thresholds != (DEFAULT_THRESHOLDS if self.on_exhausted == "refuse" else ()):
            data["thresholds"] = [_plain(threshold) for threshold in self.thresholds]
        if self.on_exhausted != "refuse":
            data["on_exhausted"] = self.on_exhausted
        if self.burn_alert:
            data["burn_alert"] = True
        return data


def _plain(threshold: Threshold) -> list[Any]:
    plain = [threshold.percent, threshold.action, threshold.recurring]
    return plain if threshold.model is None else [*plain, threshold.model, list(threshold.agents)]


def _threshold(entry: object) -> Threshold:
    if isinstance(entry, Threshold):
        return entry
    try:
        if isinstance(entry, Mapping):
            return Threshold(**entry)
        if isinstance(entry, int | float):
            return Threshold(entry)
    except (PolicyError, TypeError, ValueError) as error:
        raise PolicyError(f"thresholds: {error}") from None
    raise PolicyError(
        "thresholds takes Threshold(0.8), a fraction such as 0.8, or a table such as "
        f"{{percent = 0.8, action = 'nudge'}}, not {entry!r}"
    )


@dataclass(frozen=True, slots=True)
class BudgetStatus:
    """One budget on one scope at a moment: what a threshold's callback gets and ``plugin.budgets()`` lists."""

    scope: str
    unit: str
    spent: Decimal | int
    reserved: Decimal | int
    limit: Decimal | int
    overrun: Decimal | int
    window: str | None
    ends: float | None
    closed: bool

    @property
    def remaining(self) -> Decimal | int:
        rest = self.limit - self.spent - self.reserved
        return rest if rest > 0 else self.limit - self.limit

    @property
    def utilization(self) -> float:
        """How much of the limit is spent; above 1 after an overrun.

        Of a limit of 0: 0 while nothing is spent, then 1.
        """
        return float(self.spent / self.limit) if self.limit else float(self.spent > 0)


# ---- Trends: how many calls still fit, and when a budget is used up. Arithmetic only; all figures are estimates.
#
# ``engine/forecast`` shows them for runs and budgets at work, ``view`` for budgets in a store.

LEAST_CALLS: Final = 12  # below that there is no forecast
CALLS_KEPT: Final = 32  # of a run; a forecast looks at no more


class Trend(NamedTuple):
    """A line through a series of amounts: the next one, and how much each following one is larger. Both are divided by
    ``scale``.
    """

    level: int
    growth: int
    scale: int


def trend_of(amounts: Sequence[int], *, is_flat: bool = False) -> Trend | None:
    """Return the line through the means of the earlier and of the later half; None for too few amounts.

    A falling series continues at the mean of its later half. ``is_flat``: continue at the mean of all amounts.
    """
    count = len(amounts)
    if count < LEAST_CALLS:
        return None
    if is_flat:
        return Trend(sum(amounts), 0, count)
    half = count // 2
    earlier, later = sum(amounts[:half]), sum(amounts[-half:])
    if later <= earlier:
        return Trend(later, 0, half)
    distance = count - half  # between the centres of the halves
    growth = 2 * (later - earlier)
    return Trend((earlier + later) * distance + (later - earlier) * (count + 1), growth, 2 * half * distance)


def calls_within(trend: Trend, room: int) -> int | None:
    """Return how many more calls fit into ``room``; None when they take nothing."""
    level, growth, scale = trend
    room = max(room, 0) * scale
    if not growth:
        return room // level if level else None
    # the largest n with n * level + growth * n * (n - 1) / 2 <= room
    linear = 2 * level - growth
    return max((isqrt(linear * linear + 8 * growth * room) - linear) // (2 * growth), 0)


def sum_of(trend: Trend, calls: int) -> int:
    """Return what the next calls take together, rounded up."""
    level, growth, scale = trend
    return -(-(2 * calls * level + growth * calls * (calls - 1)) // (2 * scale))


def was_cut(prompts: Sequence[int]) -> bool:
    """Return whether the history was cut: a prompt is at most half as large as the one before."""
    return any(2 * after <= before for before, after in pairwise(prompts))


def calls_until_size(prompts: Sequence[int], size: int) -> int | None:
    """Return how many more prompts are at most ``size`` tokens large.

    None for too few prompts, and where they do not grow. A history that was cut before it was so large will be cut
    again: also None.
    """
    if len(prompts) < LEAST_CALLS:
        return None
    steps = [after - before for before, after in pairwise(prompts) if 2 * after > before]
    growth = sum(steps)
    if growth <= 0 or (len(steps) < len(prompts) - 1 and size > max(prompts)):
        return None
    return max(size - prompts[-1], 0) * len(steps) // growth


@dataclass(frozen=True, slots=True)
class BudgetForecast:
    """What becomes of a budget if spending continues as it has since its period began. An estimate."""

    calls: int  # that it is based on
    used_up_at: float | None  # epoch seconds; None: the budget lasts until its period ends
    share_at_end: float  # of the cap, when the period ends


def budget_forecast(spent: int, cap: int, calls: int, begins: float, now: float, ends: float) -> BudgetForecast | None:
    """Return the forecast of a budget in one unit; None for too few calls, and where nothing was spent or limited."""
    passed = now - begins
    if calls < LEAST_CALLS or spent <= 0 or cap <= 0 or passed <= 0 or now >= ends:
        return None
    used_up_at = now + max(cap - spent, 0) * passed / spent
    share = spent * (ends - begins) / (passed * cap)
    return BudgetForecast(calls, used_up_at if used_up_at < ends else None, round(share, 4))
