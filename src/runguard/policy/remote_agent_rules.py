"""What is known of one remote A2A agent: in ``remote_agents=`` of a policy."""

from pydantic import Field

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
