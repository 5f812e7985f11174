"""ADK's own control tools. Their calls are neither progress nor repetition."""

from typing import Final

TRANSFER: Final = "transfer_to_agent"
FRAMEWORK_TOOLS: Final = frozenset({TRANSFER, "finish_task", "set_model_response", "exit_loop"})
REQUESTS: Final = "adk_request_"  # asks the user for a confirmation, an input or a sign-in


def is_framework_tool(name: str) -> bool:
    return name in FRAMEWORK_TOOLS or name.startswith(REQUESTS)
