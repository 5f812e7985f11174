"""``--since``: 90m, 24h, 7d, or a day such as 2026-11-01."""

import re
import time
from datetime import datetime
from typing import Any, Final

import click

_SPAN: Final = re.compile(r"(\d{1,6})\s*([smhdw])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


class Since(click.ParamType):  # type: ignore[type-arg]  # generic in newer releases of click alone
    """A moment in the past, as unix seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        if (found := _SPAN.fullmatch(value.strip().lower())) is not None:
            return time.time() - int(found[1]) * _SECONDS[found[2]]  # noqa: TID251 - a command runs by the system's clock
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            self.fail(
                f"{value!r} is no time; give a span such as 90m, 24h or 7d, or a day such as 2026-11-01", param, ctx
            )
