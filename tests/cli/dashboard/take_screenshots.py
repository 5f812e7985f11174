"""Pictures of the dashboard for the docs: ``python tests/cli/dashboard/take_screenshots.py docs/images``.

Real runs on a SQLite store, of which most are then moved back in time, so that there is a day to look at.
"""

import logging
import random
import shutil
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from playwright.sync_api import sync_playwright

from runguard.core.breaker import Permit
from tests.kit.dashboards import BROWSERS, OPTIONS, serve
from tests.kit.guarded_runs import Alive, guard, healthy, runaway
from tests.kit.waiting import eventually

DAY_S = 80_000
APPS = {"docs": ("researcher", "writer"), "support": ("triage",), "billing": ("clerk",)}


def a_day(store: str, path: Path) -> None:
    """Healthy runs of several apps and users, spread over a day."""
    plugin, dice = guard(store), random.Random(11)
    for _ in range(40):
        app = dice.choice(["docs", "docs", "support", "support", "billing"])
        model = "scripted-2" if app == "docs" and dice.random() < 0.4 else "scripted-1"
        agent = dice.choice(APPS[app])
        healthy(
            plugin,
            dice.randint(1, 4),
            model=model,
            agent=agent,
            app_name=app,
            user_id=dice.choice(["alice", "bob", "carol", "dan"]),
        )
    with sqlite3.connect(path) as db:
        moved = {run: dice.uniform(600, DAY_S) for (run,) in db.execute("SELECT DISTINCT ref FROM records")}
        rows = [
            (at - moved[ref], kind, ref, text)
            for at, kind, ref, text in db.execute("SELECT at, kind, ref, text FROM records")
        ]
        db.execute("DELETE FROM records")
        db.executemany("INSERT INTO records (at, kind, ref, text) VALUES (?, ?, ?, ?)", sorted(rows))
    db.close()


def take(folder: Path) -> None:
    logging.disable()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "shop" / "guard.db"
        path.parent.mkdir()
        store = f"sqlite:///{path}"
        a_day(store, path)
        plugin = guard(store, max_usd=2)
        runaway(guard(store, mode="shadow"), user_id="bob", app_name="support", agent="triage")
        runaway(plugin, user_id="alice", app_name="docs")
        for number in range(5):
            plugin.guard.breakers.report("fetch_invoice", Permit(0), False, 0.0, f"run {number}")
        with Alive(plugin, user_id="carol", app_name="support"), sync_playwright() as driver:
            dashboard = serve(store)
            browser = driver.chromium.launch(
                executable_path=next(filter(None, map(shutil.which, BROWSERS))), args=OPTIONS
            )
            page = browser.new_page(viewport={"width": 1100, "height": 940})
            page.goto(dashboard.url)
            page.wait_for_selector("#running tbody tr")
            eventually(lambda: page.inner_text("#state") == "live")
            for scheme in ("light", "dark"):
                _picture(page, folder, "dashboard", scheme)
            page.set_viewport_size({"width": 1100, "height": 1240})
            page.click("#trips a")
            page.wait_for_selector("#timeline tbody tr")
            for scheme in ("light", "dark"):
                _picture(page, folder, "story", scheme)
            browser.close()
            dashboard.stop()


def _picture(page: Any, folder: Path, name: str, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.wait_for_timeout(700)
    # whose machine it was is nobody's business
    page.evaluate("() => { store.textContent = store.textContent.replace(/\\/\\/.*\\/shop/, '///shop') }")
    page.screenshot(path=folder / f"{name}-{scheme}.png")


if __name__ == "__main__":
    take(Path(sys.argv[1]))
