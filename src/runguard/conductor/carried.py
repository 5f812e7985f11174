"""What a run has used, as plain data in the store's record of it: another worker that resumes the run counts on from
there.

Limits carry over: model calls, tool calls, calls of each tool, time, nudges, side effects on their way, the stop. What
the loop rules remember stays on the worker that saw it.
"""

from collections.abc import Mapping
from dataclasses import astuple, fields
from typing import Any, Final

from runguard.accounting.budget_groups import flat_limits, lower_ceiling
from runguard.accounting.figures import Entry, Tally, add_tally
from runguard.conductor.runs import Run
from runguard.core.decision import Action, Trip
from runguard.core.events import RunInfo
from runguard.core.rules.limits import CallsPerTool, ModelCalls, ToolCalls
from runguard.ledger.ledger import StoreError

KEY: Final = "carried"  # in the record of a run
_VERSION: Final = 1
_FIGURES: Final = len(fields(Entry))


def dump(run: Run) -> dict[str, Any]:
    """Everything that counts toward the limits of a run and is not in its snapshot. JSON-ready."""
    info, tally = run.info, dict[tuple[str, str, str], Entry]()
    add_tally(tally, run.run_costs.inherited)
    add_tally(tally, run.run_costs.tally)
    return {
        "v": _VERSION,
        "pauses": run.pauses,
        "counted": {type(d).__name__: d.count for d in run.detectors if isinstance(d, ModelCalls | ToolCalls)},
        "tools": {
            tool: counted for d in run.detectors if isinstance(d, CallsPerTool) for tool, counted in d.dump().items()
        },
        "noted": [[rule, lane, key, int(action)] for rule, lane, key, action in run.noted],
        "once": {call.hex(): call_id for call, call_id in run.pending_once.items()},
        "stop": run.stopped.to_dict() if run.stopped is not None else None,
        "tally": [[*key, *astuple(entry)] for key, entry in tally.items()],
        "journal": list(run.journal.written) if run.journal is not None else None,
        "limits": [info.model_call_limit, info.max_usd, info.max_tokens],
        "labels": dict(info.labels or {}),
        **({"ceiling": list(info.ceiling)} if info.ceiling != (None, None) else {}),
    }


def belongs_to(record: Mapping[str, Any], info: RunInfo) -> bool:
    """Whether a record tells of a run of the same session: clients may send any invocation id."""
    return (record.get("app"), record.get("user"), record.get("session")) == (info.app, info.user, info.session)


def pauses(record: Mapping[str, Any]) -> int:
    """How often the run had paused when the record was written. ``StoreError`` when that cannot be read."""
    try:
        return int(record[KEY]["pauses"])
    except (KeyError, TypeError, ValueError):
        raise StoreError("the record of a paused run cannot be read") from None


def load(run: Run, record: Mapping[str, Any], now: float) -> tuple[int, int] | None:
    """Make a run count on from a record: a new one, or one that was here before. Returns where the run's journal ended.

    Raises ``StoreError`` when the record cannot be read.
    """
    try:
        carried = record[KEY]
        if carried["v"] != _VERSION:
            raise ValueError(f"version {carried['v']!r}")
        _load_counts(run, record, carried)
        run.pauses = int(carried["pauses"])
        run.started = now - float(record["seconds"])
        if run.deadline is not None:
            run.deadline.started = run.started
        run.run_costs.inherit(_read_tally(carried["tally"]))
        _load_limits(run, carried)
        run.lift()
        if carried["stop"] is not None:
            trip = Trip.from_dict(carried["stop"])
            run.stop(trip)
            run.trips.append(trip)
        journal = carried["journal"]
        return (int(journal[0]), int(journal[1])) if journal is not None else None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"the record of the paused run {run.info.run} cannot be read: {type(error).__name__}: {error}"
        ) from None


def _load_counts(run: Run, record: Mapping[str, Any], carried: Mapping[str, Any]) -> None:
    spend = run.spend
    spend.model_calls, spend.tool_calls = _count(record["model_calls"]), _count(record["tool_calls"])
    spend.prompt_tokens, spend.output_tokens = _count(record["prompt_tokens"]), _count(record["output_tokens"])
    run.nudges = _count(record["nudges"])
    for detector in run.detectors:
        if isinstance(detector, ModelCalls | ToolCalls):
            made = spend.model_calls if isinstance(detector, ModelCalls) else spend.tool_calls
            # the policy of the other worker may have had no such limit
            detector.count = _count(carried["counted"].get(type(detector).__name__, made))
        elif isinstance(detector, CallsPerTool):
            detector.load(carried["tools"])
    for rule, lane, key, action in carried["noted"]:
        run.noted[str(rule), str(lane), str(key), Action(action)] = None
    run.pending_once = {bytes.fromhex(call): str(call_id) for call, call_id in carried["once"].items()}


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _load_limits(run: Run, carried: Mapping[str, Any]) -> None:
    """A run keeps the limits and labels it began with; those named anew with the resume win."""
    info = run.info
    calls, usd, tokens = carried["limits"]
    info.max_usd = usd if info.max_usd is None else info.max_usd
    info.max_tokens = tokens if info.max_tokens is None else info.max_tokens
    info.labels = info.labels or carried["labels"]
    usd, tokens = carried.get("ceiling") or (None, None)
    info.ceiling = lower_ceiling(info.ceiling, (usd, tokens))
    run.run_costs.flat = flat_limits(info)
    if run.model_calls is not None and run.model_calls.limit == info.model_call_limit and calls:
        info.model_call_limit = run.model_calls.limit = calls


def _read_tally(rows: list[list[Any]]) -> Tally:
    return {
        (str(agent), str(model), str(tool)): Entry(*(int(figure) for figure in figures[:_FIGURES]))
        for agent, model, tool, *figures in rows
    }
