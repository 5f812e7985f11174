"""One thing that was looked at."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Line:
    """What was found, and what to do about it where something is wrong."""

    check: str
    state: Literal["ok", "warning", "problem"]
    found: str
    do: str = ""
