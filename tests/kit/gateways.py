"""A gateway that serves on a free port, and agents in plain Python that talk to it with real clients."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from runguard.engine.guard import Guard
from runguard.gateway.access import Access, Upstreams
from runguard.gateway.proxy import Gateway
from runguard.gateway.serving import listen, served_in_background
from runguard.policy.settings import Policy

MODEL = "a-model"
PRICES = {MODEL: {"input": 1, "output": 10}}  # dollars per million tokens
CALL_USD = 0.0035  # 1,000 tokens in and 250 out
FAILED = json.dumps({"status": "partial_parse_error", "data": None})
TOOL = "parse_document"
_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"page": {"type": "integer"}}}


def a_gateway(upstream: str, *, access: Access | None = None, tells_reason: bool = False, **policy: Any) -> Gateway:
    """A gateway to one server of the tests, whichever provider it plays."""
    guard = Guard(Policy.build(**{"prices": PRICES, "models": {}, **policy}), gives_last_answers=True)
    upstreams = Upstreams({"openai": f"{upstream}/v1", "anthropic": upstream, "gemini": upstream})
    return Gateway(guard, access=access, upstreams=upstreams, tells_reason=tells_reason)


@contextmanager
def served(gateway: Gateway) -> Iterator[str]:
    """Serve a gateway. Gives its address."""
    listening = listen("127.0.0.1", 0)
    with served_in_background(gateway, listening, gateway.aclose):
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


# ---- Agents without any guard. Each calls its tool until the model stops asking, at most ``most`` turns, and gives the
# number of turns and the last text. A client takes half a second to import, so each agent imports its own.

Loop = Callable[..., tuple[int, str]]
Tool = Callable[[int], str]


def always_failing(_: int) -> str:
    return FAILED


def anthropic_loop(
    url: str,
    *,
    stream: bool = False,
    most: int = 40,
    tool: Tool = always_failing,
    prompt: str = "Extract the invoice.",
    history: list[Any] | None = None,
    **options: Any,
) -> tuple[int, str]:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="a-dummy-key", max_retries=0, **options)
    messages: list[Any] = history if history is not None else []
    messages.append({"role": "user", "content": prompt})
    tools: list[Any] = [{"name": TOOL, "description": "Parse.", "input_schema": _SCHEMA}]
    for turn in range(1, most + 1):
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "messages": messages, "tools": tools}
        if stream:
            with client.messages.stream(**asked) as streamed:
                message = streamed.get_final_message()
        else:
            message = client.messages.create(**asked)
        messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
        uses = [block for block in message.content if block.type == "tool_use"]
        if not uses:
            return turn, "".join(block.text for block in message.content if block.type == "text")
        answers = [{"type": "tool_result", "tool_use_id": use.id, "content": tool(turn)} for use in uses]
        messages.append({"role": "user", "content": answers})
    return most, ""


def chat_loop(
    url: str,
    *,
    stream: bool = False,
    most: int = 40,
    tool: Tool = always_failing,
    prompt: str = "Extract the invoice.",
    history: list[Any] | None = None,
    usage: bool = True,
    **options: Any,
) -> tuple[int, str]:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="a-dummy-key", max_retries=0, **options)
    messages: list[Any] = history if history is not None else []
    messages.append({"role": "user", "content": prompt})
    tools: list[Any] = [{"type": "function", "function": {"name": TOOL, "parameters": _SCHEMA}}]
    for turn in range(1, most + 1):
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "messages": messages, "tools": tools}
        if stream:
            if usage:
                asked["stream_options"] = {"include_usage": True}
            text, calls = _chat_pieces(client.chat.completions.create(stream=True, **asked))
        else:
            said = client.chat.completions.create(**asked).choices[0].message
            text, calls = said.content or "", [call.model_dump() for call in said.tool_calls or ()]
        messages.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
        if not calls:
            return turn, text
        messages.extend({"role": "tool", "tool_call_id": call["id"], "content": tool(turn)} for call in calls)
    return most, ""


def _chat_pieces(chunks: Any) -> tuple[str, list[dict[str, Any]]]:
    text, calls = "", dict[int, dict[str, Any]]()
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(piece.index, empty)
                call["id"] += piece.id or ""
                call["function"]["name"] += piece.function.name or ""
                call["function"]["arguments"] += piece.function.arguments or ""
    return text, list(calls.values())


def responses_loop(
    url: str,
    *,
    stream: bool = False,
    most: int = 40,
    tool: Tool = always_failing,
    prompt: str = "Extract the invoice.",
    stored: bool = False,
    **options: Any,
) -> tuple[int, str]:
    """``stored``: the provider keeps the conversation, and each request holds only what is new."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="a-dummy-key", max_retries=0, **options)
    items: list[Any] = [{"role": "user", "content": prompt}]
    before: dict[str, Any] = {}
    tools: list[Any] = [{"type": "function", "name": TOOL, "parameters": _SCHEMA, "strict": False}]
    for turn in range(1, most + 1):
        asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": 300, "input": items, "tools": tools, **before}
        if stream:
            ends = [
                event for event in client.responses.create(stream=True, **asked) if event.type == "response.completed"
            ]
            response = ends[-1].response
        else:
            response = client.responses.create(**asked)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return turn, response.output_text
        answers = [{"type": "function_call_output", "call_id": call.call_id, "output": tool(turn)} for call in calls]
        if stored:
            items, before = answers, {"previous_response_id": response.id}
        else:
            items = [*items, *(item.model_dump(exclude_none=True) for item in response.output), *answers]
    return most, ""


def gemini_loop(
    url: str,
    *,
    stream: bool = False,
    most: int = 40,
    tool: Tool = always_failing,
    prompt: str = "Extract the invoice.",
) -> tuple[int, str]:
    from google import genai
    from google.genai import types

    client = genai.Client(api_key="a-dummy-key", http_options=types.HttpOptions(base_url=url))
    contents: list[Any] = [types.Content(role="user", parts=[types.Part(text=prompt)])]
    declared = types.FunctionDeclaration(name=TOOL, parameters_json_schema=_SCHEMA)
    config = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[declared])], max_output_tokens=300)
    for turn in range(1, most + 1):
        if stream:
            pieces = list(client.models.generate_content_stream(model=MODEL, contents=contents, config=config))
        else:
            pieces = [client.models.generate_content(model=MODEL, contents=contents, config=config)]
        parts = [part for one in pieces if one.candidates for part in (one.candidates[0].content.parts or [])]  # type: ignore[union-attr]
        contents.append(types.Content(role="model", parts=parts))
        calls = [part.function_call for part in parts if part.function_call is not None]
        if not calls:
            return turn, "".join(part.text or "" for part in parts)
        answers = [
            types.Part(function_response=types.FunctionResponse(name=call.name, response=json.loads(tool(turn))))
            for call in calls
        ]
        contents.append(types.Content(role="user", parts=answers))
    return most, ""


# ---- A provider that answers with whatever bytes a test wants.


@dataclass
class Arrived:
    """A request as it came to the provider."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class RawUpstream:
    """A provider on a free port. ``answer`` is a response, or a function of the request that gives one."""

    def __init__(self) -> None:
        self.arrived: list[Arrived] = []
        self.answer: Any = lambda request: JSONResponse({})
        self.left = threading.Event()  # a stream was left by its reader
        app = Starlette(routes=[Route("/{path:path}", self._serve, methods=["GET", "HEAD", "POST", "PUT", "DELETE"])])
        self._socket = listen("127.0.0.1", 0)
        self._server = served_in_background(app, self._socket, self._close)
        self._server.__enter__()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        self._server.__exit__(None, None, None)

    async def _close(self) -> None:
        pass

    async def _serve(self, request: Request) -> Response:
        body = await request.body()
        raw: bytes = request.scope["raw_path"]
        arrived = Arrived(request.method, raw.decode(), request.url.query, dict(request.headers), body)
        self.arrived.append(arrived)
        answer = self.answer(arrived)
        return answer if isinstance(answer, Response) else await answer

    def never_ending(self, pieces: Iterable[bytes]) -> StreamingResponse:
        """A stream that says some pieces and then nothing more, until its reader leaves."""

        async def stream() -> AsyncIterator[bytes]:
            try:
                for piece in pieces:
                    yield piece
                await asyncio.sleep(60)
            finally:
                self.left.set()

        return StreamingResponse(stream(), media_type="text/event-stream")


def chat_answer(text: str = "fine", *, input: int = 1_000, output: int = 250, **more: Any) -> dict[str, Any]:  # noqa: A002
    """A whole chat completion."""
    message = {"role": "assistant", "content": text, **more}
    usage = {"prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "c-1", "object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage}


def chat_events(text: str = "fine", *, usage: bool = True) -> list[bytes]:
    """The events of a streamed chat completion."""
    head = {"id": "c-1", "object": "chat.completion.chunk", "model": MODEL}
    chunks: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    if usage:
        counts = {"prompt_tokens": 1_000, "completion_tokens": 250, "total_tokens": 1_250}
        chunks.append({**head, "choices": [], "usage": counts})
    return [*(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks), b"data: [DONE]\n\n"]
