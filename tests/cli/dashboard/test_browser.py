"""The page in a real browser, over a store that real runs fill."""

import json
import re
import shlex
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.adk.tools import FunctionTool

from runguard import Budget
from runguard.ledger.sqlite import SqliteStore
from tests.kit.dashboards import Seen, Served, serve, watched
from tests.kit.guarded_runs import Alive, guard, healthy, parse_document, runaway
from tests.kit.waiting import eventually

Look = Callable[..., Seen]
Serve = Callable[..., Served]
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style><svg/onload=alert(1)>",
    "javascript:alert(1)",
    "${7*7}{{7*7}}",
    "\u202egpj.exe",
    "a" * 5_000,
)
MANY = (
    "WITH n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x <= 20000) INSERT INTO records (at, kind, ref, "
    "text) SELECT ?, 'call', x, ? FROM n"
)


@pytest.fixture
def one_stop(store: str) -> str:
    runaway(guard(store), user_id="alice", app_name="docs")
    return store


@dataclass(frozen=True)
class Shop:
    """A dashboard that many tests look at: a stop that was only watched, those of a budget and of an operator, and a
    newer one of a loop.
    """

    dashboard: Served
    first: Seen  # the page that exchanged the token
    entered: Any  # its cookie


@pytest.fixture(scope="module")
def shop(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    store = f"sqlite:///{tmp_path_factory.mktemp('shop')}/guard.db"
    runaway(guard(store, mode="shadow"), user_id="bob", app_name="support")
    plugin = guard(store, budgets=[Budget(usd=0.03, per="user", window="1d")])
    healthy(plugin, 9, user_id="eve's", app_name="docs")
    plugin.guard.operator_stops.throw("user:docs/dan", "root", "again")
    healthy(plugin, user_id="dan", app_name="docs")
    runaway(guard(store), user_id="alice", app_name="docs")
    dashboard = serve(store)
    context = browser.new_context()
    first = watched(context.new_page())
    first.page.goto(dashboard.url)
    yield Shop(dashboard, first, context.storage_state())
    context.close()
    dashboard.stop()


@pytest.fixture
def enter(shop: Shop, look: Look) -> Callable[..., Seen]:
    """Opens that dashboard once more."""
    return lambda **options: look(shop.dashboard.origin, storage_state=shop.entered, **options)


def wait_for(page: Any, selector: str, text: str) -> None:
    page.wait_for_function(
        "([s, t]) => [...document.querySelectorAll(s)].some((e) => e.textContent.includes(t))", arg=[selector, text]
    )


def soon(page: Any, selector: str, text: str) -> None:
    """The same without the wait for the next question: a page asks at once when somebody comes back to it."""
    arrived = (
        "([s, t]) => "
        "{ const there = [...document.querySelectorAll(s)].some((e) => e.textContent.includes(t)); %s; return there; }"
    )
    page.wait_for_function(
        arrived % "if (!there) document.dispatchEvent(new Event('visibilitychange'))", arg=[selector, text], polling=300
    )


def test_the_page_opens_with_its_token_once(shop: Shop, look: Look) -> None:
    seen, origin = shop.first, shop.dashboard.origin
    wait_for(seen.page, "#state", "live")
    assert seen.page.url == f"{origin}/", "the token is not in the address bar"
    assert "$0." in seen.page.inner_text("#figure-usd")
    seen.page.reload()
    wait_for(seen.page, "#state", "live")
    assert all(url.startswith(origin) for url in seen.asked), "no request leaves the host"
    seen.quiet()
    other = look(shop.dashboard.url)
    assert "Look at the terminal" in other.page.inner_text("main")
    seen.page.goto("about:blank")  # it asks no more


def test_runs_stops_and_figures_appear_without_a_reload(store: str, served: Serve, look: Look) -> None:
    plugin = guard(store)
    plugin.guard.check_store()
    seen = look(served(store).url)
    page = seen.page
    wait_for(page, "#empty", "RunGuardPlugin(store=")
    assert not page.is_visible("#content")
    page.evaluate("window.stayed = true")
    healthy(plugin, user_id="bob", app_name="docs")
    wait_for(page, "#budgets .scope", "user:docs/bob")
    wait_for(page, "#budgets .more", "per day, resets in")
    assert not page.is_visible("#empty")
    wait_for(page, "#totals td", "docs")
    with Alive(plugin, user_id="carol", app_name="support"):
        soon(page, "#running td", "support / carol")
    soon(page, "#running-note", "No run is alive")
    runaway(plugin, user_id="alice", app_name="docs")
    soon(page, "#trips a", "parse_document")
    wait_for(page, "#told", "A new stop")
    plugin.guard.operator_stops.throw("user:docs/alice", "ann", "looking into it")
    soon(page, "#stops", "user:docs/alice, by ann")
    assert page.evaluate("window.stayed") is True
    seen.quiet()


def test_limits_of_single_runs_are_no_budget_to_list_and_not_denied(store: str, served: Serve, look: Look) -> None:
    healthy(guard(store, budgets=[], max_usd=2), user_id="bob", app_name="docs")
    wait_for(look(served(store).url).page, "#budgets-note", "No budget beyond single runs.")


def test_a_stop_has_its_story(enter: Look) -> None:
    seen = enter()
    page = seen.page
    page.click("#trips a")
    page.wait_for_url("**/trips/*")
    wait_for(page, "#title", "parse_document")
    figures = page.inner_text("#figures")
    assert re.search(r"\$0\.0\d+\s+cost until the stop", figures)
    assert re.search(r"about \$2\.00\s*projection\s+ADK's own cap of 500 model calls", figures)
    assert "parse_document" in page.inner_text("#repeats")
    assert "fresh counters" in page.inner_text("#resume")
    assert "alice" in page.inner_text("#facts")
    assert "the same call" in page.inner_text("#repeats")
    wait_for(page, "#timeline td", "× the same call")
    assert page.locator("#timeline tr[data-kind=decision]").count() >= 1
    assert page.locator("#timeline tbody tr:has-text('scripted-1')").count() >= 6
    assert not page.is_visible("#shadow")
    page.go_back()
    wait_for(page, "#trips a", "parse_document")
    seen.quiet()


def test_a_shadow_stop_is_marked(enter: Look) -> None:
    seen = enter()
    wait_for(seen.page, "#trips tr:last-child .badge", "shadow")
    assert not seen.page.is_visible("#trips tbody tr:first-child .badge")
    seen.page.click("#trips tbody tr:last-child a")
    wait_for(seen.page, "h1", "watched, not stopped")
    wait_for(seen.page, "#figures", "spent after it, as nothing was stopped")
    seen.quiet()


def test_stops_of_a_budget_and_of_an_operator_say_why(enter: Look) -> None:
    seen = enter()
    page = seen.page
    page.click("#trips a:has-text('Out of budget')")
    wait_for(page, "#why", "user:docs/eve's had spent $0.02 and reserved $0.00 of its $0.03.")
    assert page.inner_text("#resume").startswith("extend("), "code is not a sentence"
    assert shlex.split(page.inner_text("#command-code"))[:3] == ["runguard", "extend", "user:docs/eve's"]
    assert not page.is_visible("#repeats-title")
    assert page.inner_text("#timeline tr:has-text('scripted-1'):has-text('refused') td:last-child") == "$0.00"
    cost = page.inner_text("#figures li:first-child .figure")
    page.go_back()
    assert cost in page.inner_text("#trips tr:has-text('Out of budget')"), "the list says the same"
    page.click("#trips a:has-text('Stopped by an operator')")
    wait_for(page, "#why", "user:docs/dan was stopped by root: again")
    assert page.inner_text("#command-code").startswith("runguard resume user:docs/dan")
    assert re.search(r"\$0\.00\s+cost until the stop\s+0\s+model calls", page.inner_text("#figures"))
    seen.quiet()


def test_hostile_names_are_text_long_ones_are_cut_and_very_many_calls_are_told(
    store: str, served: Serve, look: Look
) -> None:
    plugin = guard(store)
    for name in HOSTILE:
        tool = FunctionTool(parse_document)
        tool.name = name
        runaway(plugin, tool, user_id=name)  # type: ignore[arg-type]
    plugin.guard.operator_stops.throw("user:x/" + HOSTILE[0].replace("/", ""), HOSTILE[1], HOSTILE[2])
    assert plugin.flush(10)
    with sqlite3.connect(SqliteStore(store).path) as db:
        db.execute(MANY, (plugin.guard.clock() - 60, json.dumps({"app": "docs", "usd": "0.001", "input": 1})))
    db.close()
    session = SqliteStore(store).connect(5)
    for number, name in enumerate(HOSTILE):
        session.append(
            "call",
            f"r{number}",
            json.dumps({"id": "1", "app": name, "agent": name, "model": name, "user": name, "usd": "0.5", "input": 5}),
        )
    breakers = {
        name: {"state": "open", "generation": 1, "failures": 3, "runs": [name], "opened_at": 1.0, "probe_at": None}
        for name in HOSTILE
    }
    version, text = session.get("control")
    session.put("control", version, json.dumps({**json.loads(text), "breakers": breakers}))
    seen = look(served(store).url)
    page = seen.page
    page.on("dialog", lambda dialog: seen.complaints.append(f"a dialog: {dialog.message}"))
    wait_for(page, "#figure-calls", "20,000+")
    assert re.fullmatch(r"\$2\d\.\d+\+", page.inner_text("#figure-usd"))
    assert page.get_attribute("#trips td:nth-child(2) .long", "title") == f"app / {HOSTILE[-1]}"
    assert page.evaluate("document.documentElement.scrollHeight") < 3_000
    for by in ("agent", "model", "user", "app"):
        page.check(f"#by-{by}")
        wait_for(page, "#totals th", by)
        wait_for(page, "#totals td", HOSTILE[1])
    page.click("#numbers summary")
    page.click("#budgets-more")
    page.click("#trips-more")
    for where in ("#numbers th", "#breakers td", "#trips td", "#budgets .scope", "#stop-list li"):
        wait_for(page, where, "alert(1)")

    def runs_are_shown() -> bool:
        for number, name in enumerate(HOSTILE):
            session.beat(f"r{number}", name, json.dumps({"app": name, "user": name, "seconds": 1, "model_calls": 1}))
        return HOSTILE[0] in page.inner_text("#running")

    assert eventually(runs_are_shown, 30)
    session.close()
    assert (
        page.evaluate(
            "document.querySelectorAll('main script, main img, main svg:not(.budgets svg), [onerror], [onload]').length"
        )
        == 0
    )
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    links = page.eval_on_selector_all("#trips a", "links => links.map((a) => a.getAttribute('href'))")
    assert len(links) == len(HOSTILE)
    assert all(re.fullmatch(r"/trips/[0-9a-f]+", link) for link in links)
    origin = page.url.rstrip("/").partition("/?")[0]
    for link in links:
        page.goto(origin + link)
        wait_for(page, "#state", "live")
        assert (
            page.evaluate("document.querySelectorAll('main script, main img, main svg, [onerror], [onload]').length")
            == 0
        )
        assert page.evaluate("document.documentElement.scrollHeight") < 3_000
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    seen.quiet()


def test_the_keyboard_is_enough(enter: Look) -> None:
    seen = enter()
    page = seen.page
    wait_for(page, "#trips a", "parse_document")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0, "the skip link shows itself"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.tagName + ' ' + document.activeElement.textContent"
            )
        )
        assert page.evaluate(OUTLINE) != "none", f"{reached[-1]} does not show the focus"
        if reached[-1].startswith("A "):
            break
    assert reached[:3] == ["by-app", "range-1d", "unit-usd"]
    assert "parse_document" in reached[-1]
    page.focus("#by-app")
    page.keyboard.press("ArrowRight")
    wait_for(page, "#totals th", "agent")
    wait_for(page, "#totals td", "researcher")
    assert "by=agent" in page.url
    page.focus("#trips a")
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    before = page.evaluate("[scrollY, document.activeElement.textContent]")
    with page.expect_response("**/api/overview*"):
        pass
    assert page.evaluate("[scrollY, document.activeElement.textContent]") == before, "an update moves nobody"
    page.keyboard.press("Enter")
    wait_for(page, "#title", "parse_document")
    seen.quiet()


def test_a_phone_shows_it_without_scrolling_sideways(enter: Look) -> None:
    seen = enter(viewport={"width": 360, "height": 740}, is_mobile=True, device_scale_factor=2)
    page = seen.page
    wait_for(page, "#trips a", "parse_document")
    page.click("#numbers summary")
    assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]
    assert page.get_by_role("table", name="Stops, newest first").get_by_role("cell").count() >= 5, (
        "still a table for those who do not see it"
    )
    page.click("#trips a")
    wait_for(page, "#title", "parse_document")
    assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [360, 360]
    seen.quiet()


def test_light_and_dark_can_both_be_read(enter: Look) -> None:
    seen = enter(color_scheme="light")
    page = seen.page

    def assert_readable() -> None:
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            back = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", back)[:3])) > 600) == (scheme == "light")
            assert page.evaluate(CONTRAST) == []

    wait_for(page, "#trips a", "parse_document")
    assert_readable()
    page.click("#trips a")
    wait_for(page, "#title", "parse_document")
    assert_readable()
    seen.quiet()


OUTLINE = """
() => {
  const element = document.activeElement;
  return getComputedStyle(element.type === "radio" ? element.nextElementSibling : element).outlineStyle;
}
"""
CONTRAST = """
() => {
  const channel = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const numbers = (text) => {
    const [red, green, blue, alpha] = text.match(/[\\d.]+/g).map(Number);
    const most = text.startsWith("color(srgb") ? 255 : 1;
    return [red * most, green * most, blue * most, alpha ?? 1];
  };
  const light = (rgb) => 0.2126 * channel(rgb[0]) + 0.7152 * channel(rgb[1]) + 0.0722 * channel(rgb[2]);
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour[3] > 0) layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((under, [r, g, b, a]) => under ? [r, g, b].map((v,
      i) => v * a + under[i] * (1 - a)) : [r, g, b], null);
  };
  const poor = [];
  for (const element of document.querySelectorAll("main *, header *, footer *")) {
    const words = [...element.childNodes].filter((n) => n.nodeType === 3
      && n.textContent.trim()).map((n) => n.textContent.trim()).join(" ");
    if (!words || !element.checkVisibility() || element.closest(".unseen, svg")) continue;
    const [one, two] = [light(numbers(getComputedStyle(element).color)), light(behind(element))].sort((a, b) => b - a);
    if ((one + 0.05) / (two + 0.05) < 4.5) poor.push(`${words.slice(0,
      40)}: ${((one + 0.05) / (two + 0.05)).toFixed(2)}`);
  }
  return poor;
}
"""


def test_what_goes_away_is_told_and_its_return_too(one_stop: str, served: Serve, look: Look, tmp_path: Path) -> None:
    path, away = SqliteStore(one_stop).path, tmp_path / "away"
    first = served(one_stop)
    page = look(first.url).page
    wait_for(page, "#state", "live")
    away.mkdir()
    for file in path.parent.glob(f"{path.name}*"):
        shutil.move(file, away / file.name)
    soon(page, "#state", "store away")
    wait_for(page, "#problem", "no such store")
    assert "parse_document" in page.inner_text("#trips"), "what was known stays to be seen"
    for file in away.iterdir():
        shutil.move(file, path.parent / file.name)
    soon(page, "#state", "live")
    assert not page.is_visible("#problem")

    first.stop()
    soon(page, "#state", "connection lost")
    wait_for(page, "#problem", "prints a new address")
    second = served(one_stop, "--port", str(first.port))
    soon(page, "#problem", "open the address that its terminal shows")
    page.goto(second.url)
    wait_for(page, "#state", "live")
