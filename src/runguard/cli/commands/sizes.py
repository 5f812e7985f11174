"""How much of a compressed recording may be read, as an option of the commands that read recordings."""

import re
from typing import Any, Final

import click

_UNITS: Final = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)I?B?", re.IGNORECASE)


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


unpacked_option = click.option(
    "--max-unpacked",
    type=Size(),
    default="1GB",
    show_default=True,
    metavar="SIZE",
    help="How much of each compressed file is read: 500MB, 4GB.",
)
