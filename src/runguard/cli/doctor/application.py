"""Load the user's app, and check that it and the agents it calls are guarded, the order of plugins, and its models."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from runguard.cli.commands.command import CommandError
from runguard.cli.doctor.environment import CheckResult
from runguard.cli.doctor.framework_agents import agent_lines, find_agents, kind_of, model_names, policy_of
from runguard.policy.settings import Policy


@dataclass(slots=True)
class Application:
    """The checks, policy and models of an app."""

    lines: list[CheckResult]
    policy: Policy | None = None
    models: list[str] = field(default_factory=list)


def load_application(target: str, load: Callable[[], Any]) -> Application:
    """Import the app. Its code runs; its output goes to stderr."""
    if Path(target).exists() and (missing := _adk_missing(target)) is not None:  # ADK loads a folder
        return missing
    try:
        with contextlib.redirect_stdout(sys.stderr), _here_first():
            loaded = load()
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
    if kind_of(loaded):
        root, others = find_agents(loaded, target)
        agents = [root, *others] if root is not None else others
        names = list(dict.fromkeys(model_names(agents)))
        return Application(agent_lines(target, root, others), policy_of(agents), names)
    return _adk_missing(target) or _adk_application(target, loaded)


def _adk_missing(target: str) -> Application | None:
    try:
        import runguard.adk.plugin  # noqa: F401
    except ImportError as error:
        found = f"{target} cannot be checked: {error}"
        return Application([CheckResult("app", "problem", found, "pip install -U 'runguard-agents[adk]'")])
    return None


def _adk_application(target: str, loaded: Any) -> Application:
    from runguard.adk.patching import IN_USE
    from runguard.adk.plugin import RunGuardPlugin

    plugins = _plugins(loaded)
    if plugins is None:
        found = (
            f"{target} is a {type(loaded).__name__}; it must be an App, a Runner or an agent of ADK, or an agent of "
            "LangChain, the OpenAI Agents SDK or Pydantic AI"
        )
        return Application([CheckResult("app", "problem", found, "name another attribute")])
    models = list(_models(loaded, set()))
    own = next((plugin for plugin in plugins if isinstance(plugin, RunGuardPlugin)), None)
    guard = own or IN_USE.installed
    policy = (
        guard.guard.policy
        if guard is not None
        else next((model.guard.policy for _, model in models if model is not None), None)
    )
    _, called = find_agents(loaded, target)  # by tools: agents of other frameworks, other Runners
    names = [name for name, _ in models if name] + model_names(called)
    lines = [_order(target, plugins, own, guard, models), *agent_lines(target, None, called)]
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
    return CheckResult(
        "plugins",
        "ok",
        f"RunGuardPlugin is the first of {len(plugins)} plugin{'' if len(plugins) == 1 else 's'} of {target}",
    )


# ---- loading --------------------------------------------------------------------------------------------------------


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
    return lambda: _from_module(module, attribute)


def _from_folder(path: Path) -> Any:
    from google.adk.cli.utils.agent_loader import AgentLoader

    return AgentLoader(str(path.parent)).load_agent(path.stem if path.is_file() else path.name)


def _from_module(module: str, attribute: str) -> Any:
    found: Any = import_module(module)
    for name in attribute.split("."):
        found = getattr(found, name)
    return found


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
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and "site-packages" not in frame.filename
    ]
    ours = str(Path(__file__).parent)
    theirs = [frame for frame in frames if not frame.filename.startswith(ours)]
    return f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""


# ---- inspecting -----------------------------------------------------------------------------------------------------


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


def _models(part: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield every model of a tree of agents: its name, and the model itself if it is a GuardedLlm."""
    from runguard.adk.guarded_llm import GuardedLlm

    if part is None or id(part) in seen:
        return
    seen.add(id(part))
    if (model := getattr(part, "model", None)) and getattr(part, "tools", None) is not None:
        yield (
            model if isinstance(model, str) else str(getattr(model, "model", "")),
            model if isinstance(model, GuardedLlm) else None,
        )
    graph = getattr(part, "graph", None)
    below = [
        getattr(part, "root_agent", None),
        getattr(part, "agent", None),
        *(getattr(part, "sub_agents", None) or ()),
    ]
    below += [*(getattr(part, "tools", None) or ()), *(getattr(graph, "nodes", None) or ())]
    for one in below:
        yield from _models(one, seen)
