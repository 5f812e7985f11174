"""Options that several commands share."""

import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click

_SPAN: Final = re.compile(r"(\d{1,6})\s*([smhdw])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_UNITS: Final = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)I?B?", re.IGNORECASE)


class Since(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic only in newer releases of click
    """A time in the past as unix seconds: 90m, 24h, 7d, or a day such as 2026-11-01."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        if (found := _SPAN.fullmatch(value.strip().lower())) is not None:
            return time.time() - int(found[1]) * _SECONDS[found[2]]  # noqa: TID251 - a command uses the system's clock
        try:
            return datetime.fromisoformat(value).timestamp()
        except ValueError:
            self.fail(
                f"{value!r} is not a time; use a span such as 90m, 24h or 7d, or a day such as 2026-11-01", param, ctx
            )


class Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A number of bytes such as 500MB or 4GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(str(value).strip())
        size = int(float(found[1]) * _UNITS[found[2].upper()]) if found is not None else 0
        if size < 1:
            self.fail(f"{value!r} is not a size such as 500MB or 4GB", param, ctx)
        return size


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
store_option = click.option("--store", metavar="URL", help="The store. Default: the store of the policy in force here.")
policy_option = click.option(
    "--policy",
    "policy_file",
    type=click.Path(path_type=Path),
    help="The policy file. Default: the file that a run started here would use.",
)
model_option = click.option(
    "--model", default="", help="The model of recordings that do not name one, for prices and windows."
)
workers_option = click.option(
    "--workers", type=click.IntRange(1, 256), help="Number of processes. Default: one per core."
)
unpacked_option = click.option(
    "--max-unpacked",
    type=Size(),
    default="1GB",
    show_default=True,
    metavar="SIZE",
    help="How much of each compressed file to read: 500MB, 4GB.",
)
