"""A cheaper model in a framework that lets the guard choose the model of a request."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from runguard.adapters.model_calls import ModelRequest
from runguard.core.events import ModelCall

if TYPE_CHECKING:
    from runguard.adapters.agent_run import AgentRun


@dataclass(frozen=True, slots=True)
class ModelSwitch:
    """What an adapter says about sending a request to another model."""

    has_open_call: Callable[[], bool]
    obstacle: Callable[[str], str]  # why the request cannot go to a model; "" where it can


def cheaper_request(run: "AgentRun", request: ModelRequest, *, no_loop: bool) -> ModelRequest:
    """The request, to a cheaper model where a threshold of the run's own guard says so."""
    chosen: Any = run.guard.faults.attempt("adapter", _choose, run, request, no_loop)
    if chosen is None or not chosen.instead_of:
        return request
    return replace(request, model=chosen.model, instead_of=chosen.instead_of, input_tokens=chosen.input_tokens)


def _choose(run: "AgentRun", request: ModelRequest, no_loop: bool) -> ModelCall | None:
    guard, switch = run.guard, request.switch
    layer = next((one for one in reversed(run.layers) if one.guard is guard), None)
    if layer is None or switch is None or guard.downgrades is None:
        return None
    event = run.model_call(layer, request, no_loop=no_loop)
    guard.downgrades.choose(layer.run, event, switch.has_open_call, switch.obstacle)
    return event
