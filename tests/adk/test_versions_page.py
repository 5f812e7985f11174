"""docs/reference/adk-versions.md says since when ADK has what: the installed release agrees."""

import inspect
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import Runner

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "adk-versions.md").read_text(encoding="utf-8")
SINCE = {line[1]: line[2] for line in re.finditer(r"^\| (2\.\d+) \| ([^|]+) \|", PAGE, re.MULTILINE)}
INSTALLED = tuple(int(part) for part in version("google-adk").split(".")[:2])


PROBES = {
    ("2.5", "on_run_error_callback"): lambda: hasattr(BasePlugin, "on_run_error_callback"),
    ("2.5", "on_agent_error_callback"): lambda: hasattr(BasePlugin, "on_agent_error_callback"),
    ("2.11", "aborted"): lambda: "abort_signal" in inspect.signature(Runner.run_async).parameters,
}


@pytest.mark.parametrize(("since", "words"), PROBES, ids=lambda value: value)
def test_the_installed_release_has_what_the_page_says(since: str, words: str) -> None:
    assert words in SINCE[since]
    assert PROBES[since, words]() is (tuple(map(int, since.split("."))) <= INSTALLED)


def test_the_page_is_in_order_and_begins_after_the_oldest_release() -> None:
    numbers = [tuple(map(int, since.split("."))) for since in SINCE]
    assert numbers == sorted(numbers)
    assert numbers[0] > (2, 3)
