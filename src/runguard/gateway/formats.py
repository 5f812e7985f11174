"""The wire formats of the model providers: what a request asks for, how to answer it, and what an answer says.

``gateway/proxy`` and ``litellm`` use one ``WireFormat`` for each request. Answers, usage and tool results are
read by ``runguard.providers``; this file knows only what those readers need to be given.
"""

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from runguard.calls.model_calls import ModelRequest, Permission
from runguard.core.identity import digest
from runguard.providers.messages import Reading, Round, read, rounds_of_turn
from runguard.providers.streams import StreamReading
from runguard.providers.usage import fields, items, name_of_tool, size_of

Body = dict[str, Any]

# What coding agents add around the words of tools and users: Claude Code and its relatives.
_HOSTS_OWN: Final = re.compile(
    r"\s*<(system-reminder|environment_context|environment_details|local-command-stdout|user_instructions)>"
    r".*?</\1>\s*",
    re.DOTALL,
)
# What Codex writes above the output of a command. How it ended says something; the rest differs from call to call.
_HEAD_LINE: Final = (
    r"(?:Chunk ID|Wall time|Duration|Process|Exit code|Original token count|Total output lines|Script)\b[^\n]{0,200}\n"
)
_HEAD: Final = re.compile(rf"\s*((?:{_HEAD_LINE}){{1,8}})Output:(?:\n|$)")
_TELLING: Final = re.compile(r"^(?:Process running|.*\bcode:? (?!0$)-?\d+$|Script (?!completed)).*$", re.MULTILINE)
_TEXT_READ: Final = 1_000_000  # characters of a text in which such words are looked for
STOPPED_ID: Final = "runguard"


def without_hosts_words(text: str) -> str:
    """Take out what the host program has added to a text, such as reminders to the model."""
    if (head := _HEAD.match(text)) is not None:
        text = "\n".join([*_TELLING.findall(head[1]), text[head.end() :]])
    if "</" not in text or len(text) > _TEXT_READ:
        return text.strip()
    return _HOSTS_OWN.sub(" ", text).strip()


def event(data: Body, name: str = "") -> bytes:
    """Return one server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


class WireFormat:
    """One kind of request to a model, streamed or not."""

    provider: ClassVar[str] = ""

    # ---- what a request asks for ------------------------------------------------------------------------------------

    def matches(self, path: str) -> bool:
        """Whether requests to this path have the format."""
        raise NotImplementedError

    def model(self, body: Body, path: str) -> str:
        return _text(body.get("model"))

    def is_streamed(self, body: Body, path: str) -> bool:
        return body.get("stream") is True

    def messages(self, body: Body) -> Any:
        return body.get("messages")

    def limit(self, body: Body) -> int | None:
        """Return the output limit of one answer."""
        raise NotImplementedError

    def candidates(self, body: Body) -> int:
        """How many answers are asked for and paid."""
        return 1

    def stored(self, body: Body) -> str:
        """Return the name of something that the provider adds to the prompt, such as a conversation that it keeps."""
        return ""

    def asks_for_data(self, body: Body) -> bool:
        """Whether the program expects an answer that is no text, so that a stop must be an error."""
        raise NotImplementedError

    def has_tools(self, body: Body) -> bool:
        return bool(items(body.get("tools")))

    def offered(self, body: Body) -> list[Any]:
        """Return the tools that the model is offered."""
        return [*items(body.get("tools"))]

    def request(self, body: Body, path: str, hidden: int = 0) -> ModelRequest:
        """Return what the core needs to know of a request. ``hidden``: tokens that the provider adds by itself."""
        limit = self.limit(body)
        if limit is not None:
            limit *= self.candidates(body)
        tools = [name_of_tool(tool) for tool in self.offered(body)]
        return ModelRequest.of(self.model(body, path), body, limit, hidden=hidden, counts=body, tools=tools)

    def rounds(self, body: Body) -> Iterator[Round]:
        """Yield the model's answers with tool calls since the user's last word, and their results, the newest first."""
        return rounds_of_turn(self.messages(body), without_hosts_words)

    def beginning(self, body: Body) -> bytes:
        """Return a fingerprint of the first message of the user: the same for every request of a conversation.

        Marks for prompt caches move from request to request, and reminders of the host program change; both are left
        out. Requests with tools and requests without are different conversations: the latter write titles and such.
        """
        words = ""
        for message in items(self.messages(body)):
            if isinstance(message, dict) and message.get("role", "user") == "user" and (words := _words_of(message)):
                break
        return digest(f"{type(self).__name__}|{self.has_tools(body)}|{words or self.messages(body)}")

    def said(self, body: Body) -> tuple[list[Any], bool]:
        """Return the user's newest message, its texts and other parts, and whether a conversation goes on with it."""
        messages = [message for message in items(self.messages(body)) if isinstance(message, dict)]
        spoken = (one for one in reversed(messages) if one.get("role", "user") == "user" and _words_of(one))
        goes_on = bool(self.stored(body)) or any(one.get("role") in ("assistant", "model") for one in messages)
        return [_plain(part) for part in _parts_of(next(spoken, {}))], goes_on

    # ---- what the gateway changes -----------------------------------------------------------------------------------

    def add_notice(self, body: Body, notice: str) -> None:
        """Add a line for the model behind everything else, so that no cached prefix changes."""
        body["messages"] = [*items(body.get("messages")), {"role": "user", "content": notice}]

    def lower(self, body: Body, limit: int) -> None:
        """Set the output limit of all answers together."""
        raise NotImplementedError

    def forbid_tools(self, body: Body) -> None:
        """Let the model answer without tools. Their declarations stay, so that no cached prefix changes."""
        body["tool_choice"] = "none"

    def leave_out(self, body: Body, permission: Permission) -> None:
        """Take the withheld tools out."""
        body["tools"] = permission.left(self.offered(body), name_of_tool, body.get("tool_choice"))

    def changed(self, permission: Permission, body: Body) -> Body:
        """Return a request with what a permission says: a notice, a lower limit, fewer or no tools."""
        body = dict(body)  # the methods below write to nothing inside it
        if permission.withheld and self.offered(body):
            self.leave_out(body, permission)
        if permission.last_after is not None:
            self.forbid_tools(body)
        if permission.notice:
            self.add_notice(body, permission.notice)
        if (limit := permission.max_output_tokens) is not None:
            self.lower(body, limit)
        return body

    # ---- what the gateway answers by itself -------------------------------------------------------------------------

    def stop(self, body: Body, path: str, text: str) -> Body:
        """Return an answer in this format that ends the run: a text, no tool calls, no usage."""
        raise NotImplementedError

    def stop_events(self, body: Body, path: str, text: str) -> bytes:
        """Return the same answer as a stream."""
        raise NotImplementedError

    def error(self, kind: str, text: str, status: int) -> Body:
        """Return an error as the provider would say it."""
        return {"error": {"message": text, "type": kind, "param": None, "code": kind}}

    def cut(self, text: str) -> bytes:
        """Return the last event of a stream that is ended on the way."""
        return event(self.error("runguard_stop", text, 429))

    def is_end(self, data: Any) -> bool:
        """Whether an event is the last one that says something: the program may go on as soon as it has it."""
        return bool(data == "[DONE]")


class ChatCompletions(WireFormat):
    """OpenAI's chat completions, and all who speak them."""

    provider = "openai"

    def matches(self, path: str) -> bool:
        return path.endswith("/chat/completions")

    def limit(self, body: Body) -> int | None:
        return _count(body.get("max_completion_tokens"), body.get("max_tokens"))

    def candidates(self, body: Body) -> int:
        return _count(body.get("n")) or 1

    def asks_for_data(self, body: Body) -> bool:
        wanted = body.get("response_format")
        return (isinstance(wanted, dict) and wanted.get("type") != "text") or body.get("tool_choice") not in (
            *(None, "auto", "none"),
        )

    def has_tools(self, body: Body) -> bool:
        return bool(items(body.get("tools")) or items(body.get("functions")))

    def forbid_tools(self, body: Body) -> None:
        if body.get("tools"):
            body["tool_choice"] = "none"

    def lower(self, body: Body, limit: int) -> None:
        names = [name for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
        newer = re.match(r"(?:openai/)?(?:gpt-|chatgpt|o\d)", self.model(body, "")) is not None
        for name in names or ["max_completion_tokens" if newer else "max_tokens"]:
            body[name] = max(limit // self.candidates(body), 1)

    def stop(self, body: Body, path: str, text: str) -> Body:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            **self._head(body, "chat.completion"),
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        }

    def stop_events(self, body: Body, path: str, text: str) -> bytes:
        head = self._head(body, "chat.completion.chunk")

        def chunk(delta: Body, finish: str | None) -> bytes:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            return event({**head, "choices": [choice]})

        pieces = [chunk({"role": "assistant", "content": text}, None), chunk({}, "stop")]
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
            pieces.append(event({**head, "choices": [], "usage": usage}))
        return b"".join([*pieces, b"data: [DONE]\n\n"])

    def _head(self, body: Body, kind: str) -> Body:
        return {"id": f"chatcmpl-{STOPPED_ID}", "object": kind, "created": 0, "model": self.model(body, "")}


class Responses(WireFormat):
    """OpenAI's responses."""

    provider = "openai"

    def matches(self, path: str) -> bool:
        return path.endswith("/responses")

    def messages(self, body: Body) -> Any:
        given = body.get("input")
        return [{"role": "user", "content": given}] if isinstance(given, str) else given

    def limit(self, body: Body) -> int | None:
        return _count(body.get("max_output_tokens"))

    def stored(self, body: Body) -> str:
        kept = body.get("previous_response_id") or body.get("conversation")
        kept = kept.get("id") if isinstance(kept, dict) else kept
        return _text(kept)

    def asks_for_data(self, body: Body) -> bool:
        wanted = (body.get("text") or {}).get("format") if isinstance(body.get("text"), dict) else None
        return (isinstance(wanted, dict) and wanted.get("type") != "text") or body.get("tool_choice") not in (
            *(None, "auto", "none"),
        )

    def has_tools(self, body: Body) -> bool:
        """Tools may also stand among the messages, where Codex declares them."""
        return super().has_tools(body) or any(
            isinstance(one, dict) and one.get("type") == "additional_tools" for one in items(body.get("input"))
        )

    def add_notice(self, body: Body, notice: str) -> None:
        body["input"] = [*items(self.messages(body)), {"role": "user", "content": notice}]

    def lower(self, body: Body, limit: int) -> None:
        body["max_output_tokens"] = limit

    def stop(self, body: Body, path: str, text: str) -> Body:
        return self._response(body, "completed", [self._message(text, "completed")])

    def stop_events(self, body: Body, path: str, text: str) -> bytes:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        at: Body = {"item_id": f"msg_{STOPPED_ID}", "output_index": 0, "content_index": 0}
        begun = self._response(body, "in_progress", [])
        empty, whole = {**self._message("", "in_progress"), "content": []}, self._message(text, "completed")
        events: list[tuple[str, Body]] = [
            ("created", {"response": begun}),
            ("in_progress", {"response": begun}),
            ("output_item.added", {"output_index": 0, "item": empty}),
            ("content_part.added", {**at, "part": {**part, "text": ""}}),
            ("output_text.delta", {**at, "delta": text, "logprobs": []}),
            ("output_text.done", {**at, "text": text, "logprobs": []}),
            ("content_part.done", {**at, "part": part}),
            ("output_item.done", {"output_index": 0, "item": whole}),
            ("completed", {"response": self.stop(body, path, text)}),
        ]
        return b"".join(
            event({"type": f"response.{name}", "sequence_number": number, **data}, f"response.{name}")
            for number, (name, data) in enumerate(events)
        )

    def is_end(self, data: Any) -> bool:
        return isinstance(data, dict) and data.get("type") in _RESPONSE_ENDS

    def cut(self, text: str) -> bytes:
        return event({"type": "error", "code": "runguard_stop", "message": text, "param": None}, "error")

    def _response(self, body: Body, status: str, output: list[Body]) -> Body:
        usage = {
            "input_tokens": 0,
            "output_tokens": 0,
            "total_tokens": 0,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        return {
            "id": f"resp_{STOPPED_ID}",
            "object": "response",
            "created_at": 0,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "model": self.model(body, ""),
            "output": output,
            "parallel_tool_calls": True,
            "temperature": None,
            "top_p": None,
            "tools": [],
            "tool_choice": "auto",
            "previous_response_id": body.get("previous_response_id"),
            "store": False,
            "usage": usage if status == "completed" else None,
        }

    @staticmethod
    def _message(text: str, status: str) -> Body:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        message = {"id": f"msg_{STOPPED_ID}", "type": "message", "role": "assistant"}
        return {**message, "status": status, "content": [part]}


class Compaction(Responses):
    """A shorter history from OpenAI, as Codex asks for it. It is no text, so a stop can only be an error."""

    def matches(self, path: str) -> bool:
        return path.endswith("/responses/compact")

    def request(self, body: Body, path: str, hidden: int = 0) -> ModelRequest:
        return replace(super().request(body, path, hidden), fixed_output=True)

    def asks_for_data(self, body: Body) -> bool:
        return True

    def changed(self, permission: Permission, body: Body) -> Body:
        """Leave the request as it is: it takes no limit, and nobody would read a notice."""
        return body


_RESPONSE_ENDS: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})


class Messages(WireFormat):
    """Anthropic's messages."""

    provider = "anthropic"

    def matches(self, path: str) -> bool:
        return path.endswith("/messages") and "/threads/" not in path  # OpenAI's, which asks no model

    def limit(self, body: Body) -> int | None:
        return _count(body.get("max_tokens"))

    def asks_for_data(self, body: Body) -> bool:
        config = body.get("output_config")
        wanted = body.get("output_format") or (config.get("format") if isinstance(config, dict) else None)
        choice = body.get("tool_choice")
        return bool(wanted) or (isinstance(choice, dict) and choice.get("type") in ("any", "tool"))

    def add_notice(self, body: Body, notice: str) -> None:
        """Behind the last block of the user, which may carry the mark of the prompt cache."""
        messages, block = list(items(body.get("messages"))), {"type": "text", "text": notice}
        at = next((n for n in range(len(messages) - 1, -1, -1) if messages[n].get("role") == "user"), None)
        if at is None:
            messages.append({"role": "user", "content": [block]})
        else:
            content = messages[at].get("content")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else items(content)
            messages[at] = {**messages[at], "content": [*blocks, block]}
        body["messages"] = messages

    def lower(self, body: Body, limit: int) -> None:
        body["max_tokens"] = limit
        thinking = body.get("thinking")
        budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
        if isinstance(budget, int) and budget >= limit:  # it must be less, and at least 1,024
            if limit > _LEAST_THINKING:
                body["thinking"] = {**body["thinking"], "budget_tokens": max(limit // 2, _LEAST_THINKING)}
            else:
                del body["thinking"]

    def forbid_tools(self, body: Body) -> None:
        if body.get("tools"):
            body["tool_choice"] = {"type": "none"}

    def stop(self, body: Body, path: str, text: str) -> Body:
        usage = {"input_tokens": 0, "output_tokens": 0}
        return {
            "id": f"msg_{STOPPED_ID}",
            "type": "message",
            "role": "assistant",
            "model": self.model(body, path),
            "content": [{"type": "text", "text": text}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {**usage, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
        }

    def stop_events(self, body: Body, path: str, text: str) -> bytes:
        begun = {**self.stop(body, path, text), "content": [], "stop_reason": None}
        events: list[tuple[str, Body]] = [
            ("message_start", {"message": begun}),
            ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
            ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}}),
            ("content_block_stop", {"index": 0}),
            (
                "message_delta",
                {"delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"output_tokens": 0}},
            ),
            ("message_stop", {}),
        ]
        return b"".join(event({"type": name, **data}, name) for name, data in events)

    def error(self, kind: str, text: str, status: int) -> Body:
        return {"type": "error", "error": {"type": "rate_limit_error" if status == 429 else kind, "message": text}}

    def cut(self, text: str) -> bytes:
        return event(self.error("runguard_stop", text, 429), "error")

    def is_end(self, data: Any) -> bool:
        return isinstance(data, dict) and data.get("type") == "message_stop"


_LEAST_THINKING: Final = 1_024


class Gemini(WireFormat):
    """Gemini's ``generateContent`` and ``streamGenerateContent``, of AI Studio and of Vertex."""

    provider = "gemini"
    _path: Final = re.compile(r"/([^/:]+):(streamGenerateContent|generateContent)$", re.IGNORECASE)

    def matches(self, path: str) -> bool:
        return self._path.search(path) is not None

    def model(self, body: Body, path: str) -> str:
        found = self._path.search(path)
        return found[1] if found is not None else ""

    def is_streamed(self, body: Body, path: str) -> bool:
        return path.lower().endswith(":streamgeneratecontent")

    def messages(self, body: Body) -> Any:
        given = body.get("contents")
        return [given] if isinstance(given, dict) else given

    def limit(self, body: Body) -> int | None:
        config = _config(body)
        return _count(config.get("maxOutputTokens"), config.get("max_output_tokens"))

    def candidates(self, body: Body) -> int:
        config = _config(body)
        return _count(config.get("candidateCount"), config.get("candidate_count")) or 1

    def stored(self, body: Body) -> str:
        return _text(body.get("cachedContent") or body.get("cached_content"))

    def asks_for_data(self, body: Body) -> bool:
        config = _config(body)
        mime = config.get("responseMimeType") or config.get("response_mime_type")
        return mime not in (None, "text/plain") or str(_calling(body).get("mode")).upper() == "ANY"

    def add_notice(self, body: Body, notice: str) -> None:
        body["contents"] = [*items(self.messages(body)), {"role": "user", "parts": [{"text": notice}]}]

    def lower(self, body: Body, limit: int) -> None:
        name = "generation_config" if "generation_config" in body else "generationConfig"
        config = {key: value for key, value in _config(body).items() if key != "max_output_tokens"}
        body[name] = {**config, "maxOutputTokens": max(limit // self.candidates(body), 1)}

    def offered(self, body: Body) -> list[Any]:
        return [one for tool in items(body.get("tools")) for name in _DECLARED for one in items(fields(tool).get(name))]

    def leave_out(self, body: Body, permission: Permission) -> None:
        left = permission.left(self.offered(body), name_of_tool, _calling(body))
        tools = [
            {name: [one for one in held if one in left] if name in _DECLARED else held for name, held in tool.items()}
            for tool in items(body.get("tools"))
        ]
        body["tools"] = [tool for tool in tools if any(held or name not in _DECLARED for name, held in tool.items())]

    def forbid_tools(self, body: Body) -> None:
        name = "tool_config" if "tool_config" in body else "toolConfig"
        body[name] = {"functionCallingConfig": {"mode": "NONE"}}

    def stop(self, body: Body, path: str, text: str) -> Body:
        content = {"role": "model", "parts": [{"text": text}]}
        return {
            "candidates": [{"content": content, "finishReason": "STOP", "index": 0}],
            "usageMetadata": {"promptTokenCount": 0, "candidatesTokenCount": 0, "totalTokenCount": 0},
            "modelVersion": self.model(body, path),
            "responseId": STOPPED_ID,
        }

    def stop_events(self, body: Body, path: str, text: str) -> bytes:
        return event(self.stop(body, path, text))

    def error(self, kind: str, text: str, status: int) -> Body:
        return {"error": {"code": status, "message": text, "status": _GOOGLE.get(status, "UNAVAILABLE")}}

    def is_end(self, data: Any) -> bool:
        return (
            isinstance(data, dict)
            and data.get("usageMetadata") is not None
            and any(isinstance(one, dict) and one.get("finishReason") for one in items(data.get("candidates")))
        )


_GOOGLE: Final = {400: "INVALID_ARGUMENT", 413: "INVALID_ARGUMENT", 429: "RESOURCE_EXHAUSTED", 501: "UNIMPLEMENTED"}


class Embeddings(ChatCompletions):
    """OpenAI's embeddings and older completions: paid, and a stop can only be an error."""

    def matches(self, path: str) -> bool:
        return path.endswith(("/embeddings", "/completions"))

    def messages(self, body: Body) -> Any:
        return body.get("input") or body.get("prompt")

    def limit(self, body: Body) -> int | None:
        return 0 if body.get("input") is not None else super().limit(body)

    def add_notice(self, body: Body, notice: str) -> None:
        """Leave the request as it is: nobody would read the notice."""

    def asks_for_data(self, body: Body) -> bool:
        return True


FORMATS: Final[tuple[WireFormat, ...]] = (
    *(ChatCompletions(), Responses(), Compaction(), Messages(), Gemini(), Embeddings()),
)


def format_of(path: str) -> WireFormat | None:
    """Return the format of the requests to a path, or None for a path that no model answers."""
    return next((one for one in FORMATS if one.matches(path.lower())), None)  # some servers ignore case


# ---- Small readers.


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(*given: object) -> int | None:
    return next((one for one in given if type(one) is int and one >= 0), None)


_DECLARED: Final = ("functionDeclarations", "function_declarations")


def _config(body: Body) -> Body:
    config = body.get("generationConfig") or body.get("generation_config")
    return config if isinstance(config, dict) else {}


def _calling(body: Body) -> Body:
    config = body.get("toolConfig") or body.get("tool_config")
    held = config.get("functionCallingConfig") if isinstance(config, dict) else None
    return held if isinstance(held, dict) else {}


def _parts_of(message: Body) -> Sequence[Any]:
    said = message.get("content") if "parts" not in message else message.get("parts")
    return [said] if isinstance(said, str) else items(said)


def _plain(part: Any) -> Any:
    """Return the user's words in a part, or another part without its mark for a prompt cache."""
    if isinstance(part, dict) and not isinstance(part.get("text"), str):
        return {name: value for name, value in part.items() if name != "cache_control"}
    return _word(part)


def _words_of(message: Body) -> str:
    """Return the text of a message, and the kinds of its other parts."""
    return "\n".join(word for part in _parts_of(message) if (word := _word(part)))


def _word(part: object) -> str:
    if isinstance(part, str):
        return without_hosts_words(part)
    if not isinstance(part, dict):
        return ""
    text = part.get("text")
    return without_hosts_words(text) if isinstance(text, str) else f"[{part.get('type') or '/'.join(map(str, part))}]"


# ---- Reads an answer while it passes through, whole or streamed, without changing a byte of it.

_MOST_BYTES: Final = 64_000_000  # of an answer, or of one event, that is read; more is counted by its size
_SLICE: Final = 1_000_000


class Inflater:
    """Unpacks the copy of a body that is read, within bounds."""

    def __init__(self, encoding: str) -> None:
        self.is_readable = encoding in ("", "identity", "gzip", "deflate")
        self._inflate = (
            zlib.decompressobj(47 if encoding == "gzip" else 15) if encoding in ("gzip", "deflate") else None
        )

    def feed(self, data: bytes) -> bytes:
        if not self.is_readable:
            return b""
        if self._inflate is None:
            return data
        try:
            out, left = bytearray(), data
            while left and len(out) < _MOST_BYTES:
                out += self._inflate.decompress(left, _SLICE)
                left = self._inflate.unconsumed_tail
            return bytes(out)
        except zlib.error:
            self.is_readable = False
            return b""


class AnswerReader:
    """What an answer has said so far, and whether it is complete."""

    def __init__(self, wire: WireFormat, encoding: str, *, is_stream: bool) -> None:
        self._wire, self.is_stream = wire, is_stream
        self._inflate = Inflater(encoding)
        self._stream = StreamReading()
        self._rest = bytearray()
        self.size = 0  # bytes that came
        self.name = ""  # under which the provider keeps the answer
        self._whole: Reading | None = None

    def feed(self, chunk: bytes) -> bool:
        """Take in a piece of the body. True: the answer is complete, and the program may act on it."""
        self.size += len(chunk)
        self._rest += self._inflate.feed(chunk)
        if len(self._rest) > _MOST_BYTES:
            self._rest.clear()
            self._inflate.is_readable = False
        if not self.is_stream:
            return False
        is_complete = False
        while (end := self._rest.find(b"\n")) >= 0:
            line = bytes(self._rest[:end])
            del self._rest[: end + 1]
            if line.startswith(b"data:"):
                is_complete = self._event(line[5:].strip()) or is_complete
        return is_complete

    def end(self) -> None:
        """Read a body that is no stream: it is complete."""
        if self.is_stream or not self._rest:
            return
        try:
            data = json.loads(bytes(self._rest))
        except (ValueError, RecursionError):
            return
        if isinstance(data, list):  # Gemini's stream without server-sent events
            for one in data:
                self._note(one)
            self.is_stream = True
        else:
            self._whole, self.name = read(data), _name_of(data)

    @property
    def is_final(self) -> bool:
        """Whether the usage so far is final, although the stream may have been cut."""
        return self._stream.is_final

    @property
    def lacks_report(self) -> bool:
        """Whether more was said than the usage so far can count: a stream that ended without its last report."""
        return self._whole is None and self._stream.ends_unreported

    @property
    def reading(self) -> Reading:
        """What the answer has said so far, with the least that it can have taken as its usage."""
        if self._whole is not None:
            return self._whole
        return replace(self._stream.reading(), usage=self._stream.least_usage)

    @property
    def said(self) -> int:
        """Bytes that the model has said, for the estimate of an answer without a report."""
        if self.is_stream:
            return self._stream.received or (0 if self._inflate.is_readable else self.size)
        if self._whole is None:
            return self.size
        return self._whole.size or size_of(self._whole.text)

    def _event(self, line: bytes) -> bool:
        if line == b"[DONE]":
            return self._wire.is_end("[DONE]")
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            return False
        self._note(data)
        return self._wire.is_end(data)

    def take(self, chunk: Any) -> None:
        """Take in a piece of a stream that a library has read: an object, or the text of events."""
        if isinstance(chunk, str | bytes):
            self.feed(chunk.encode() if isinstance(chunk, str) else chunk)
        else:
            self._note(chunk)

    def _note(self, data: Any) -> None:
        self._stream.feed(data)
        if not self.name and isinstance(data, dict):
            self.name = _name_of(data.get("response"))


def _name_of(data: Any) -> str:
    name = data.get("id") if isinstance(data, dict) else None
    return name if isinstance(name, str) else ""
