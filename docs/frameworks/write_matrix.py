"""Write ``matrix.md`` from the conformance harnesses. Run it with ``.venv-frameworks/bin/python``."""  # noqa: INP001

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from runguard.testing.conformance import matrix  # noqa: E402
from tests.frameworks.adk_harness import AdkHarness  # noqa: E402
from tests.frameworks.agent_framework_harness import AgentFrameworkHarness  # noqa: E402
from tests.frameworks.langchain_harness import LangChainHarness  # noqa: E402
from tests.frameworks.openai_harness import OpenAIAgentsHarness  # noqa: E402
from tests.frameworks.pydantic_harness import PydanticAIHarness  # noqa: E402
from tests.frameworks.strands_harness import StrandsHarness  # noqa: E402

PAGE = Path(__file__).with_name("matrix.md")
HEAD = """# What each framework supports

Does RunGuard do the same on my framework? The same scenarios run on the real package of every framework, with a
scripted model. "yes" means async, sync, streamed and on a thread, as far as the scenario has them. To prove an adapter
of your own, run the same scenarios from `runguard.testing.conformance`.

"""


def text() -> str:
    columns = [AdkHarness(), LangChainHarness(), OpenAIAgentsHarness(), PydanticAIHarness(), StrandsHarness()]
    return HEAD + matrix([*columns, AgentFrameworkHarness()]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
