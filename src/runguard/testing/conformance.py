"""The conformance kit for adapters: ``await check(harness, name, mode)`` for each of ``CASES``.

    @pytest.mark.parametrize(("name", "mode"), conformance.CASES)
    async def test_my_adapter(name, mode):
        await conformance.check(MyHarness(), name, mode)

A scenario plays on the real framework with a scripted model and raises ``AssertionError`` when the adapter does not do
what RunGuard promises. ``matrix`` is the table of frameworks and scenarios for the documentation.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from runguard.testing.harness import (
    MODEL,
    MODES,
    AgentSpec,
    AskAgainError,
    Harness,
    Reply,
    Script,
    Session,
    Stage,
    TurnResult,
)
from runguard.testing.scenarios import ONLY, SCENARIOS

__all__ = [
    "CASES",
    "MODEL",
    "MODES",
    "ONLY",
    "SCENARIOS",
    "AgentSpec",
    "AskAgainError",
    "Harness",
    "Reply",
    "Script",
    "Session",
    "TurnResult",
    "check",
    "matrix",
]

CASES: Final = [(name, mode) for name in SCENARIOS for mode in ONLY.get(name, MODES)]


async def check(harness: Harness, name: str, mode: str = "async") -> None:
    """Play one scenario. Raises ``AssertionError`` when the adapter fails it, or passes one declared impossible."""
    reason = harness.reason(name, mode)
    try:
        await SCENARIOS[name](Stage(harness, mode))
    except AssertionError:
        if reason is None:
            raise
    else:
        assert reason is None, f"{harness.name} passes '{name}' ({mode}), which it declares impossible: {reason}"


def matrix(harnesses: Iterable[Harness]) -> str:
    """Return a Markdown table: which framework does what, in which modes, and why not."""
    columns = list(harnesses)
    notes: list[str] = []
    rows = []
    for name, scenario in SCENARIOS.items():
        modes = ONLY.get(name, MODES)
        cells = [_cell([harness.reason(name, mode) for mode in modes], modes, notes) for harness in columns]
        about = (scenario.__doc__ or "").strip().partition("\n")[0]
        rows.append(f"| **{name.replace('_', ' ')}** {about} | {' | '.join(cells)} |")
    head = f"| scenario | {' | '.join(harness.name for harness in columns)} |\n|---|{'---|' * len(columns)}"
    return "\n".join([head, *rows, *([""] if notes else []), *(f"{n}. {note}" for n, note in enumerate(notes, 1))])


def _cell(reasons: Sequence[str | None], modes: Sequence[str], notes: list[str]) -> str:
    """Return "yes", or the modes in which a scenario passes and the numbers of the notes that say why not in others."""
    for reason in reasons:
        if reason is not None and reason not in notes:
            notes.append(reason)
    passed = [mode for mode, reason in zip(modes, reasons, strict=True) if reason is None]
    why = sorted({notes.index(reason) + 1 for reason in reasons if reason is not None})
    return " ".join([", ".join(passed) if why and passed else "no" if why else "yes", *(f"[{n}]" for n in why)])
