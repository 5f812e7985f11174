"""Programs that the tests run: plain agents, each a process of its own."""

AGENT = """
import sys
from tests.kit.gateways import {loop}
import os
turns, said = {loop}(os.environ["{variable}"].removesuffix("/v1"), most=40, stream={stream})
print(turns, said.splitlines()[0] if said else "")
sys.exit({code})
"""


def agent(loop: str = "chat_loop", variable: str = "OPENAI_BASE_URL", *, stream: bool = False, code: int = 0) -> str:
    """The source of an agent that talks to the address in a variable."""
    return AGENT.format(loop=loop, variable=variable, stream=stream, code=code)
