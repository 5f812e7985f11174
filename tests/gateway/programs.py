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


# The same with the standard library alone: a client takes a second to import.
PLAIN = """
import json, os, urllib.request
tools = [{{"type": "function", "function": {{"name": "parse_document", "parameters": {{"type": "object"}}}}}}]
headers = {{"content-type": "application/json", "authorization": "Bearer a-dummy-key"}}
def ask(messages):
    body = {{"model": "a-model", "max_tokens": 300, "messages": messages, "tools": tools}}
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
for number in range({conversations}):
    messages = [{{"role": "user", "content": f"question {{number}}"}}]
    for turn in range(40):
        messages.append(ask(messages))
        if not (calls := messages[-1].get("tool_calls")):
            break
        messages += [{{"role": "tool", "tool_call_id": call["id"], "content": "partial_parse_error"}} for call in calls]
    print((messages[-1]["content"] or "").splitlines()[0])
"""


def plain_agent(conversations: int = 1) -> str:
    """The source of an agent that talks to OPENAI_BASE_URL and prints the last line of each conversation."""
    return PLAIN.format(conversations=conversations)
