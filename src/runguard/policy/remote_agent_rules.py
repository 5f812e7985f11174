"""What is known of one remote A2A agent: in ``remote_agents=`` of a policy."""

from pydantic import Field

from runguard.core.money import to_nano
from runguard.policy.values import Count, Usd
from runguard.validation import SettingsModel


class RemoteAgent(SettingsModel):
    """What is known of one remote A2A agent. By name or glob in ``remote_agents=``."""

    model: str = Field(
        default="",
        description="The model whose price counts for the tokens that a reply reports. Empty: only tokens are counted.",
    )
    send_budget: bool = Field(
        default=False,
        description="Reserve what is left of the budgets and send it with the request, as a limit for the remote run.",
    )
    max_usd: Usd | None = Field(default=None, description="Dollars to reserve for one call of the agent.")
    max_tokens: Count | None = Field(default=None, description="Tokens to reserve for one call of the agent.")


def reserved_for(rule: RemoteAgent) -> tuple[int | None, int | None]:
    """The nano-USD and tokens to reserve for a call. None: all that is left. Without a figure, as little as shows that
    something is left.
    """
    least = None if rule.send_budget else 1
    return (
        least if rule.max_usd is None else to_nano(rule.max_usd),
        least if rule.max_tokens is None else rule.max_tokens,
    )
