"""A scripted provider and an agent that loops, for ``runguard run --demo``: no key and no network is needed.

The agent is an ordinary program of its own: it knows nothing of RunGuard and reads ``OPENAI_BASE_URL``.
"""

import json
import os
from typing import Any, Final

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

MODEL: Final = "gpt-4o-mini"
_TURNS: Final = 40
_TOOL: Final = "parse_document"


def scripted_provider() -> Starlette:
    """Return a model that tries the same tool again and again, each time with other arguments."""

    async def complete(request: Request) -> JSONResponse:
        body = await request.json()
        turn = sum(message["role"] == "assistant" for message in body["messages"]) + 1
        arguments = json.dumps({"page": turn, "hint": f"attempt {turn}"})
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        usage = {"prompt_tokens": 1_000 + 150 * turn, "completion_tokens": 60, "total_tokens": 1_060 + 150 * turn}
        answer = {"id": f"c{turn}", "object": "chat.completion", "created": 0, "model": body["model"]}
        return JSONResponse({**answer, "choices": [choice], "usage": usage})

    return Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])


def agent() -> int:
    """Work until the model calls no tool, at most 40 turns."""
    address = os.environ["OPENAI_BASE_URL"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Extract the invoice."}]
    tools = [{"type": "function", "function": {"name": _TOOL, "parameters": {"type": "object", "properties": {}}}}]
    with httpx.Client(headers={"authorization": "Bearer demo", "user-agent": "demo-agent/1"}, timeout=30) as client:
        for turn in range(1, _TURNS + 1):
            asked = {"model": MODEL, "max_tokens": 300, "messages": messages, "tools": tools}
            message = client.post(f"{address}/chat/completions", json=asked).json()["choices"][0]["message"]
            messages.append(message)
            calls = message.get("tool_calls") or []
            if not calls:
                print(f"agent: turn {turn}: {message['content']}", flush=True)  # noqa: T201 - a program of its own
                return 0
            print(f"agent: turn {turn}: {_TOOL}({calls[0]['function']['arguments']}) failed", flush=True)  # noqa: T201
            failed = json.dumps({"status": "partial_parse_error", "data": None})
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": failed} for call in calls]
    print(f"agent: gave up after {_TURNS} turns", flush=True)  # noqa: T201
    return 1


if __name__ == "__main__":
    raise SystemExit(agent())
