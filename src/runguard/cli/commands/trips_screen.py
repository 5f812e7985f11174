"""``runguard trips`` on a screen."""

from typing import Any, Final

from rich.console import Console
from rich.text import Text

from runguard.console.screen import console, heading, moment, print_table, table, usd
from runguard.core.decision import printable
from runguard.view.records import whole
from runguard.view.rows import Story, StoryRow
from runguard.view.store_view import StoreView
from runguard.view.why import WITHOUT_A_COUNT, counted, why_of

_ROWS: Final = 60
_WIDE: Final = 130
_COLOURS: Final = {"stop": "red", "block": "yellow", "nudge": "cyan", "warn": "dim"}


def print_trips(view: StoreView, found: list[dict[str, Any]], limit: int, in_all: int, rules: list[str]) -> None:
    out = console()
    if not found:
        none = (
            "no trip yet"
            if not in_all
            else f"none of {in_all} trips matches; their rules are {', '.join(printable(rules))}"
        )
        out.print(f"{view.name}: {none}", soft_wrap=True)
        return
    shown = found[:limit]
    costs = view.costs(shown)  # the cost of each run; the trip of a budget contains only the spending of the budget
    (_narrow if out.width < _WIDE else _wide)(
        out, printable([{**trip, "cost": usd(costs[trip["id"]])} for trip in shown])
    )
    if len(found) > limit:
        out.print(f"and {len(found) - limit} older; --limit shows more", style="dim")
    if view.unreadable.total:
        out.print(f"{view.unreadable.total} records could not be read", style="yellow")
    out.print("runguard trips show ID explains one and says how to continue", style="dim")


def _wide(out: Console, found: list[dict[str, Any]]) -> None:
    shown = table("when", "id", "rule", "where", "what", "cost", "", right=("cost",), whole=("when", "id", "rule"))
    for trip in found:
        mark = Text("shadow: not enforced", "cyan") if trip["shadow"] else Text("")
        shown.add_row(
            moment(trip.get("at")), trip["id"], str(trip.get("rule")), _where(trip), _what(trip), trip["cost"], mark
        )
    print_table(out, shown)


def _narrow(out: Console, found: list[dict[str, Any]]) -> None:
    """Print two lines per trip, because a table would wrap every cell."""
    for trip in found:
        mark = ("  shadow", "cyan") if trip["shadow"] else ("", "")
        out.print(Text.assemble(moment(trip.get("at")), "  ", (trip["id"], "bold"), f"  {trip.get('rule')}", mark))
        out.print(f"  {_where(trip)}  {_what(trip)}, cost {trip['cost']}", style="dim")


def _where(trip: dict[str, Any]) -> str:
    return "/".join(str(part) for part in (trip.get("app"), trip.get("user_id")) if part)


def _what(trip: dict[str, Any]) -> str:
    about = f"{trip['tool']}: " if trip.get("tool") else ""
    if trip.get("unit") == "usd":
        return f"{about}{usd(trip.get('observed'))} with the next call, limit {usd(trip.get('limit'))}"
    if trip.get("rule") in WITHOUT_A_COUNT:
        return about + why_of(trip)[0]
    return f"{about}{counted(trip.get('unit'), trip.get('observed'))}, limit {counted('', trip.get('limit'))}"


def print_trip(story: Story) -> None:
    story = printable(story)
    out, trip = console(), story.trip
    out.print(str(trip.get("message")), style="bold", soft_wrap=True)
    if trip["shadow"]:
        out.print("shadow: decided but not enforced; the run continued", style="cyan", soft_wrap=True)
    facts = {
        "id": trip["id"],
        "when": moment(trip.get("at")),
        "rule": f"{trip.get('rule')}: {_what(trip)}",
        "scope": f"{trip.get('scope')} {trip.get('scope_id') or ''}".strip(),
        "run": (
            f"{trip.get('run_id')}, app {trip.get('app') or '–'}, user {trip.get('user_id') or '–'}, session "
            f"{trip.get('session_id') or '–'}"
        ),
        "agents": " → ".join(str(name) for name in trip.get("agent_path") or ()),
        "model": trip.get("model") or "",
        "so far": (
            f"{_count(trip, 'model_calls')} model calls, {_count(trip, 'tool_calls')} tool calls, "
            f"{_count(trip, 'tokens')} "
            f"tokens, {_cost(story)}"
        ),
        "policy": trip.get("policy_digest") or "",
    }
    out.print()
    for name, fact in facts.items():
        if fact:
            out.print(Text.assemble((f"{name:<9}", "dim"), fact), soft_wrap=True)
    _evidence(out, trip)
    _timeline(out, story)
    out.print(Text.assemble("\n", heading("how to continue")))
    for line in how_to_continue(story):
        out.print(f"  {line}", soft_wrap=True)


def _count(trip: dict[str, Any], name: str) -> str:
    number = whole(trip.get(name))
    return "?" if number is None else f"{number:,}"


def _cost(story: Story) -> str:
    cost = usd(story.usd) if story.usd is not None else "cost unknown"
    return f"about {cost}" if story.trip.get("estimated") else cost


def _evidence(out: Console, trip: dict[str, Any]) -> None:
    evidence = [entry for entry in trip.get("evidence") or () if isinstance(entry, dict)]
    if not evidence:
        return
    out.print(Text.assemble("\n", heading("evidence"), ("  digests, not contents", "dim")))
    for entry in evidence:
        out.print("  " + ", ".join(f"{name} {value}" for name, value in entry.items() if value), soft_wrap=True)


def _timeline(out: Console, story: Story) -> None:
    for repeat in story.repeats:
        answers = f", {repeat.same_answer} times with the same answer" if repeat.same_answer > 1 else ""
        out.print(
            Text.assemble(
                "\n", heading("what repeated"), f"  {repeat.what} {repeat.name}: {repeat.times} times{answers}"
            ),
            soft_wrap=True,
        )
    if story.rows:
        source = "" if story.source == "steps" else "  model calls only: this run's steps were not stored"
        out.print(Text.assemble("\n", heading("the run"), (source, "dim")))
        shown = table(
            "after", "agent", "what", "", "tokens", "cost", right=("after", "tokens", "cost"), whole=("after",)
        )
        end = _end(story)
        rows = story.rows[max(end - _ROWS, 0) : end]
        if earlier := story.left_out + end - len(rows):
            shown.add_row("", "", f"… {earlier} earlier", "", "", "")
        for row in rows:
            tokens = f"{row.tokens_in or 0:,} + {row.tokens_out or 0:,}" if row.kind == "model" else ""
            shown.add_row(f"{row.after_s:.1f}s", row.agent, _row(row), _remark(row), tokens, _row_cost(row))
        if end < len(story.rows):
            shown.add_row("", "", f"… {len(story.rows) - end} later", "", "", "")
        print_table(out, shown)
    if story.usd is not None:
        later = f", {usd(story.later_usd)} after it" if story.later_usd else ""
        out.print(f"cost up to the stop: {usd(story.usd)}{later}", soft_wrap=True)
    if (ahead := story.projection) is not None:
        words = (
            f"projection: at {usd(ahead.mean_usd)} a call, ADK's own cap of {ahead.cap} calls would have let it "
            f"cost {usd(ahead.total_usd)}"
        )
        out.print(words, style="dim", soft_wrap=True)


def _row(row: StoryRow) -> Text:
    if row.kind == "decision":
        return Text(
            f"{row.decision} by {row.what}" + (f" of {row.name}" if row.name else ""), _COLOURS.get(row.decision, "")
        )
    return Text(f"{row.what} {row.name}".rstrip())


def _end(story: Story) -> int:
    """Return the position after the row of this stop; in shadow mode, and in other branches, the run continues."""
    rule = story.trip.get("rule")
    decided = [
        position
        for position, row in enumerate(story.rows, 1)
        if row.kind == "decision" and row.decision == "stop" and row.what == rule
    ]
    return decided[0] if decided else len(story.rows)


def _remark(row: StoryRow) -> str:
    again = f"same call {row.nth_call} times" if row.nth_call > 1 else ""
    same = f"same answer {row.nth_answer} times" if row.nth_answer > 1 else ""
    if row.nth_call == row.nth_answer > 1:
        again, same = f"same call and answer {row.nth_call} times", ""
    return ", ".join(part for part in (row.outcome, again, same) if part)


def _row_cost(row: StoryRow) -> str:
    if row.kind != "model":
        return ""
    return ("≈" if row.estimated else "") + usd(row.usd) if row.usd is not None else "?"


def how_to_continue(story: Story) -> list[str]:
    """Return the advice of the trip, and the command that does it if there is one."""
    return [line for line in (str(story.trip.get("resume") or ""), story.command) if line]
