"""A model call of a guarded agent that did not go through its guarded model.

It is seen when the model has answered. It is booked, and the run ends. In shadow mode the run goes on.
"""

import logging
from typing import Any, Final

from runguard.adapters.agent_run import AgentRun
from runguard.adapters.ending_conditions import error_of
from runguard.adapters.model_calls import ModelRequest, Permission
from runguard.core.decision import Trip
from runguard.core.exceptions import RunGuardError
from runguard.openai_agents.model import name_of, settle_answer

_log: Final = logging.getLogger("runguard")

_MESSAGE: Final = (
    "agent '%s' called a model past its guard: RunConfig(model=...) has replaced the guarded model, and RunGuard "
    "cannot guard the replacement in this version of openai-agents. The call is booked at the price of '%s'. Do this "
    "instead: set the model on the agent, then call guarded(agent, ...)"
)


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
