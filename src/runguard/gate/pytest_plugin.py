"""The pytest plugin: a fixture that asserts what a run may cost and adds its figures to the JUnit report.

pytest imports this module at every start where RunGuard is installed, so it imports nothing else.
"""

import pytest


@pytest.fixture
def assert_within_budget(record_property):  # type: ignore[no-untyped-def]
    """Call it as ``assert_within_budget(run, usd=0.05, tokens=20_000, model_calls=8, tool_calls=10)``.

    ``run`` is a recording of ``runguard.testing.run``, an ADK session, a result of replay or a path to recordings.
    """
    from runguard.gate.checks import assert_within_budget

    def check(run, **limits):  # type: ignore[no-untyped-def]
        __tracebackhide__ = True
        result = assert_within_budget(run, **limits)
        usd = "unknown" if result.unpriced else f"{result.usd:f}"
        for name, value in (("usd", usd), ("tokens", result.tokens), ("model_calls", result.model_calls)):
            record_property(f"runguard.{name}", value)
        return result

    return check
