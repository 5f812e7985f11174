"""A pytest plugin that guards every Runner of a test run: ``pytest -p adk_guarded``."""

import runguard


def pytest_configure() -> None:
    runguard.install()
