"""Write ``reference/frameworks.md`` from the conformance harnesses. Run it with ``.venv-frameworks/bin/python``."""  # noqa: INP001

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from runguard.testing.conformance import CASES, MODES, Harness, matrix  # noqa: E402
from tests.frameworks.adk_harness import AdkHarness  # noqa: E402
from tests.frameworks.agent_framework_harness import AgentFrameworkHarness  # noqa: E402
from tests.frameworks.langchain_harness import LangChainHarness  # noqa: E402
from tests.frameworks.openai_harness import OpenAIAgentsHarness  # noqa: E402
from tests.frameworks.pydantic_harness import PydanticAIHarness  # noqa: E402
from tests.frameworks.strands_harness import StrandsHarness  # noqa: E402

PAGE = Path(__file__).parent / "reference" / "frameworks.md"
HEAD = """# What each framework supports

Does RunGuard do the same on my framework? The same scenarios run on the real package of every framework, with a
scripted model. "yes" means async, sync, streamed and on a thread, as far as the scenario has them. To prove an adapter
of your own, run the same scenarios from `runguard.testing.conformance`.

How many of the scenarios pass in each way of starting a turn, and whether a turn that waited for a human goes on as the
same run, on the same worker and on another one. The table below says what is missing, and why.

"""
WAITING = {"after an approval": "approval", "on another worker": "approval_elsewhere"}


def _passes(harness: Harness, cases: list[tuple[str, str]]) -> str:
    passed = sum(harness.reason(name, mode) is None for name, mode in cases)
    return f"{passed} of {len(cases)}"


def _goes_on(harness: Harness, name: str) -> str:
    modes = [mode for mode in MODES if harness.reason(name, mode) is None]
    return "yes" if len(modes) == len(MODES) else ", ".join(modes)


def summary(columns: list[Harness]) -> str:
    """Return the table of frameworks and ways to run them."""
    lines = [f"| framework | {' | '.join((*MODES, *WAITING))} |", "|---" * (1 + len(MODES) + len(WAITING)) + "|"]
    for harness in columns:
        cells = [_passes(harness, [case for case in CASES if case[1] == mode]) for mode in MODES]
        cells += [_goes_on(harness, name) for name in WAITING.values()]
        lines.append(f"| {harness.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def text() -> str:
    columns: list[Harness] = [AdkHarness(), LangChainHarness(), OpenAIAgentsHarness(), PydanticAIHarness()]
    columns += [StrandsHarness(), AgentFrameworkHarness()]
    return f"{HEAD}{summary(columns)}\n\n{matrix(columns)}\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
