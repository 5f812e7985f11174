"""A checkpoint of a budget: at which share of it what happens, and its form as plain data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, Final, Literal, Self, get_args

from runguard.core.exceptions import InvalidValueError
from runguard.core.mistakes import Checked, nearest

ThresholdAction = Literal["warn", "nudge", "stop"]
_ACTIONS: Final = get_args(ThresholdAction)


@dataclass(frozen=True, slots=True)
class Threshold(metaclass=Checked):
    """What to do when a budget's ``utilization`` reaches ``percent``, a fraction above 0 and up to 1.

    ``callback`` gets the live budget. A threshold fires once until it is re-armed; a ``recurring`` one fires on every
    record at or above it. ``action`` is what happens beside the callback: nothing (``"warn"``), a notice to the model
    (``"nudge"``), or a stop.

    ``model``: from here on, send the calls of an agent to this cheaper model of the same model class, until the window
    of the budget ends or the budget is extended. ``agents``: only those agents, by name or glob; by default all.

    Use it in ``Budget(thresholds=...)`` to react before calls are refused, or in a ``BudgetPolicy`` that only counts
    tokens. A threshold alone limits nothing: that is what ``Budget`` is for.
    """

    percent: float
    callback: Callable[[Any], Any] | None = None
    recurring: bool = False
    action: ThresholdAction = "warn"
    model: str | None = None
    agents: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.percent, bool) or not isinstance(self.percent, int | float) or not 0 < self.percent <= 1:
            raise InvalidValueError(f"percent must be a fraction above 0 and up to 1, not {self.percent!r}")
        if self.callback is not None and not callable(self.callback):
            raise InvalidValueError(f"callback must be callable or None, not {self.callback!r}")
        if not isinstance(self.recurring, bool):
            # the text "false" would count as true
            raise InvalidValueError(f"recurring must be True or False, not {self.recurring!r}")
        if self.action not in _ACTIONS:
            raise InvalidValueError(f"action must be one of {', '.join(_ACTIONS)}, not {self.action!r}")
        self._check_model()

    def _check_model(self) -> None:
        if self.model is None:
            if self.agents:
                raise InvalidValueError("agents= chooses whose model is switched; add model=")
            return
        if not isinstance(self.model, str) or not self.model.strip():
            raise InvalidValueError(f"model must be the name of a model, not {self.model!r}")
        if self.action == "stop":
            raise InvalidValueError("action='stop' and model= exclude each other; give two thresholds")
        if not isinstance(self.agents, list | tuple) or not all(isinstance(a, str) and a for a in self.agents):
            raise InvalidValueError(f"agents must be a list of names such as ['research*'], not {self.agents!r}")
        object.__setattr__(self, "agents", tuple(self.agents))

    def is_for(self, agent: str) -> bool:
        """Whether ``model`` is meant for the calls of this agent."""
        return not self.agents or any(fnmatchcase(agent, name) for name in self.agents)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for YAML, TOML or JSON; the callback becomes ``"package.module:function"``."""
        path = None if self.callback is None else _path_of(self.callback)
        data = {"percent": self.percent, "callback": path, "recurring": self.recurring, "action": self.action}
        return data if self.model is None else {**data, "model": self.model, "agents": list(self.agents)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The way back. It imports the module that the callback names: read only data that you trust."""
        if not isinstance(data, Mapping):
            raise InvalidValueError(f"a threshold must be a mapping, not {data!r}")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(str(key) for key in data if key not in known):
            raise InvalidValueError(
                f"{unknown[0]}: no such setting of a threshold; {nearest(unknown[0], sorted(known))}"
            )
        if "percent" not in data:
            raise InvalidValueError("a threshold needs 'percent'")
        values = dict(data)
        if values.get("callback") is not None:
            values["callback"] = _load(values["callback"])
        return cls(**values)


def _path_of(callback: Callable[[Any], Any]) -> str:
    module, name = getattr(callback, "__module__", None), getattr(callback, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name:
        raise InvalidValueError(
            f"{callback!r} has no import path: only a function at the top of a module can be written as data, "
            "no lambda, closure or partial"
        )
    if module == "__main__":
        raise InvalidValueError(
            f"{name} is defined in the script itself, where nobody else can import it: move it to a module"
        )
    path = f"{module}:{name}"
    if _load(path) != callback:
        raise InvalidValueError(
            f"{callback!r} is not what {path} names: a method of an object cannot be written as data"
        )
    return path


def _load(path: object) -> Callable[[Any], Any]:
    module, colon, name = path.partition(":") if isinstance(path, str) else ("", "", "")
    if not module or not colon or not name:
        raise InvalidValueError(f"a callback is written 'package.module:function', not {path!r}")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing runs the module, which can fail in any way
        raise InvalidValueError(f"the callback {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise InvalidValueError(f"{path!r} is not callable")
    return found  # type: ignore[no-any-return]
