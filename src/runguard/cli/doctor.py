"""Checks of the environment: Python, google-adk, the name ``runguard``, the policy, its store and prices."""

import contextlib
import os
import platform
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

from runguard import _version
from runguard.cli.commands.command import CommandError
from runguard.cli.commands.model_prices import OLD_DAYS, REFRESH, limits_usd, list_in_use, price_of, seen_models
from runguard.cli.commands.stores import check_file
from runguard.core.errors import RunGuardError
from runguard.ledger.sqlite import SqliteStore
from runguard.policy.settings import Policy, find_policy_file
from runguard.pricing.book import updated_table
from runguard.view.store_view import StoreView

_OURS: Final = "runguard-agents"
_OLDEST_ADK: Final = (2, 3)
_OLDEST_FRAMEWORKS: Final = {"langchain": (1, 3), "openai-agents": (0, 20), "pydantic-ai-slim": (2, 20)}
_SINCE: Final = {  # release of google-adk -> what the guard can do with it
    (2, 5): "plugins see runs that fail",
    (2, 8): "the synchronous Runner.run raises exceptions",
    (2, 11): "tool nodes of a Workflow are checked",
}
_LOOK_S: Final = 3.0
_CLOCK_OFF_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check, and what to do if something is wrong."""

    check: str
    state: Literal["ok", "warning", "problem"]
    found: str
    do: str = ""


def python_line() -> CheckResult:
    return CheckResult("python", "ok", f"{platform.python_version()} at {sys.executable}")


def adk_line() -> CheckResult:
    if not has_adk():
        if _installed_frameworks():
            return CheckResult("google-adk", "ok", "not installed, and only needed for agents of ADK")
        found = "google-adk is not installed: guarded functions work, the plugin and install() do not"
        return CheckResult("google-adk", "warning", found, "pip install 'runguard-agents[adk]'")
    version = metadata.version("google-adk")
    number = _number(version)
    if number < _OLDEST_ADK:
        return CheckResult(
            "google-adk",
            "problem",
            f"{version} is too old: RunGuard needs 2.3 or newer",
            "pip install -U 'runguard-agents[adk]'",
        )
    present = [words for since, words in _SINCE.items() if number >= since]
    missing = [f"{words} (since {'.'.join(map(str, since))})" for since, words in _SINCE.items() if number < since]
    found = "; ".join([f"{version}: plugins, workflows, compaction", *present])
    return CheckResult("google-adk", "ok", found + (f". Not in this release: {'; '.join(missing)}" if missing else ""))


def _number(version: str) -> tuple[int, int]:
    parts = [int("".join(sign for sign in part if sign.isdigit()) or 0) for part in version.split(".")[:2]]
    return parts[0], parts[1] if len(parts) > 1 else 0


def has_adk() -> bool:
    try:
        metadata.version("google-adk")
    except metadata.PackageNotFoundError:
        return False
    return True


def framework_lines() -> list[CheckResult]:
    """The other frameworks that are installed: one line, or one for each that is too old."""
    installed, lines = _installed_frameworks(), []
    for name, version in installed.items():
        oldest = _OLDEST_FRAMEWORKS[name]
        if _number(version) < oldest:
            found = f"{name} {version} is too old: RunGuard needs {'.'.join(map(str, oldest))} or newer"
            extra = name.removesuffix("-slim")
            lines.append(CheckResult("frameworks", "problem", found, f"pip install -U 'runguard-agents[{extra}]'"))
    if installed and not lines:
        found = ", ".join(f"{name} {version}" for name, version in installed.items())
        lines.append(CheckResult("frameworks", "ok", found))
    return lines


def _installed_frameworks() -> dict[str, str]:
    found = {}
    for name in _OLDEST_FRAMEWORKS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def name_line() -> CheckResult:
    """Check that ``import runguard`` finds this package; other packages have the same name."""
    origin = Path(_version.__file__).resolve().with_name("__init__.py")
    others = _other_distributions()
    if others:
        found = (
            f"another distribution is installed under the name runguard: {', '.join(others)}; imports may mix the two"
        )
        return CheckResult(
            "runguard",
            "problem",
            found,
            f"pip uninstall {others[0].split()[0]}, then pip install --force-reinstall {_OURS}",
        )
    if shadows := _shadows(origin):
        found = (
            f"{shadows[0]} has the name runguard, too: programs started here may import it instead of {origin.parent}"
        )
        return CheckResult("runguard", "problem", found, "rename or remove it, or start programs from another folder")
    try:
        installed = metadata.version(_OURS)
    except metadata.PackageNotFoundError:
        return CheckResult(
            "runguard",
            "warning",
            f"{_version.__version__} at {origin.parent}, imported without being installed",
            f"pip install {_OURS}",
        )
    if installed != _version.__version__:
        found = f"{_version.__version__} at {origin.parent} is imported, but {_OURS} {installed} is installed"
        return CheckResult(
            "runguard", "warning", found, f"pip install --force-reinstall {_OURS}, or fix the import path"
        )
    return CheckResult("runguard", "ok", f"{_version.__version__} at {origin.parent}")


def _other_distributions() -> list[str]:
    names = {name for name in metadata.packages_distributions().get("runguard", ()) if name != _OURS}
    with contextlib.suppress(metadata.PackageNotFoundError):
        names.add(metadata.distribution("runguard").metadata["Name"])
    return sorted(f"{name} {metadata.version(name)}" for name in names)


def _shadows(origin: Path) -> list[Path]:
    """Return other modules named runguard on the path or in the working directory, which many programs search first."""
    places = dict.fromkeys(Path(entry or ".").resolve() for entry in (".", *sys.path))
    candidates = [place / name for place in places for name in ("runguard/__init__.py", "runguard.py")]
    return [path for path in candidates if os.path.isfile(path) and path.resolve() != origin]  # noqa: PTH113 - a file without read permission counts as missing


def policy_line(policy: Policy, *, of_app: bool) -> CheckResult:
    path = find_policy_file()
    source = (
        "of the app's plugin"
        if of_app
        else str(path)
        if path is not None
        else "no policy file in this folder or its parents: the defaults"
    )
    overrides = [name for name in ("RUNGUARD_MODE", "RUNGUARD_STORE") if os.environ.get(name)]
    found = f"{source}; mode {policy.mode}" + (f"; overridden by {' and '.join(overrides)}" if overrides else "")
    if policy.mode == "enforce":
        return CheckResult("policy", "ok", found)
    what = "decides and records but stops nothing" if policy.mode == "shadow" else "does nothing"
    return CheckResult("policy", "warning", f"{found}, which {what}", 'mode = "enforce" stops runs')


def store_line(policy: Policy) -> CheckResult:
    if policy.store == "memory":
        return CheckResult(
            "store",
            "ok",
            "memory: accounts, stops and trips end with the process; a durable store keeps and shares them",
        )
    try:
        check_file(policy.store)
        if policy.store.startswith("sqlite:") and not (path := SqliteStore(policy.store).path).exists():
            return _missing_file(path.parent.is_dir() and os.access(path.parent, os.W_OK), str(path))
        view = StoreView(policy.store, _LOOK_S)
        off = view.now() - time.time()  # noqa: TID251 - compares the two clocks
        forgets = view.forgets_in_a_crash()
        view.close()
    except CommandError as error:
        return CheckResult("store", "problem", str(error), "name a file")
    except RunGuardError as error:
        until = {"open": "RunGuard allows calls and books them later", "closed": "RunGuard allows no paid call"}[
            policy.on_outage
        ]
        do = (
            "fix the file, or name another"
            if policy.store.startswith("sqlite:")
            else "start it, or correct its address"
        )
        return CheckResult(
            "store", "problem", str(error), f'{do}; until then {until} (on_outage = "{policy.on_outage}")'
        )
    if abs(off) > _CLOCK_OFF_S:
        return CheckResult(
            "store",
            "warning",
            f"{view.name}: its clock is {off:+.0f} s off this machine's; days and hours begin by the store's clock",
            "synchronize the clocks",
        )
    if forgets:
        return CheckResult(
            "store",
            "warning",
            f"{view.name} answers, but keeps no append-only file: if the server crashes, it forgets what was spent "
            "since its last snapshot, and that money can be spent again",
            "set appendonly yes on the server",
        )
    return CheckResult("store", "ok", f"{view.name} answers; what it holds {view.durability()}")


def _missing_file(can_be_made: bool, path: str) -> CheckResult:
    if can_be_made:
        return CheckResult("store", "ok", f"sqlite:///{path}: does not exist yet; the first run creates it")
    return CheckResult(
        "store",
        "problem",
        f"sqlite:///{path}: its folder is missing or not writable",
        "create the folder, or name another file",
    )


def price_lines(policy: Policy, named: tuple[str, ...]) -> list[CheckResult]:
    names = dict.fromkeys(named)
    with contextlib.suppress(RunGuardError):  # the check of the store reports this
        names |= dict.fromkeys(seen_models(policy))
    if not names:
        return [
            CheckResult("prices", "ok", "no model to look up; name models with --model, or load the app with --app")
        ]
    found = [price_of(policy, name) for name in names]
    priced = [line["model"] for line in found if line["source"] is not None]
    lines = [CheckResult("prices", "ok", f"known for {', '.join(priced)}")] if priced else []
    return lines + [_unpriced(policy, line["model"], line["unpriced"]) for line in found if line["source"] is None]


def _unpriced(policy: Policy, model: str, reason: str) -> CheckResult:
    refused = limits_usd(policy) and policy.on_unpriced == "refuse"
    follows = (
        "RunGuard will refuse its calls, because the policy limits dollars" if refused else "its cost will be unknown"
    )
    return CheckResult(
        "prices",
        "problem" if refused else "warning",
        f"{model}: no price ({reason}); {follows}",
        f"runguard prices {model} shows what to add",
    )


def list_line(policy: Policy) -> CheckResult:
    """Report the price list in use, and warn when it is old."""
    if policy.prices_source == "table":
        try:
            updated_table()
        except ValueError as error:
            return CheckResult("price list", "warning", str(error), "runguard prices --update writes a new one")
    used = list_in_use(policy.prices_source)
    found = f"{used['source']}, {used['days_old']} {'day' if used['days_old'] == 1 else 'days'} old"
    if not used["old"]:
        return CheckResult("price list", "ok", found)
    do = REFRESH if policy.prices_source == "table" else "pip install -U genai-prices"
    return CheckResult("price list", "warning", f"{found}: prices may have changed (the limit is {OLD_DAYS} days)", do)
