"""OpenAI's chat completions and responses on this machine, as its library and LiteLLM speak them."""

import json
from collections.abc import Iterator
from typing import Any

from tests.kit.sse_server import Asked, Json, Reply, SseServer

KEY = "a-dummy-key"


class OpenAIServer(SseServer):
    paths = ("/v1/chat/completions", "/v1/responses")
    keys = (("authorization", f"Bearer {KEY}"),)

    def whole(self, request: Asked, reply: Reply) -> Json:
        if request.path.endswith("/responses"):
            return self._response(request, reply, "completed")
        message: Json = {"role": "assistant", "content": reply.text or None}
        if reply.call is not None:
            message["tool_calls"] = [
                {"id": f"call_{self.number(request)}", "type": "function", "function": _function(reply)}
            ]
        choice = {"index": 0, "message": message, "finish_reason": _reason(reply), "logprobs": None}
        return {**self._chat(request), "object": "chat.completion", "choices": [choice], "usage": _chat_usage(reply)}

    def events(self, request: Asked, reply: Reply) -> Iterator[tuple[str, Json | str]]:
        yield from (
            self._responses_events(request, reply)
            if request.path.endswith("/responses")
            else self._chat_events(request, reply)
        )

    # ---- chat completions -------------------------------------------------------------------------------------------

    def _chat(self, request: Asked) -> Json:
        return {"id": "chatcmpl-1", "created": 1_700_000_000, "model": request.body["model"]}

    def _chat_events(self, request: Asked, reply: Reply) -> Iterator[tuple[str, Json | str]]:
        """Usage comes only to those who ask for it, in a chunk of its own after the last."""

        def chunk(delta: Json, finish: str | None = None) -> tuple[str, Json]:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
            return "", {**self._chat(request), "object": "chat.completion.chunk", "choices": [choice], "usage": None}

        yield chunk({"role": "assistant", "content": ""})
        for piece in reply.pieces:
            yield chunk({"content": piece})
        if reply.call is not None:
            function = _function(reply)
            yield chunk(
                {
                    "tool_calls": [
                        {
                            "index": 0,
                            "id": f"call_{self.number(request)}",
                            "type": "function",
                            "function": {**function, "arguments": ""},
                        }
                    ]
                }
            )
            yield chunk({"tool_calls": [{"index": 0, "function": {"arguments": function["arguments"]}}]})
        yield chunk({}, _reason(reply))
        if (request.body.get("stream_options") or {}).get("include_usage"):
            yield (
                "",
                {**self._chat(request), "object": "chat.completion.chunk", "choices": [], "usage": _chat_usage(reply)},
            )
        yield "", "[DONE]"

    # ---- responses --------------------------------------------------------------------------------------------------

    def _response(self, request: Asked, reply: Reply, status: str) -> Json:
        done = status == "completed"
        output: list[Json] = []
        if done and reply.text:
            output.append(_message(reply.text, "completed"))
        if done and reply.call is not None:
            output.append(_item(reply, "completed", self.number(request)))
        usage = {"input_tokens": reply.input, "output_tokens": reply.output, "total_tokens": reply.input + reply.output}
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        rest: Json = {
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
        }
        rest |= {"temperature": 1, "tool_choice": "auto", "tools": [], "top_p": 1, "created_at": 1_700_000_000}
        shown: Json = {
            "id": f"resp_{self.number(request)}",
            "object": "response",
            "status": status,
            "model": request.body["model"],
            "output": output,
        }
        return {**shown, **rest, "usage": {**usage, **details} if done else None}

    def _responses_events(self, request: Asked, reply: Reply) -> Iterator[tuple[str, Json | str]]:
        number = 0

        def event(kind: str, **data: Any) -> tuple[str, Json]:
            nonlocal number
            number += 1
            return kind, {"type": kind, "sequence_number": number - 1, **data}

        yield event("response.created", response=self._response(request, reply, "in_progress"))
        index = 0
        if reply.text:
            at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
            yield event(
                "response.output_item.added", output_index=0, item={**_message("", "in_progress"), "content": []}
            )
            yield event(
                "response.content_part.added", **at, part={"type": "output_text", "text": "", "annotations": []}
            )
            for piece in reply.pieces:
                yield event("response.output_text.delta", **at, delta=piece, logprobs=[])
            yield event("response.output_text.done", **at, text=reply.text, logprobs=[])
            yield event(
                "response.content_part.done", **at, part={"type": "output_text", "text": reply.text, "annotations": []}
            )
            yield event("response.output_item.done", output_index=0, item=_message(reply.text, "completed"))
            index = 1
        if reply.call is not None:
            arguments = json.dumps(reply.call[1])
            at = {"item_id": "fc_1", "output_index": index}
            yield event(
                "response.output_item.added",
                output_index=index,
                item={**_item(reply, "in_progress", self.number(request)), "arguments": ""},
            )
            yield event("response.function_call_arguments.delta", **at, delta=arguments)
            yield event("response.function_call_arguments.done", **at, name=reply.call[0], arguments=arguments)
            yield event(
                "response.output_item.done", output_index=index, item=_item(reply, "completed", self.number(request))
            )
        yield event("response.completed", response=self._response(request, reply, "completed"))


def _reason(reply: Reply) -> str:
    return "stop" if reply.call is None else "tool_calls"


def _function(reply: Reply) -> Json:
    assert reply.call is not None
    return {"name": reply.call[0], "arguments": json.dumps(reply.call[1])}


def _chat_usage(reply: Reply) -> Json:
    return reply.usage or {
        "prompt_tokens": reply.input,
        "completion_tokens": reply.output,
        "total_tokens": reply.input + reply.output,
    }


def _message(text: str, status: str) -> Json:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }


def _item(reply: Reply, status: str, number: int) -> Json:
    return {"id": "fc_1", "type": "function_call", "call_id": f"call_{number}", "status": status, **_function(reply)}
