"""Calls whose arguments did not arrive: the response hit its output limit, so the call came empty or cut off.

The tool's validation rejects such a call, and a model that does not know why repeats it.
"""

import re
from collections import OrderedDict
from typing import ClassVar, Final

from runguard.core.decision import CUT_OFF, Action, Finding
from runguard.core.detectors.evidence import evidence_of
from runguard.core.events import FAILURES, ModelResult, ToolResults

_NUDGE_AT: Final = 2
_TOOLS_KEPT: Final = 64
_SAID: Final = 800
_CUT: Final = "\0"  # is not the name of a tool
# ADK's own words, whatever the arguments are.
_REJECTED: Final = re.compile(r"mandatory input parameters? (?:are|is) not present", re.IGNORECASE)
# Other validators, believed only where the arguments are empty: code that is being debugged says such things, too.
_MISSING: Final = re.compile(
    r"\bmissing (?:\d+ )?(?:required|mandatory)\b|\b(?:required|mandatory) (?:arg|param|prop|field|input|key)\w*"
    r"|\bfield required\b|\bis a required property\b"
    r"|\b(?:arguments?|parameters?|input) (?:were|was|is|are) (?:empty|missing)"
    r"|\b(?:unterminated string|unexpected end of (?:json|input))\b",
    re.IGNORECASE,
)


def lacks_arguments(args: object, said: str) -> bool:
    """Whether a failure says that the call came without arguments that it needs."""
    head = said[:_SAID]
    if _REJECTED.search(head) is not None:
        return True
    is_empty = args is None or (type(args) is dict and not any(args.values()))
    return is_empty and _MISSING.search(head) is not None


class CutOff:
    """Tells the model at the second such call of one tool in a row. Equal calls are stopped by other rules."""

    sees: ClassVar[tuple[type, ...]] = (ModelResult, ToolResults)
    rests = sees
    __slots__ = ("record",)

    def __init__(self) -> None:
        # by tool, since its last call that was not rejected; and under _CUT, if the last response hit its output limit
        self.record = OrderedDict[str, int]()

    def observe(self, event: ModelResult | ToolResults) -> Finding | None:
        if type(event) is ModelResult:
            if event.is_cut:
                self.record[_CUT] = 1
            else:
                self.record.pop(_CUT, None)
            return None
        assert isinstance(event, ToolResults)
        if not event.failures and not self.record:
            return None
        is_cut = _CUT in self.record
        rejected = {a.tool for a in event.answers if a.outcome in FAILURES and (a.lacks_arguments or is_cut)}
        for answer in event.answers:
            if answer.tool not in rejected:
                self.record.pop(answer.tool, None)
        worst: Finding | None = None
        for tool in sorted(rejected):
            count = self.record[tool] = self.record.pop(tool, 0) + 1
            if len(self.record) > _TOOLS_KEPT:
                self.record.popitem(last=False)
            if count >= _NUDGE_AT:
                worst = Finding(
                    "stall",
                    Action.NUDGE,
                    count,
                    _NUDGE_AT,
                    CUT_OFF,
                    tool=tool,
                    key=f"cut off: {tool}",
                    detail="the response hit its output limit" if is_cut else "required arguments are missing",
                    evidence=evidence_of(event),
                )
        return worst
