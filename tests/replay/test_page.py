"""The page of ``runguard replay --html`` in a real browser: it loads nothing and runs only its own scripts."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from runguard.cli.main import main
from tests.kit.recordings import looping, working

EVIL = "</script><script>document.title='run'</script><img src=x onerror=\"document.title='run'\">\"&'$data" + "x" * 150


@pytest.fixture
def page(tmp_path: Path) -> Path:
    runs = [looping(EVIL, 12), looping("false/stop", 12, success=True), working("fine", 30)]
    for step in runs[0]["steps"]:
        if "tool" in step:
            step["tool"] = EVIL
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs) + "no run\n")
    (tmp_path / "a<b>&.toml").write_text("max_model_calls = 5\n")
    done = CliRunner().invoke(main, ["replay", "runs.jsonl", "--against", "a<b>&.toml", "--html", "page.html"])
    assert done.exit_code == 0, done.output
    return tmp_path / "page.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    browser_path = shutil.which("chromium")
    if browser_path is None:
        pytest.skip("no chromium here")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


def test_no_name_becomes_markup(page: Path) -> None:
    text = page.read_text()
    assert text.count("<script") == text.count("</script>") == 3, "the data, the library and the program"
    assert "<img" not in text
    assert "a<b>" not in text


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 1200), ("light", 400)])
def test_a_browser_shows_every_fact_and_loads_nothing(page: Path, browser: Any, scheme: str, width: int) -> None:
    shown = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    asked: list[str] = []
    said: list[str] = []
    shown.on("request", lambda request: asked.append(request.url))
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.goto(page.as_uri())
    assert shown.title() == "RunGuard replay"
    assert [url for url in asked if url != "data:,"] == [page.as_uri()]
    assert said == []
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.locator(".chart canvas").count() == 3
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(246, 247, 248)" if scheme == "light" else "rgb(18, 23, 26)"
    )
    told = " ".join(shown.inner_text("main").split())
    for fact in (
        "Under the defaults against a<b>&.toml",
        "stop at call 9: repetition of",
        "then 6150 tokens, $0.0165",
        "nothing",
        "stopped although labelled a success, under the defaults: 1",
        "1 records could not be read and were skipped",
        EVIL,
    ):
        assert fact in told
    rules = shown.locator("section", has_text="money after its stops").inner_text()
    assert "model_calls" in rules
    assert "repetition" in rules


def test_the_policy_of_the_page_stops_a_script_that_is_not_its_own(page: Path, browser: Any) -> None:
    shown = browser.new_page()
    page.write_text(page.read_text().replace("</main>", "</main><script>document.title = 'run'</script>"))
    shown.goto(page.as_uri())
    assert shown.title() == "RunGuard replay"
