"""The tool calls of a run that have a price: what is held for each, until it has answered."""

from dataclasses import dataclass, field
from typing import Any

from runguard.accounting.charges import Charge


@dataclass(slots=True)
class Bill:
    """A tool call that is being paid: what is held for it, and the price of the rule it began under."""

    charge: Charge
    tool: str
    price: Any
    bound: int  # nano-USD


@dataclass(slots=True)
class ToolBills:
    """The priced tool calls of one run."""

    open: dict[str, Bill] = field(default_factory=dict)  # by the id of the call
    refused: dict[str, str] = field(default_factory=dict)  # tool -> the response in which a budget refused it first
