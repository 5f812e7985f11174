"""A store with real runs in it, the real command as a process of its own, and a real browser."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.dashboards import BROWSERS, OPTIONS, Seen, Served, serve, watched


@pytest.fixture
def served() -> Iterator[Callable[..., Served]]:
    """Starts dashboards, and ends them with the test."""
    running: list[Served] = []

    def start(store: str, *arguments: str) -> Served:
        running.append(serve(store, *arguments))
        return running[-1]

    yield start
    for one in running:
        one.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright", reason="playwright is not installed: pip install playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        own = driver.chromium.executable_path
        found = next(filter(None, map(shutil.which, BROWSERS)), own if Path(own).exists() else None)
        if found is None:
            pytest.skip(
                f"no browser: none of {', '.join(BROWSERS)} is on PATH; install one: apt-get install chromium, "
                "or playwright install chromium"
            )
        started = driver.chromium.launch(executable_path=found, args=OPTIONS)
        yield started
        started.close()


@pytest.fixture
def look(browser: Any) -> Iterator[Callable[..., Seen]]:
    """Opens an address in a browser that has been nowhere before."""
    contexts: list[Any] = []

    def opened(url: str, **options: Any) -> Seen:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        contexts.append(context)
        seen = watched(context.new_page())
        seen.page.goto(url)
        return seen

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/guard.db"
