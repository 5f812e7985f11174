"""What is special about one tool: in ``tools=`` of a policy, or beside the tool with ``@runguard.tool(...)``."""

from collections.abc import Callable
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from runguard.core.errors import PolicyError
from runguard.policy.values import Count, Duration, ToolPrice
from runguard.validation import SettingsModel, faults_of, summary


class ToolRule(SettingsModel):
    """What is special about one tool.

    By name or glob in ``tools=``, or beside the tool with ``@runguard.tool(...)``.
    """

    polling: bool = Field(
        default=False, description="Asks for a state until it changes: judged by time without change, not by count."
    )
    paging: bool = Field(
        default=False,
        description=(
            "Moves on with every call, whatever it answers (next page, scroll): repetition rules leave it alone."
        ),
    )
    max_calls: Count | None = Field(default=None, description="Calls allowed in one run, the whole tree counted.")
    max_seconds: Duration | None = Field(
        default=None, description="An async call is ended after this time; a sync one is judged when it returns."
    )
    writes: bool = Field(
        default=False,
        description="Changes the world: its success is progress, so reading again afterwards is no repetition.",
    )
    once: bool = Field(
        default=False, description="A success with the same arguments is not repeated within the session."
    )
    exempt: bool = Field(
        default=False, description="No loop or failure rule looks at this tool; limits still count it."
    )
    identity: tuple[str, ...] | None = Field(
        default=None, description="The only arguments that make two calls different.", strict=False
    )
    volatile: tuple[str, ...] = Field(
        default=(), description="Arguments, and top-level fields of the answer, that never count.", strict=False
    )
    failed: dict[str, Any] | Callable[[Any], bool] | None = Field(
        default=None,
        description="What counts as failure: fields with the values that say so, or a function of the answer.",
    )
    price: ToolPrice | None = Field(
        default=None,
        description="Dollars of one call, reserved before it runs; or a function of its arguments and its answer.",
    )
    price_bound: ToolPrice | None = Field(
        default=None,
        description="The most that one call may cost, or a function of its arguments; for a price that is a function.",
    )

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.exempt and (self.polling or self.paging):
            raise ValueError(
                "exempt already takes the tool out of the rules that polling and paging tune; keep one of them"
            )
        if callable(self.price) and self.price_bound is None:
            raise ValueError(
                "price is a function, known only after the call; add price_bound, the most that one call may cost"
            )
        if self.price_bound is not None and not callable(self.price):
            raise ValueError("price_bound needs a price that is a function of the arguments and the answer")
        return self


def declared_rule(**options: Any) -> ToolRule:
    """A ToolRule from the keywords of ``@runguard.tool(...)``."""
    try:
        return ToolRule.model_validate(options)
    except ValidationError as error:
        raise PolicyError(summary(faults_of(error, ToolRule), "@runguard.tool")) from None


def tool(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a ToolRule beside the tool itself: ``@runguard.tool(once=True)``.

    The policy's rule for that name wins.
    """
    rule = declared_rule(**options)

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__runguard_tool__ = rule  # type: ignore[attr-defined]
        return function

    return declare
