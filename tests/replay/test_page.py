"""The page of ``runguard replay --html`` in a real browser: nothing runs, nothing is fetched, nothing sticks out, in
light and dark.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from runguard.cli.main import main
from runguard.replay.output import Plot, number, step_of
from tests.kit.recordings import looping, working

EVIL = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">\"&'</title></svg>" + "x" * 150


@pytest.mark.parametrize(
    ("largest", "whole", "step"),
    [(1, True, 1), (1, False, 0.2), (72, True, 20), (0.0897, False, 0.02), (4, True, 1), (2.9e6, False, 1e6)],
)
def test_ticks_are_round_and_whole_where_things_are_counted(largest: float, whole: bool, step: float) -> None:
    assert step_of(largest, whole=whole) == pytest.approx(step)


def test_everything_drawn_lies_within_the_picture() -> None:
    plot = Plot("t", "x", "y", 7, 0.0897, whole="x")
    assert plot.y_max >= 0.0897
    assert plot.x(0) < plot.x(7) <= 640
    assert 0 <= plot.y(0.0897) < plot.y(0) <= 260
    assert number(0.0448) == "0.0448"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    runs = [looping(EVIL, 12), looping("false/stop", 12, success=True), working("fine", 30)]
    for step in runs[0]["steps"]:
        if "tool" in step:
            step["tool"] = EVIL
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    (tmp_path / "a<b>&.toml").write_text("max_model_calls = 5\n")
    done = CliRunner().invoke(main, ["replay", "runs.jsonl", "--against", "a<b>&.toml", "--html", "page.html"])
    assert done.exit_code == 0, done.output
    return tmp_path / "page.html"


def test_hostile_names_stay_text(page: Path) -> None:
    text = page.read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert "a<b>" not in text
    assert "a&lt;b&gt;&amp;.toml" in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_in_a_browser_nothing_runs_and_nothing_sticks_out(page: Path, scheme: Any, width: int) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    browser_path = shutil.which("chromium")
    if browser_path is None:
        pytest.skip("no chromium here")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        shown = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        asked: list[str] = []
        shown.on("request", lambda request: asked.append(request.url))
        shown.goto(page.as_uri())
        assert shown.title() == "RunGuard replay"
        assert asked == [page.as_uri()]
        assert shown.evaluate("document.documentElement.scrollWidth") <= width  # wide tables scroll within themselves
        assert shown.locator("td.id").first.inner_text().replace("\n", "") == EVIL
        assert shown.evaluate("document.querySelector('td.id').getBoundingClientRect().width") >= 100
        assert (
            shown.evaluate(
                "Math.min(...[...document.querySelectorAll('svg .tick')].map(text => "
                "text.getBoundingClientRect().height))"
            )
            >= 9
        )
        background = shown.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(17, 17, 19)")
        browser.close()
