"""The policy in force, its store, and the prices of the models in use."""

import contextlib
import os
import time
from typing import Final

from runguard.cli.commands.command import CommandError
from runguard.cli.commands.model_prices import limits_usd, price_of, seen_models
from runguard.cli.commands.stores import check_file
from runguard.cli.doctor.line import Line
from runguard.core.exceptions import RunGuardError
from runguard.ledger.sqlite.backend import SqliteStore
from runguard.policy.settings import Policy, find_policy_file
from runguard.view.store_view import StoreView

_LOOK_S: Final = 3.0
_CLOCK_OFF_S: Final = 60.0


def policy_line(policy: Policy, *, of_app: bool) -> Line:
    path = find_policy_file()
    source = (
        "of the app's plugin"
        if of_app
        else str(path)
        if path is not None
        else "no policy file from here upward: the defaults"
    )
    overrides = [name for name in ("RUNGUARD_MODE", "RUNGUARD_STORE") if os.environ.get(name)]
    found = f"{source}; mode {policy.mode}" + (f"; overridden by {' and '.join(overrides)}" if overrides else "")
    if policy.mode == "enforce":
        return Line("policy", "ok", found)
    what = "decides and records, and stops nothing" if policy.mode == "shadow" else "does nothing at all"
    return Line("policy", "warning", f"{found}, which {what}", 'mode = "enforce" stops runs')


def store_line(policy: Policy) -> Line:
    if policy.store == "memory":
        return Line(
            "store",
            "ok",
            "memory: accounts, stops and trips end with each process; a durable one survives and is shared",
        )
    try:
        check_file(policy.store)
        if policy.store.startswith("sqlite:") and not (path := SqliteStore(policy.store).path).exists():
            return _missing_file(path.parent.is_dir() and os.access(path.parent, os.W_OK), str(path))
        view = StoreView(policy.store, _LOOK_S)
        off = view.now() - time.time()  # noqa: TID251 - the two clocks are compared
        view.close()
    except CommandError as error:
        return Line("store", "problem", str(error), "name a file")
    except RunGuardError as error:
        until = {"open": "calls are made and booked later", "closed": "no paid call is made"}[policy.on_outage]
        do = (
            "see to the file, or name another"
            if policy.store.startswith("sqlite:")
            else "start it, or correct its address"
        )
        return Line("store", "problem", str(error), f'{do}; until then {until} (on_outage = "{policy.on_outage}")')
    if abs(off) > _CLOCK_OFF_S:
        return Line(
            "store",
            "warning",
            f"{view.name}: its clock is {off:+.0f} s off this machine's; days and hours begin by the store's",
            "set the clocks",
        )
    return Line("store", "ok", f"{view.name} answers")


def _missing_file(can_be_made: bool, path: str) -> Line:
    if can_be_made:
        return Line("store", "ok", f"sqlite:///{path}: not there yet; the first run makes it")
    return Line(
        "store",
        "problem",
        f"sqlite:///{path}: its folder is not there or cannot be written",
        "make the folder, or name another file",
    )


def price_lines(policy: Policy, named: tuple[str, ...]) -> list[Line]:
    names = dict.fromkeys(named)
    with contextlib.suppress(RunGuardError):  # the store's own line says so
        names |= dict.fromkeys(seen_models(policy))
    if not names:
        return [Line("prices", "ok", "no model to look up; name those in use with --model, or load the app with --app")]
    found = [price_of(policy, name) for name in names]
    priced = [line["model"] for line in found if line["source"] is not None]
    lines = [Line("prices", "ok", f"known for {', '.join(priced)}")] if priced else []
    return lines + [_unpriced(policy, line["model"], line["unpriced"]) for line in found if line["source"] is None]


def _unpriced(policy: Policy, model: str, reason: str) -> Line:
    refused = limits_usd(policy) and policy.on_unpriced == "refuse"
    follows = "its calls will be refused, because dollars are limited" if refused else "its cost will be unknown"
    return Line(
        "prices",
        "problem" if refused else "warning",
        f"{model}: no price ({reason}); {follows}",
        f"runguard prices {model} shows what to add",
    )
