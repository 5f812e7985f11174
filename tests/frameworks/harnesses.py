"""The harnesses of the frameworks that every release of this suite runs on."""

import pytest

from runguard.testing.conformance import Harness
from tests.frameworks.adk_harness import AdkHarness
from tests.frameworks.langchain_harness import LangChainHarness
from tests.frameworks.openai_harness import OpenAIAgentsHarness
from tests.frameworks.pydantic_harness import PydanticAIHarness

OTHERS: list[Harness] = [LangChainHarness(), OpenAIAgentsHarness(), PydanticAIHarness()]
EVERY: list[Harness] = [AdkHarness(), *OTHERS]
beside_adk = pytest.mark.parametrize("harness", OTHERS, ids=lambda harness: harness.name)
