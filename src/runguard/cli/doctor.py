"""``runguard doctor``: check the installation and the user's app, and prove that a stop works."""

import asyncio
import contextlib
import functools
import logging
import os
import platform
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module, metadata
from operator import attrgetter
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, Literal

from rich.text import Text

from runguard import _version
from runguard.cli.demo import AdkMissingError, defaults, load
from runguard.cli.main import CommandError, print_json
from runguard.cli.policy_commands import (
    OLD_DAYS,
    REFRESH,
    limits_usd,
    list_in_use,
    policy_here,
    price_of,
    seen_models,
)
from runguard.cli.store_commands import check_file
from runguard.console import console
from runguard.core.decision import printable
from runguard.core.errors import PolicyError, RunGuardError, RunStoppedError, did_you_mean
from runguard.ledger.ledger import StoreDeniedError
from runguard.ledger.memory import check_store, in_memory
from runguard.ledger.sqlite import SqliteStore
from runguard.policy.settings import Policy, find_policy_file
from runguard.pricing.book import prices_per_token, updated_table
from runguard.view.store import StoreView

# ---- every check, with a live test that stops agents on this machine's ADK

_UNSTOPPED = 30  # a model that was called this often was not stopped


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check, and what to do if something is wrong."""

    check: str
    state: Literal["ok", "warning", "problem"]
    found: str
    do: str = ""


_COLOURS: Final = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def run(target: str | None, models: tuple[str, ...], store: str | None, as_json: bool) -> int:
    lines = examine(target, models, store)
    problems, warnings = (sum(line.state == state for line in lines) for state in ("problem", "warning"))
    if as_json:
        print_json({"ok": not problems, "checks": lines})
        return int(problems > 0)
    out = console()
    for line in lines:
        # indent an error of several lines below its heading
        found = f"\n{'':20}".join(printable(line.found.split("\n")))
        state, check = (f"{line.state:<8}", _COLOURS[line.state]), (f"{line.check:<12}", "bold")
        out.print(Text.assemble(state, check, found), soft_wrap=True)
        if line.do:
            out.print(f"{'':20}→ {printable(line.do)}", soft_wrap=True)
    counted = [
        f"{many or 'no'} {word}{'s' * (many != 1)}" for many, word in ((problems, "problem"), (warnings, "warning"))
    ]
    out.print(", ".join(counted), style="dim")
    return int(problems > 0)


def examine(target: str | None, models: tuple[str, ...], store: str | None) -> list[CheckResult]:
    """Run all checks; ``target`` is the app to load.

    The live test runs first, before code of the app can change anything, and is reported last.
    """
    loader = loader_of(target) if target is not None else None
    adk = adk_line()
    live = [] if adk.state == "problem" else [self_test()]
    app = load_application(target, loader) if target is not None and loader is not None else Application([])
    python = CheckResult("python", "ok", f"{platform.python_version()} at {sys.executable}")
    lines = [python, name_line(), adk, *framework_lines(), *app.lines]
    try:
        policy = policy_here(store) if app.policy is None else app.policy
        if app.policy is not None and store is not None:
            check_store(store)
            policy = policy.model_copy(update={"store": store})
    except PolicyError as error:
        lines.append(CheckResult("policy", "problem", str(error), "correct it, then run `runguard check`"))
    else:
        lines += [
            policy_line(policy, of_app=app.policy is not None),
            store_line(policy),
            list_line(policy),
            *price_lines(policy, (*models, *app.models)),
        ]
    return lines + live


def self_test() -> CheckResult:
    """Prove that a stop works here: on real ADK, or on guarded functions where google-adk is not installed."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        if has_adk():
            play = load()
            with defaults(), play.quiet():
                found = asyncio.run(_stops())
        else:
            with defaults():
                found = _functions_stop()
    except AdkMissingError as error:
        return CheckResult("self-test", "problem", str(error), "pip install -U 'runguard-agents[adk]'")
    except Exception as error:  # an error here would also break the first guarded run
        do = "report it with the versions above"
        return CheckResult("self-test", "problem", f"a stop does not work here: {type(error).__name__}: {error}", do)
    finally:
        logging.disable(before)
    return CheckResult("self-test", "ok", found)


def _functions_stop() -> str:
    from runguard.calls.functions import guard

    made: list[int] = []

    def look() -> dict[str, Any]:
        """Do the same step again."""
        made.append(1)
        return {"sig": "look", "usd": 0}

    def calls_until_stopped(**settings: Any) -> int:
        made.clear()
        call = guard(look, **settings)
        with contextlib.suppress(RunStoppedError):
            for _ in range(_UNSTOPPED):
                call()
        return len(made)

    limited = calls_until_stopped(budget={"max_calls": 3})
    _need(limited == 3, f"3 calls were allowed, {limited} were made")
    looping = calls_until_stopped(loop={"repeats": 4})
    _need(looping == 4, f"a loop of 4 was to be stopped, {looping} calls were made")
    return f"a guarded function was stopped after {limited} calls by a limit of 3, and after {looping} by a loop rule"


async def _stops() -> str:
    from google.adk.agents import LlmAgent
    from google.adk.sessions import InMemorySessionService

    from runguard.adk.plugin import RunGuardPlugin
    from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, run, text

    def look(at: str) -> dict[str, int]:
        """Give the same answer each time."""
        return {"seen": 1}

    def endless() -> tuple[LlmAgent, ScriptedModel]:
        model = ScriptedModel(lambda n, _: call("look", at="it") if n < _UNSTOPPED else text("not stopped"))
        return LlmAgent(name="self_test", model=model, tools=[look]), model

    agent, model = endless()
    limited = await run(agent, plugins=[RunGuardPlugin(max_model_calls=3)])
    assert_stopped(limited, "model_calls")
    assert_calls_answered(limited.session)
    _need(model.calls == 3, f"3 model calls were allowed, {model.calls} were made")

    agent, model = endless()
    looping = await run(agent, plugins=[RunGuardPlugin()])
    rule, loop_calls = assert_stopped(looping).rule, model.calls
    assert_calls_answered(looping.session)

    agent, model = endless()
    plugin, sessions = RunGuardPlugin(max_model_calls=1), InMemorySessionService()
    plugin.stop("all", actor="doctor", reason="self-test")
    switched = await run(agent, plugins=[plugin], session_service=sessions)
    assert_stopped(switched, "kill_switch")
    _need(model.calls == 0, f"the kill switch let {model.calls} model calls through")
    plugin.resume("all")
    await run(agent, plugins=[plugin], session_service=sessions, session_id="s2")
    _need(model.calls == 1, "no call runs after resume")
    loop = f"a loop was stopped by {rule} after {loop_calls}"
    return (
        f"on real ADK a limit of 3 model calls stopped after 3, {loop}, the kill switch stopped a run before its "
        "first call; every tool call was answered"
    )


def _need(held: bool, otherwise: str) -> None:
    if not held:
        raise AssertionError(otherwise)


# ---- the environment: Python, google-adk, the name ``runguard``, the policy, its store and prices

_OURS: Final = "runguard-agents"
_OUR_FOLDER: Final = str(Path(_version.__file__).parent)
_OLDEST_ADK: Final = (2, 3)
_OLDEST_FRAMEWORKS: Final = {  # package -> the extra that brings it, and its oldest release
    "langchain": ("langchain", (1, 3)),
    "openai-agents": ("openai-agents", (0, 20)),
    "pydantic-ai-slim": ("pydantic-ai", (2, 20)),
    "strands-agents": ("strands", (1, 62)),
    "agent-framework-core": ("agent-framework", (1, 23)),
}
_SINCE: Final = {  # release of google-adk -> what the guard can do with it
    (2, 5): "plugins see runs that fail",
    (2, 8): "the synchronous Runner.run raises exceptions",
    (2, 11): "tool nodes of a Workflow are checked",
}
_LOOK_S: Final = 3.0
_CLOCK_OFF_S: Final = 60.0


def adk_line() -> CheckResult:
    if not has_adk():
        if any(map(_version_of, _OLDEST_FRAMEWORKS)):
            return CheckResult("google-adk", "ok", "not installed, and only needed for agents of ADK")
        found = "google-adk is not installed: guarded functions work, the plugin and install() do not"
        return CheckResult("google-adk", "warning", found, "pip install 'runguard-agents[adk]'")
    version = _version_of("google-adk")
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
    return bool(_version_of("google-adk"))


def _version_of(package: str) -> str:
    """Return the installed release of a package, "" for one that is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def framework_lines() -> list[CheckResult]:
    """Return the other frameworks that are installed: one line, or one for each that is too old."""
    installed, lines = [], []
    for name, (extra, oldest) in _OLDEST_FRAMEWORKS.items():
        if version := _version_of(name):
            installed.append(f"{name} {version}")
            if _number(version) < oldest:
                found = f"{name} {version} is too old: RunGuard needs {'.'.join(map(str, oldest))} or newer"
                lines.append(CheckResult("frameworks", "problem", found, f"pip install -U 'runguard-agents[{extra}]'"))
    if installed and not lines:
        lines.append(CheckResult("frameworks", "ok", ", ".join(installed)))
    return lines


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
    installed = _version_of(_OURS)
    if not installed:
        found = f"{_version.__version__} at {origin.parent}, imported without being installed"
        return CheckResult("runguard", "warning", found, f"pip install {_OURS}")
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
        "of the app's guard"
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
    if in_memory(policy.store):
        return CheckResult(
            "store",
            "ok",
            "memory: accounts, stops and trips end with the process; a durable store keeps and shares them",
        )
    try:
        check_file(policy.store)
        if policy.store.startswith("sqlite:") and not (path := SqliteStore(policy.store).path).exists():
            if path.parent.is_dir() and os.access(path.parent, os.W_OK):
                return CheckResult("store", "ok", f"sqlite:///{path}: does not exist yet; the first run creates it")
            found = f"sqlite:///{path}: its folder is missing or not writable"
            return CheckResult("store", "problem", found, "create the folder, or name another file")
        view = StoreView(policy.store, _LOOK_S)
        off = view.now() - time.time()  # noqa: TID251 - compares the two clocks
        forgets = view.forgets_in_a_crash()
        view.close()
    except CommandError as error:
        return CheckResult("store", "problem", str(error), "name a file")
    except StoreDeniedError as error:  # no run can begin, whatever on_outage says
        return CheckResult("store", "problem", str(error), "correct the store's URL or its rights")
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


def price_lines(policy: Policy, named: tuple[str, ...]) -> list[CheckResult]:
    """Report the models that have a price and those without, and prices that were given per token."""
    lines = [
        CheckResult("prices", "warning", warning, "correct the price in the policy")
        for warning in prices_per_token(policy.prices, policy.prices_source)
    ]
    names = dict.fromkeys(named)
    with contextlib.suppress(RunGuardError):  # the check of the store reports this
        names |= dict.fromkeys(seen_models(policy))
    found = [price_of(policy, name) for name in names]
    priced = [line["model"] for line in found if line["source"] is not None]
    if priced or not names:
        none = "no model to look up; name models with --model, or load the app with --app"
        lines.append(CheckResult("prices", "ok", f"known for {', '.join(priced)}" if priced else none))
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
    told = f"{found}: prices may have changed (the limit is {OLD_DAYS} days)"
    return CheckResult("price list", "warning", told, REFRESH)


# ---- the user's app: whether it and the agents it calls are guarded, the order of its plugins, its models


@dataclass(slots=True)
class Application:
    """The checks, policy and models of an app."""

    lines: list[CheckResult]
    policy: Policy | None = None
    models: list[str] = field(default_factory=list)


def load_application(target: str, loader: Callable[[], Any]) -> Application:
    """Import the app. Its code runs; its output goes to stderr."""
    if Path(target).exists() and (missing := _adk_missing(target)) is not None:  # ADK loads a folder
        return missing
    try:
        with contextlib.redirect_stdout(sys.stderr), _here_first():
            loaded = loader()
    except (Exception, SystemExit) as error:
        do = (
            "fix the error; adk web would fail as well"
            if Path(target).exists()
            else "fix the error, or name another module:attribute"
        )
        return Application(
            [
                CheckResult(
                    "app", "problem", f"{target} cannot be loaded: {type(error).__name__}: {error}{_place(error)}", do
                )
            ]
        )
    if _kind(loaded) not in ("", "ADK"):
        root, others = find_agents(loaded, target)
        agents = [root, *others] if root is not None else others
        policy = next((agent.guard.guard.policy for agent in agents if agent.guard is not None), None)
        names = dict.fromkeys(name for agent in agents for name in agent.models if name)
        return Application(agent_lines(target, root, others), policy, list(names))
    if _adk_missing(target) is not None:  # then it cannot be an app of ADK
        return _no_app(target, loaded)
    return _adk_application(target, loaded)


def _adk_missing(target: str) -> Application | None:
    try:
        import runguard.adk.plugin  # noqa: F401
    except ImportError:
        found = f"{target}: a folder or file is loaded as an app of ADK, and google-adk is not installed, or too old"
        do = "name an agent of another framework as module:attribute, or pip install -U 'runguard-agents[adk]'"
        return Application([CheckResult("app", "problem", found, do)])
    return None


def _no_app(target: str, loaded: Any) -> Application:
    found = (
        f"{target} is a {type(loaded).__name__}; it must be an App, a Runner or an agent of ADK, or an agent of "
        "LangChain, the OpenAI Agents SDK, Pydantic AI, Strands or Microsoft Agent Framework"
    )
    return Application([CheckResult("app", "problem", found, "name another attribute")])


def _adk_application(target: str, loaded: Any) -> Application:
    from runguard.adk.patching import IN_USE
    from runguard.adk.plugin import RunGuardPlugin

    plugins = _plugins(loaded)
    if plugins is None:
        return _no_app(target, loaded)
    models = list(_models(loaded))
    own = next((plugin for plugin in plugins if isinstance(plugin, RunGuardPlugin)), None)
    guard = own or IN_USE.installed
    policy = (
        guard.guard.policy
        if guard is not None
        else next((model.guard.policy for _, model in models if model is not None), None)
    )
    _, called = find_agents(loaded, target)  # by tools: agents of other frameworks, other Runners
    names = [name for name, _ in models if name] + [name for agent in called for name in agent.models if name]
    lines = [_order(target, plugins, own, guard, models), *agent_lines(target, None, called)]
    if policy is not None:
        lines += _tool_lines(
            policy, [tool for part in _tree(loaded, set()) for tool in getattr(part, "tools", None) or ()]
        )
    return Application(lines, policy, list(dict.fromkeys(names)))


def _order(target: str, plugins: list[Any], own: Any, guard: Any, models: list[tuple[str, Any]]) -> CheckResult:
    if guard is None:
        if models and all(model is not None for _, model in models):
            return CheckResult("plugins", "ok", f"{target} is guarded by its models (GuardedLlm)")
        found = f"{target} is not guarded: it has no RunGuardPlugin and does not call runguard.install()"
        do = (
            "call runguard.install() in agent.py, use App(..., plugins=[RunGuardPlugin()]), or start it with "
            "--extra_plugins runguard.adk.RunGuardPlugin"
        )
        return CheckResult("plugins", "problem", found, do)
    if guard.policy_error is not None:
        return CheckResult(
            "plugins",
            "problem",
            f"every run of {target} is refused: {guard.policy_error}",
            "correct the policy, then run `runguard check`",
        )
    if own is None:
        return CheckResult("plugins", "ok", f"{target} is guarded by runguard.install(), which puts its plugin first")
    before = [type(plugin).__name__ for plugin in plugins[: plugins.index(own)]]
    if before:
        found = f"RunGuardPlugin comes after {', '.join(before)}: an earlier plugin that answers a call hides it"
        return CheckResult("plugins", "problem", found, "put RunGuardPlugin first in App(plugins=[...])")
    from runguard.adk.runner import overruled_settings

    if differing := overruled_settings(own):
        return CheckResult("plugins", "warning", differing, "keep one of the two policies")
    return CheckResult(
        "plugins",
        "ok",
        f"RunGuardPlugin is the first of {len(plugins)} plugin{'' if len(plugins) == 1 else 's'} of {target}",
    )


def _tool_lines(policy: Policy, tools: list[Any]) -> list[CheckResult]:
    """Warn about rules for tools whose names look mistyped: such a rule has no effect."""
    found = []
    known = [str(getattr(tool, "name", None) or getattr(tool, "__name__", "")) for tool in tools]
    for name in policy.tools:
        hint = did_you_mean(name, known, cutoff=0.8, shown=0)
        if hint and not any(fnmatchcase(tool, name) for tool in known):
            text = f"tools.{name}: the app has no such tool; {hint}"
            found.append(CheckResult("tools", "warning", text, "correct the name: this rule has no effect"))
    return found


# ---- loading the app


def loader_of(target: str) -> Callable[[], Any]:
    """Return a function that loads the target; raise if it is neither a folder nor module:attribute."""
    path = Path(target)
    if path.name == "agent.py" and path.is_file():
        path = path.parent
    if path.is_dir() or (path.suffix == ".py" and path.is_file()):
        return lambda: _from_folder(path.resolve())
    module, colon, attribute = target.partition(":")
    if not colon or not module or not attribute or os.sep in module:
        raise CommandError(f"--app {target}: no such folder. Pass an agent folder as for adk web, or module:attribute")
    return lambda: attrgetter(attribute)(import_module(module))


def _from_folder(path: Path) -> Any:
    from google.adk.cli.utils.agent_loader import AgentLoader

    return AgentLoader(str(path.parent)).load_agent(path.stem if path.is_file() else path.name)


@contextlib.contextmanager
def _here_first() -> Iterator[None]:
    """Put the working directory on the import path, as ``python -m`` and ``adk`` do."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _place(error: BaseException) -> str:
    """Return the place of the error in the user's own code."""
    theirs = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(part in frame.filename for part in ("importlib", "site-packages", _OUR_FOLDER))
    ]
    return f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""


# ---- inspecting an app of ADK


def _plugins(loaded: Any) -> list[Any] | None:
    """Return the plugins of an App or Runner, an empty list for an agent, None for anything else."""
    from google.adk.apps import App
    from google.adk.runners import Runner
    from google.adk.workflow import BaseNode

    if isinstance(loaded, App):
        return list(loaded.plugins)
    if isinstance(loaded, Runner):
        return list(loaded.plugin_manager.plugins)
    return [] if isinstance(loaded, BaseNode) else None


def _models(loaded: Any) -> Iterator[tuple[str, Any]]:
    """Yield every model of a tree of agents: its name, and the model itself if it is a GuardedLlm."""
    from runguard.adk.guarded_llm import GuardedLlm

    for part in _tree(loaded, set()):
        if (model := getattr(part, "model", None)) and getattr(part, "tools", None) is not None:
            name = model if isinstance(model, str) else str(getattr(model, "model", ""))
            yield name, model if isinstance(model, GuardedLlm) else None


def _tree(part: Any, seen: set[int]) -> Iterator[Any]:
    """Yield a part of an application and everything below it, each once."""
    if part is not None and id(part) not in seen:
        seen.add(id(part))
        yield part
        below = (getattr(part, "root_agent", None), getattr(part, "agent", None))
        nodes = getattr(getattr(part, "graph", None), "nodes", None)
        for one in (
            *below,
            *(getattr(part, "sub_agents", None) or ()),
            *(getattr(part, "tools", None) or ()),
            *(nodes or ()),
        ):
            yield from _tree(one, seen)


# ---- agents of other frameworks than ADK: is each guarded, what does its framework hide?
# A class is looked up only where the application has imported it, so this module imports no framework.

_LINES: Final = 20  # of one kind
_UNNAMED: Final = "LangGraph"  # the name of a graph that was given none
_HOSTED: Final = ("WebSearchTool", "FileSearchTool", "CodeInterpreterTool", "ImageGenerationTool", "HostedMCPTool")


@dataclass(slots=True)
class FoundAgent:
    """An agent that the application can run."""

    name: str
    kind: str
    do: str  # how to guard it
    guard: Any = None  # the adapter that guards it
    calls_models: bool = True
    used_by: str = ""
    models: list[str] = field(default_factory=list)
    hidden: list[tuple[str, str]] = field(default_factory=list)  # what the guard cannot see, and what to do

    @property
    def is_guarded(self) -> bool:
        return self.guard is not None


def find_agents(root: object, target: str) -> tuple[FoundAgent | None, list[FoundAgent]]:
    """``root``, if it is an agent of a known framework, and all other agents that it can call."""
    first: FoundAgent | None = None
    others: list[FoundAgent] = []
    seen, waiting = {id(root)}, [(root, target)]
    while waiting:
        one, name = waiting.pop(0)
        ends = list(_ends(one))
        if kind := _kind(one):
            agent: FoundAgent = _KINDS[kind][2](one, ends)
            agent.name = agent.name or (target if one is root else "without a name")
            agent.used_by, name = name, agent.name
            if one is root:
                first = agent
            else:
                others.append(agent)
        for end in ends:
            if id(end) not in seen and _kind(end):
                seen.add(id(end))
                waiting.append((end, name))
    return first, others


def agent_lines(target: str, root: FoundAgent | None, agents: list[FoundAgent]) -> list[CheckResult]:
    """One line for the agent that ``target`` names, and one for each other agent that is not guarded."""
    lines = [] if root is None else [_root_line(target, root)]
    agents = [agent for agent in agents if agent.calls_models]
    unguarded = [agent for agent in agents if not agent.is_guarded]
    for agent in unguarded[:_LINES]:
        found = f"agent {agent.name} of {agent.kind}, which {agent.used_by} can call, is not guarded"
        lines.append(CheckResult("sub-agents", "problem", found, agent.do))
    if agents and not unguarded:
        many = f"the {len(agents)} agents" if len(agents) > 1 else f"the agent {agents[0].name}"
        lines.append(CheckResult("sub-agents", "ok", f"{many} that {target} can call: guarded"))
    for agent in agents if root is None else [root, *agents]:
        hidden = list(dict.fromkeys(agent.hidden))[:_LINES] if agent.is_guarded else []
        lines += [CheckResult("hidden", "warning", f"{agent.name}: {what}", do) for what, do in hidden]
    return lines


def _root_line(target: str, root: FoundAgent) -> CheckResult:
    if not root.calls_models:
        return CheckResult("guard", "ok", f"{target} is a graph of {root.kind} that calls no chat model of its own")
    if root.is_guarded:
        by = type(root.guard).__name__
        return CheckResult("guard", "ok", f"{target} is an agent of {root.kind}, guarded by {by}")
    return CheckResult("guard", "problem", f"{target} is an agent of {root.kind} and is not guarded", root.do)


# ---- inspecting an agent of each framework


def _ends(one: object) -> Iterator[Any]:
    guard: Any = getattr(one, "runguard", None) if _kind(one) == "OpenAI Agents" else None
    for other in reachable(one, lambda other: _is_end(other) or _is_middleware(other), _is_end):
        # what a guarded agent runs gets its guard when it runs
        yield guard.guarded(other) if guard is not None and _kind(other) == "OpenAI Agents" else other
    for hand_off in getattr(one, "handoffs", ()) if guard is not None else ():
        reference = getattr(hand_off, "_agent_ref", None)
        if reference is not None and (target := reference()) is not None:
            yield guard.guarded(target)


def _is_end(one: object) -> bool:
    return _kind(one) != "" or _is_chat_model(one)


def _kind(one: object) -> str:
    """Return the framework of an agent, "" for any other object."""
    return next((kind for kind, (module, name, _) in _KINDS.items() if isinstance(one, _class(module, name))), "")


def _graph(graph: Any, ends: list[Any]) -> FoundAgent:
    do = "give each agent one RunGuardMiddleware, the same for all, or wrap a graph's chat model in GuardedChatModel"
    name = str(getattr(graph, "name", ""))
    found = FoundAgent("" if name == _UNNAMED else name, "LangChain", do)
    own, guarded_model = (
        _class("runguard.langchain.middleware", "RunGuardMiddleware"),
        _class("runguard.langchain.chat_model", "GuardedChatModel"),
    )
    calling = getattr(getattr(graph.nodes.get("model"), "bound", None), "func", None)
    found.guard = next((hook for hook in _hooks_in(calling) if isinstance(hook, own)), None)
    models = [end for end in ends if _is_chat_model(end)]
    found.models = [_model_name(model) for model in models]
    found.calls_models = bool(models)
    if not found.is_guarded and models and all(isinstance(model, guarded_model) for model in models):
        found.guard = models[0]
    for caller, model in _models_aside(graph, [end for end in ends if _is_middleware(end)]):
        if not isinstance(model, guarded_model):
            what = f"{caller} calls the model {_model_name(model) or type(model).__name__} itself, unseen by the guard"
            found.hidden.append((what, "use GuardedChatModel(model, ...) there"))
    return found


def _hooks_in(calling: object) -> Iterator[object]:
    """Yield the middleware around the model of an agent: LangChain nests its hooks in one another, as closures."""
    waiting, seen = [calling], set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, MethodType):
            yield one.__self__
        elif isinstance(one, FunctionType) and id(one) not in seen:
            seen.add(id(one))
            waiting += [cell.cell_contents for cell in one.__closure__ or () if cell != CellType()]


def _models_aside(graph: Any, middleware: list[Any]) -> Iterator[tuple[str, Any]]:
    """Chat models that are called by something else than the agent: other middleware, or a tool."""
    for one in middleware:
        if _is_chat_model(model := getattr(one, "model", None)):
            yield type(one).__name__, model
    for node in graph.nodes.values():
        for tool in (getattr(getattr(node, "bound", None), "tools_by_name", None) or {}).values():
            code = getattr(tool, "func", None) or getattr(tool, "coroutine", None)
            if is_of_framework(getattr(code, "__module__", "")):  # such as the tool for sub-agents of deepagents
                continue
            for model in reachable(tool, _is_chat_model, _is_end):
                yield f"tool {tool.name}", model


def _openai(agent: Any, ends: list[Any]) -> FoundAgent:
    do = "guard the outermost agent: guarded(agent, ...)"
    found = FoundAgent(str(agent.name), "OpenAI Agents", do, getattr(agent, "runguard", None))
    model = agent.model
    found.models = [model if isinstance(model, str) else str(getattr(model, "model", ""))]
    hosted = sorted({type(tool).__name__ for tool in agent.tools} & set(_HOSTED))
    if hosted:
        what = f"OpenAI executes {', '.join(hosted)}: the guard sees the tokens, not the calls"
        found.hidden.append((what, "limit them at the provider, or allow for their price in the limits"))
    return found


def _pydantic(agent: Any, ends: list[Any]) -> FoundAgent:
    do = "give each agent one RunGuard, the same for all: Agent(..., capabilities=[guard])"
    while (inner := getattr(agent, "wrapped", None)) is not None:
        agent = inner
    found = FoundAgent(str(agent.name or ""), "Pydantic AI", do)
    capabilities = [getattr(agent, "root_capability", None)]
    for one in capabilities:
        capabilities += getattr(one, "capabilities", None) or ()
    own = _class("runguard.pydantic_ai", "RunGuard")
    found.guard = next((one for one in capabilities if isinstance(one, own)), None)
    model = agent.model
    found.models = [model.rpartition(":")[2] if isinstance(model, str) else str(getattr(model, "model_name", ""))]
    if isinstance(model, _class("pydantic_ai.models.fallback", "FallbackModel")):
        found.models = [str(one.model_name) for one in model.models]
        found.hidden.append(("attempts inside FallbackModel are one call for the guard", ""))
    return found


def _strands(agent: Any, ends: list[Any]) -> FoundAgent:
    found = FoundAgent(str(agent.name or ""), "Strands", "give the agent the same plugin: Agent(..., plugins=[guard])")
    plugins = getattr(getattr(agent, "_plugin_registry", None), "_plugins", {})
    own = _class("runguard.strands", "RunGuard")
    found.guard = next((one for one in plugins.values() if isinstance(one, own)), None)
    settings = getattr(agent.model, "config", {})
    found.models = [str(settings.get("model_id", ""))] if isinstance(settings, dict) else []
    return found


def _agent_framework(agent: Any, ends: list[Any]) -> FoundAgent:
    do = "give the agent the same middleware: Agent(..., middleware=[guard])"
    found = FoundAgent(str(agent.name or ""), "Agent Framework", do)
    own = _class("runguard.agent_framework", "RunGuard")
    found.guard = next((one for one in agent.middleware or () if isinstance(one, own)), None)
    found.models = [_model_name(getattr(agent, "client", None))]
    return found


def _runner(runner: Any, ends: list[Any]) -> FoundAgent:
    do = "create it with App(..., plugins=[RunGuardPlugin()]), or call runguard.install()"
    found = FoundAgent(str(getattr(runner, "app_name", "") or "Runner"), "ADK", do)
    own = _class("runguard.adk.plugin", "RunGuardPlugin")
    found.guard = next((one for one in runner.plugin_manager.plugins if isinstance(one, own)), None)
    patching = sys.modules.get("runguard.adk.patching")
    found.guard = found.guard or (patching.IN_USE.installed if patching is not None else None)
    return found


# framework -> module and name of its agents' class, and what examines one
_KINDS: Final[dict[str, tuple[str, str, Callable[[Any, list[Any]], FoundAgent]]]] = {
    "LangChain": ("langgraph.pregel", "Pregel", _graph),
    "OpenAI Agents": ("agents", "Agent", _openai),
    "Pydantic AI": ("pydantic_ai.agent", "AbstractAgent", _pydantic),
    "Strands": ("strands.agent.agent", "Agent", _strands),
    "Agent Framework": ("agent_framework._agents", "BaseAgent", _agent_framework),
    "ADK": ("google.adk.runners", "Runner", _runner),
}


def _is_chat_model(one: object) -> bool:
    return isinstance(one, _class("langchain_core.language_models.chat_models", "BaseChatModel"))


def _is_middleware(one: object) -> bool:
    return isinstance(one, _class("langchain.agents.middleware.types", "AgentMiddleware"))


def _model_name(model: Any) -> str:
    names = (getattr(model, key, None) for key in ("model_name", "model", "model_id"))
    return next((name for name in names if isinstance(name, str)), "")


def _class(module: str, name: str) -> Any:
    """Return a class for isinstance. An application that has not imported it has no instance of it."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else ()


# ---- what code can reach: agents and models that a tool calls, in its closures, globals and attributes
# Nothing is called. An attribute that only exists while the code runs is not found.

_OBJECTS: Final = 50_000  # an application with more is examined in part
_OUR_PACKAGE: Final = "runguard"
# Frameworks and what they use: what their functions mention in general is not the user's.
_FRAMEWORKS: Final = frozenset(
    {
        "agent_framework",
        "agents",
        "anthropic",
        "boto3",
        "botocore",
        "deepagents",
        "google",
        "httpx",
        "langchain",
        "langchain_core",
        "langgraph",
        "langsmith",
    }
    | {
        "mcp",
        "openai",
        "opentelemetry",
        "pydantic",
        "pydantic_ai",
        "pydantic_core",
        "pydantic_graph",
        "starlette",
        "strands",
    }
)
_PLAIN: Final = (str, bytes, int, float, complex, bool, type(None), type, CodeType, ModuleType)
_CONTAINERS: Final = (list, tuple, set, frozenset, deque)
# The original of a guarded tool and its agent, which a guarded copy keeps and does not call.
_ORIGINALS: Final = frozenset({"_function_tool", "_agent_instance"})


def reachable(start: object, is_wanted: Callable[[object], bool], is_end: Callable[[object], bool]) -> Iterator[Any]:
    """Yield every wanted object that the attributes of ``start`` lead to. What an end refers to is not looked at."""
    seen: dict[int, object] = {id(start): start}
    waiting = deque(_attributes(start))
    while waiting and len(seen) < _OBJECTS:
        one = waiting.popleft()
        if id(one) in seen or isinstance(one, _PLAIN):
            continue
        seen[id(one)] = one
        if is_wanted(one):
            yield one
        if not is_end(one):
            waiting.extend(_parts(one))


def _parts(one: object) -> Iterable[object]:
    if isinstance(one, FunctionType):
        return _named_by(one)
    if isinstance(one, MethodType):
        return (one.__self__, one.__func__)
    if isinstance(one, functools.partial):
        return (one.func, *one.args, *one.keywords.values())
    if isinstance(one, dict):
        return list(one.values())
    if isinstance(one, _CONTAINERS):
        return list(one)
    home = _home(type(one).__module__)
    if home == _OUR_PACKAGE:
        return (inner,) if (inner := getattr(one, "_inner", None)) is not None and callable(one) else ()
    return () if home in sys.stdlib_module_names else _attributes(one)


def _attributes(one: object) -> list[object]:
    found: dict[str, object] = {}
    for kind in type(one).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            slot: Any = vars(kind).get(name)
            if hasattr(slot, "__get__") and not isinstance(slot, property):
                try:
                    found[name] = slot.__get__(one, kind)
                except AttributeError:  # never set
                    continue
    for name in ("__dict__", "__pydantic_private__"):
        held = getattr(one, name, None)
        found |= held if isinstance(held, dict) else {}  # an object may answer for every name
    return [value for name, value in found.items() if name not in _ORIGINALS]


def _named_by(function: FunctionType) -> list[object]:
    """Return what a function can use: its closure and defaults; in the user's code also the globals that it names."""
    home = _home(function.__module__ or "")
    if home == _OUR_PACKAGE:
        return []
    found: list[object] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    if is_of_framework(home):
        return found
    names = _names_in(function.__code__)
    for name in names:
        value = function.__globals__.get(name, sys.modules.get(name))
        if not isinstance(value, ModuleType):
            found.append(value)
        elif not is_of_framework(value.__name__):
            found += [vars(value)[other] for other in names if other in vars(value)]
    return found


def _names_in(code: CodeType) -> set[str]:
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


def is_of_framework(module: str) -> bool:
    home = _home(module)
    return home in _FRAMEWORKS or home in sys.stdlib_module_names


def _home(module: str) -> str:
    return module.partition(".")[0]
