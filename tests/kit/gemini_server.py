"""The Gemini Developer API on this machine: real HTTP, the wire format that ``google.genai`` speaks, answers by a
script.

It refuses what the real one refuses: a call without a key, contents without parts, a function call that was not
answered. And it keeps the provider's books: every request that arrived, and the usage of every answer that it worked
on.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.kit.sse_server import JsonHandler, LocalServer

Json = dict[str, Any]
KEY = "a-dummy-key"
_MODEL_CALL = re.compile(r"/v1beta/models/([^/:]+):(generateContent|streamGenerateContent|countTokens)")
_STATUS = {
    400: "INVALID_ARGUMENT",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}


def text(words: str, *, thought: bool = False) -> Json:
    return {"text": words, "thought": True} if thought else {"text": words}


def call(tool: str, /, **args: Any) -> Json:
    return {"functionCall": {"name": tool, "args": args}}


def usage(
    prompt: int,
    output: int | None = None,
    *,
    thoughts: int = 0,
    cached: int = 0,
    tool_use: int = 0,
    audio: int = 0,
    cached_audio: int = 0,
) -> Json:
    """``usageMetadata`` as the API writes it: a count of zero is left out, parts are told by modality."""
    told: Json = {
        "promptTokenCount": prompt,
        "totalTokenCount": prompt + (output or 0) + thoughts + tool_use,
        "promptTokensDetails": _details(prompt, audio),
    }
    if output is not None:
        told["candidatesTokenCount"] = output
    if thoughts:
        told["thoughtsTokenCount"] = thoughts
    if cached:
        told |= {"cachedContentTokenCount": cached, "cacheTokensDetails": _details(cached, cached_audio)}
    if tool_use:
        told |= {"toolUsePromptTokenCount": tool_use, "toolUsePromptTokensDetails": _details(tool_use, 0)}
    return told


def _details(tokens: int, audio: int) -> list[Json]:
    parts = [{"modality": "TEXT", "tokenCount": tokens - audio}] if tokens > audio else []
    return [*parts, {"modality": "AUDIO", "tokenCount": audio}] if audio else parts


USAGE = usage(1_000, 250)


@dataclass(frozen=True)
class Answer:
    """An answer that the provider works on and bills."""

    parts: Sequence[Json] = (text("fine"),)
    usage: Json | Callable[["Request"], Json] | None = field(default_factory=lambda: USAGE)
    model_version: str = ""  # the model that was asked
    finish: str = "STOP"
    blocked: str = ""  # a reason: the prompt was read, and nothing was said
    delay_s: float = 0.0
    # of a streamed answer
    chunks: int = 1  # pieces that its text comes in
    # "all": cumulative on each; "last"; "prompt first": the prompt at once, all of it with the last; "not last";
    # "alone": in a chunk after the last
    usage_on: str = "all"
    cut_after: int | None = None  # the connection breaks after so many chunks, or before an answer that is not streamed
    fails_after: int | None = None  # an error instead of the chunk after so many


@dataclass(frozen=True)
class Refusal:
    """An answer with an error status: nothing is billed."""

    status: int = 429
    retry_after: str = "7s"
    delay_s: float = 0.0

    @property
    def body(self) -> Json:
        return refusal(
            self.status,
            "Resource has been exhausted (e.g. check quota)." if self.status == 429 else "It did not work.",
            self.retry_after,
        )


def refusal(status: int, message: str, retry_after: str = "") -> Json:
    details = (
        [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": retry_after}]
        if retry_after and status in (429, 503)
        else []
    )
    return {
        "error": {
            "code": status,
            "message": message,
            "status": _STATUS.get(status, "UNKNOWN"),
            **({"details": details} if details else {}),
        }
    }


Step = Answer | Refusal
Script = Iterable[Step] | Callable[[int, "Request"], Step]


@dataclass(frozen=True)
class Request:
    """A request as it arrived."""

    method: str
    path: str
    query: dict[str, list[str]]
    body: Json
    number: int = 0  # of the calls to a model that were understood, from 1; 0 for everything else

    @property
    def verb(self) -> str:
        return self.path.rpartition(":")[2]

    @property
    def config(self) -> Json:
        return dict(self.body.get("generationConfig", {}))

    @property
    def max_output(self) -> int | None:
        return self.config.get("maxOutputTokens")


class GeminiServer(LocalServer):
    """The script is a list of steps, of which the last repeats, or a function of (n, request) with n from 1."""

    def __init__(self) -> None:
        self._script: Any = [Answer()]
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.requests: list[Request] = []
        self.billed: list[Json] = []  # usage of every answer that was worked on, whether or not it arrived
        self.tokens = 1_000  # what countTokens says
        self._in_flight = self.max_in_flight = 0
        super().__init__(_Handler)

    def script(self, *steps: Step) -> None:
        self._script = list(steps)

    def answer_by(self, decide: Callable[[int, Request], Step]) -> None:
        self._script = decide

    @property
    def calls(self) -> list[Request]:
        """What came to a model, in the order of arrival: each attempt of a client that tries again is one."""
        return [request for request in self.requests if request.number]

    def close(self) -> None:
        self._closing.set()
        super().close()

    # ---- for the handler --------------------------------------------------------------------------------------------

    def arrived(self, method: str, target: str, body: Json, is_call: bool) -> Request:
        parts = urlsplit(target)
        with self._lock:
            number = len(self.calls) + 1 if is_call else 0
            request = Request(method, parts.path, parse_qs(parts.query), body, number)
            self.requests.append(request)
        return request

    def step(self, request: Request) -> Step:
        found: Step = (
            self._script(request.number, request)
            if callable(self._script)
            else self._script[min(request.number, len(self._script)) - 1]
        )
        return found

    def work(self, step: Step) -> None:
        with self._lock:
            self._in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._in_flight)
        if step.delay_s:
            self._closing.wait(step.delay_s)
        with self._lock:
            self._in_flight -= 1

    def bill(self, used: Json | None) -> None:
        with self._lock:
            self.billed.append(used or {})

    def wait_for(self, calls: int, seconds: float = 5.0) -> None:
        """Until so many calls have arrived."""
        give_up = time.monotonic() + seconds
        while len(self.calls) < calls:
            assert time.monotonic() < give_up, f"{len(self.calls)} calls arrived, not {calls}"
            time.sleep(0.002)


class _Handler(JsonHandler):
    provider: GeminiServer

    def do_POST(self) -> None:  # noqa: N802 - http.server calls it
        body = self.body()
        target = urlsplit(self.path)
        called = _MODEL_CALL.fullmatch(target.path)
        wrong = self._wrong(called, target.path, body)
        verb = called.group(2) if called else ""
        request = self.provider.arrived(
            "POST", self.path, body, wrong is None and verb in ("generateContent", "streamGenerateContent")
        )
        if wrong is not None:
            self.send(wrong["error"]["code"], wrong)
        elif target.path == "/v1beta/cachedContents":
            kept = {
                "name": "cachedContents/c1",
                "model": body["model"],
                "usageMetadata": {"totalTokenCount": self.provider.tokens},
            }
            self.send(200, {**kept, "createTime": "2026-01-01T00:00:00Z", "expireTime": "2099-01-01T00:00:00Z"})
        elif verb == "countTokens":
            self.send(
                200,
                {
                    "totalTokens": self.provider.tokens,
                    "promptTokensDetails": [{"modality": "TEXT", "tokenCount": self.provider.tokens}],
                },
            )
        else:
            assert called is not None
            self._answer(request, called.group(1))

    def do_DELETE(self) -> None:  # noqa: N802 - http.server calls it
        self.provider.arrived("DELETE", self.path, {}, False)
        self.send(200, {})

    def _wrong(self, called: "re.Match[str] | None", path: str, body: Json) -> Json | None:
        if self.headers.get("x-goog-api-key") != KEY:
            return refusal(403, "Method doesn't allow unregistered callers (callers without established identity).")
        if called is None and path != "/v1beta/cachedContents":
            return refusal(404, f"{path} is not found")
        if called is None:
            return None
        contents = body.get("contents") or []
        if not contents or any(not content.get("parts") for content in contents):
            return refusal(400, "* GenerateContentRequest.contents: contents is not specified")
        for content, following in zip(contents, [*contents[1:], {}], strict=True):
            asked = sum("functionCall" in part for part in content["parts"])
            answered = sum("functionResponse" in part for part in following.get("parts", ()))
            if asked != answered and (asked or content.get("role") == "model"):
                return refusal(
                    400,
                    "Please ensure that the number of function response parts is equal to the number of "
                    "function call parts.",
                )
        return None

    # ---- answers ----------------------------------------------------------------------------------------------------

    def _answer(self, request: Request, model: str) -> None:
        step = self.provider.step(request)
        self.provider.work(step)
        if isinstance(step, Refusal):
            self.send(step.status, step.body)
            return
        used = step.usage(request) if callable(step.usage) else step.usage
        self.provider.bill(used)
        if request.verb == "generateContent":
            if step.cut_after is not None:
                self.hang_up()
                return
            self.send(200, self._piece(step, model, list(step.parts), used, last=True))
            return
        self.begin_stream()
        pieces = _pieces(step)
        for index, parts in enumerate(pieces):
            if index == step.cut_after:
                self.hang_up()
                return
            if index == step.fails_after:
                self.event(_sse(Refusal(503).body))
                break
            last = index == len(pieces) - 1
            self.event(_sse(self._piece(step, model, parts, _told(step, used, index, len(pieces)), last=last)))
        if step.usage_on == "alone":
            self.event(_sse({"usageMetadata": used, "modelVersion": step.model_version or model}))
        if step.cut_after == len(pieces):
            self.hang_up()
            return
        self.end_stream()

    @staticmethod
    def _piece(step: Answer, model: str, parts: list[Json], used: Json | None, *, last: bool) -> Json:
        shown: Json = {"modelVersion": step.model_version or model, "responseId": "r1"}
        if step.blocked:
            shown["promptFeedback"] = {"blockReason": step.blocked}
        else:
            candidate: Json = {"content": {"parts": parts, "role": "model"}, "index": 0}
            shown["candidates"] = [{**candidate, "finishReason": step.finish} if last else candidate]
        if used is not None:
            shown["usageMetadata"] = used
        return shown


def _sse(body: Json) -> str:
    return f"data: {json.dumps(body)}\r\n\r\n"


def _pieces(step: Answer) -> list[list[Json]]:
    """The parts of each chunk: words in pieces, everything else whole with the last one."""
    if step.chunks <= 1:
        return [list(step.parts)]
    words = [part for part in step.parts if "text" in part]
    rest = [part for part in step.parts if "text" not in part]
    said = "".join(part["text"] for part in words)
    size = -(-len(said) // step.chunks) or 1
    pieces: list[list[Json]] = [[{"text": said[start : start + size]}] for start in range(0, len(said), size)]
    pieces += [[{"text": ""}] for _ in range(step.chunks - len(pieces))]
    pieces[-1] += rest
    return pieces


def _told(step: Answer, used: Json | None, index: int, count: int) -> Json | None:
    """Usage as it stands with a chunk; all of it with the last."""
    last = index == count - 1
    if (
        used is None
        or step.usage_on == "alone"
        or (step.usage_on == "last" and not last)
        or (step.usage_on == "not last" and last and count > 1)
    ):
        return None
    if last or step.usage_on == "not last":
        return used
    so_far = dict(used)
    output = 0 if step.usage_on == "prompt first" else used.get("candidatesTokenCount", 0) * (index + 1) // count
    so_far["totalTokenCount"] = used["totalTokenCount"] - used.get("candidatesTokenCount", 0) + output
    so_far.pop("candidatesTokenCount", None)
    if output:
        so_far["candidatesTokenCount"] = output
    return so_far
