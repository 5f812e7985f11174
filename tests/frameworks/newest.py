"""The harnesses of frameworks whose oldest supported release is the newest one: none where they are not installed."""

from importlib.util import find_spec

from runguard.testing.conformance import Harness

NEWEST: list[type[Harness]] = []
if find_spec("strands") is not None:
    from tests.frameworks.strands_harness import StrandsHarness

    NEWEST.append(StrandsHarness)
if find_spec("agent_framework") is not None:
    from tests.frameworks.agent_framework_harness import AgentFrameworkHarness

    NEWEST.append(AgentFrameworkHarness)
