"""These tests need the other frameworks, which have an environment of their own. Elsewhere they are not collected."""

from importlib.util import find_spec

import pytest

_INSTALLED = all(find_spec(name) is not None for name in ("langchain", "agents", "pydantic_ai"))
collect_ignore_glob = [] if _INSTALLED else ["test_*.py"]

if _INSTALLED:
    from runguard.testing.conformance import Harness
    from tests.frameworks.harnesses import EVERY

    @pytest.fixture(params=EVERY, ids=lambda harness: harness.name)
    def harness(request: pytest.FixtureRequest) -> Harness:
        found: Harness = request.param
        return found
