"""``RunConfig(model=…)`` replaces the model of every agent in a run. Here the replacement gets the guard of the agent.

The SDK shows the ``RunConfig`` of a run to no hook and to no agent. Its run loop finds the model of each call with the
function ``get_model``, and the settings for it with ``get_model_settings``. ``watch`` puts a function around both. They
change nothing for agents without a guard, nor for runs without ``RunConfig.model``. They do not change ``RunConfig``.
In a version of the SDK without these functions, ``report`` sees the call when the model has answered: it books the
call and ends the run. In shadow mode the run goes on.
"""

import logging
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any, Final

from agents.run_internal import run_loop

from runguard.calls.model_calls import ModelRequest, Permission
from runguard.calls.run import AgentRun, error_of
from runguard.core.decision import Trip
from runguard.core.errors import RunGuardError
from runguard.openai_agents.model import GuardedModel, name_of, settle_answer

_log: Final = logging.getLogger("runguard")
_MESSAGE: Final = (
    "agent '%s' called a model past its guard: RunConfig(model=...) has replaced the guarded model, and RunGuard "
    "cannot guard the replacement in this version of openai-agents. The call is booked at the price of '%s'. Do this "
    "instead: set the model on the agent, then call guarded(agent, ...)"
)


def watch() -> None:
    """Guard what replaces the model of a guarded agent, from now on."""
    for name, around in (("get_model", _guarded_choice), ("get_model_settings", _fitting_settings)):
        found = getattr(run_loop, name, None)
        if callable(found):
            setattr(run_loop, name, around(found))


def _guarded_choice(get_model: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(get_model)
    def guarded_choice(agent: Any, run_config: Any, *args: Any, **kwargs: Any) -> Any:
        chosen, own = get_model(agent, run_config, *args, **kwargs), agent.model
        return chosen if chosen is own or not isinstance(own, GuardedModel) else own.guard_instead(chosen, run_config)

    return guarded_choice


def _fitting_settings(get_model_settings: Callable[..., Any]) -> Callable[..., Any]:
    """The SDK replaces default settings that belong to the name of the agent's model. It must see that name."""

    @wraps(get_model_settings)
    def fitting_settings(agent: Any, run_config: Any, *args: Any, **kwargs: Any) -> Any:
        if run_config.model is not None and isinstance(own := agent.model, GuardedModel):
            agent = SimpleNamespace(model=own.given, model_settings=agent.model_settings)
        return get_model_settings(agent, run_config, *args, **kwargs)

    return fitting_settings


async def report(run: AgentRun, agent: Any, items: Any, response: Any, *, is_first: bool) -> RunGuardError | None:
    """Book the call, log the first one of a guard, and return the error that must end the run."""
    mode = run.guard.policy.mode
    if mode == "off":
        return None
    name = name_of(agent.model)
    if is_first:
        _log.warning("runguard.unguarded: %s", _MESSAGE % (agent.name, name))
    permission = await run.ask(lambda: ModelRequest.of(name, items))
    if isinstance(permission, Permission):
        permission.read(lambda one, answer: settle_answer(one, answer, ()), response)
    elif isinstance(permission, Trip):
        return error_of(permission)
    return RunGuardError(_MESSAGE % (agent.name, name)) if mode == "enforce" else None
