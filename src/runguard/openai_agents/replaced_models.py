"""``RunConfig(model=…)`` replaces the model of every agent in a run. Here the replacement gets the guard of the agent.

The SDK shows the ``RunConfig`` of a run to no hook and to no agent. Its run loop finds the model of each call with the
function ``get_model``, and the settings for it with ``get_model_settings``. ``watch`` puts a function around both. They
change nothing for agents without a guard, nor for runs without ``RunConfig.model``. They do not change ``RunConfig``.
In a version of the SDK without these functions, ``past_the_guard`` sees the call when the model has answered.
"""

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

from agents.run_internal import run_loop

from runguard.openai_agents.model import GuardedModel


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
