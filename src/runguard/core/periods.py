"""Windows of budgets: periods of a fixed length, or of the calendar."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final, Self

from runguard.core.exceptions import PolicyError

_WINDOW: Final = re.compile(r"([1-9]\d{0,5})([smhdw])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600}
_DAY: Final = 86_400
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Window:
    """A recurring period: seconds, minutes and hours by UTC, days,
    weeks and months by the calendar of ``tz``.
    """

    text: str
    tz: str = "UTC"

    @classmethod
    def parse(cls, text: object, tz: object = None) -> Self:
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
        """Seconds of the current kind of window; of months and days, those of the first one."""
        _, begins, ends = self.bounds(0.0)
        return ends - begins

    def period(self, at: float) -> tuple[str, float]:
        """The name of the period that ``at`` falls into, and when it ends."""
        name, _, ends = self.bounds(at)
        return name, ends

    def bounds(self, at: float) -> tuple[str, float, float]:
        """The name of the period that ``at`` falls into, when it begins and when it ends."""
        if self.text[-1] in _SECONDS and self.text != "month":
            length = int(self.text[:-1]) * _SECONDS[self.text[-1]]
            number = int(at // length)
            return str(number), float(number * length), float((number + 1) * length)
        zone = _zone(self.tz)
        local = (_EPOCH + timedelta(seconds=at)).astimezone(zone)
        found = self._period_of(local.toordinal(), zone)
        if at >= found[2]:  # the clock went back over midnight: what comes twice belongs to the new period
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


def begin_of(window: str, ends: float) -> float:
    """About when the period of a window began that ends at ``ends``. An hour of daylight saving time is ignored."""
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
