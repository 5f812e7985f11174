"""A tool call of a model response, from its check to the answer that the rules see."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from runguard.adapters.layers import Layer
from runguard.core.decision import Action, Finding, text_for_model
from runguard.core.events import Answer, Outcome
from runguard.core.identity import size_of
from runguard.providers.messages import arguments

NOT_EXECUTED: Final = "Not executed: this turn was stopped."


class ToolUse(NamedTuple):
    """A tool call that a model asked for."""

    id: str
    tool: str
    args: Any = None


@dataclass(slots=True)
class OpenCall:
    """One call, until the answers of its batch are reported."""

    use: ToolUse
    batch: str
    seen: list[tuple[Layer, bytes, bytes]] = field(default_factory=list)  # layer, fingerprint, identity of its effect
    value: object = None
    outcome: Outcome | None = None
    is_over: bool = False

    @property
    def key(self) -> str:
        """Unique within a run: frameworks may number the calls of each response from zero."""
        return f"{self.batch}.{self.use.id}"

    def answer(self, value: object, outcome: Outcome | None = None) -> None:
        self.value, self.outcome, self.is_over = as_data(value), outcome, True

    def refuse(self) -> None:
        """The tool was not executed."""
        self.outcome, self.is_over = Outcome.REFUSED, True

    def answer_in(self, layer: Layer) -> Answer | None:
        """The answer as one layer sees it. None: the layer was not asked about the call."""
        for seen, fingerprint, once in self.seen:
            if seen is layer:
                use = self.use
                return Answer(use.tool, fingerprint, self.value, self.key, self.outcome, args=use.args, once=once)
        return None


def left_out(layers: Sequence[Layer], use: ToolUse, value: object) -> str | None:
    """The note in place of an answer beyond ``max_tool_result_chars``. ``guard.after`` reports it with the others."""
    for guard, _, _ in layers:
        limit, rule = guard.policy.max_tool_result_chars, guard.tools.rule(use.tool)
        if not limit or guard.policy.mode != "enforce" or (rule is not None and rule.exempt):
            continue
        chars = size_of(as_data(value), 2 * limit)
        if chars > limit:
            return text_for_model(Finding("result_size", Action.BLOCK, chars, limit, "characters", tool=use.tool))
    return None


def as_data(value: object) -> object:
    """Frameworks pass tool answers on as text. Text that is JSON becomes data again, within bounds."""
    if type(value) is str and value.lstrip()[:1] in ("{", "["):
        return arguments(value)
    return value
