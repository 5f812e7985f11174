"""Anthropic's messages on this machine, as its library speaks them."""

import json
from collections.abc import Iterator

from tests.kit.sse_server import Asked, Json, Reply, SseServer

KEY = "a-dummy-key"


class AnthropicServer(SseServer):
    paths = ("/v1/messages",)
    keys = (("x-api-key", KEY), ("authorization", f"Bearer {KEY}"))  # its library has sent both

    def whole(self, request: Asked, reply: Reply) -> Json:
        blocks: list[Json] = [{"type": "text", "text": reply.text, "citations": None}] if reply.text else []
        if reply.call is not None:
            blocks.append(
                {
                    "type": "tool_use",
                    "id": f"toolu_{self.number(request)}",
                    "name": reply.call[0],
                    "input": reply.call[1],
                }
            )
        return {
            **self._message(request, reply),
            "content": blocks,
            "stop_reason": self._reason(reply),
            "usage": self._usage(reply, reply.output),
        }

    def events(self, request: Asked, reply: Reply) -> Iterator[tuple[str, Json | str]]:
        """The prompt is told with the first event, the output with the last but one."""
        yield self._event("message_start", message=self._message(request, reply))
        index = 0
        if reply.text:
            yield self._event("content_block_start", index=index, content_block={"type": "text", "text": ""})
            for piece in reply.pieces:
                yield self._event("content_block_delta", index=index, delta={"type": "text_delta", "text": piece})
            yield self._event("content_block_stop", index=index)
            index += 1
        if reply.call is not None:
            name, arguments = reply.call
            yield self._event(
                "content_block_start",
                index=index,
                content_block={"type": "tool_use", "id": f"toolu_{self.number(request)}", "name": name, "input": {}},
            )
            yield self._event(
                "content_block_delta",
                index=index,
                delta={"type": "input_json_delta", "partial_json": json.dumps(arguments)},
            )
            yield self._event("content_block_stop", index=index)
        yield self._event(
            "message_delta",
            delta={"stop_reason": self._reason(reply), "stop_sequence": None},
            usage=reply.usage or {"output_tokens": reply.output},
        )
        yield self._event("message_stop")

    @staticmethod
    def _event(kind: str, **data: object) -> tuple[str, Json]:
        return kind, {"type": kind, **data}

    @staticmethod
    def _reason(reply: Reply) -> str:
        return "end_turn" if reply.call is None else "tool_use"

    @staticmethod
    def _usage(reply: Reply, output: int) -> Json:
        return reply.usage or {
            "input_tokens": reply.input,
            "output_tokens": output,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        }

    def _message(self, request: Asked, reply: Reply) -> Json:
        kept: Json = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": request.body["model"],
            "content": [],
        }
        return {**kept, "stop_reason": None, "stop_sequence": None, "usage": self._usage(reply, 1)}
