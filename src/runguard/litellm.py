"""RunGuard for the LiteLLM proxy: one callback, ``RunGuardGateway(max_usd=2)``, guards every program behind it.

The proxy calls the hooks of a ``CustomLogger``. They find the run of a request with ``gateway/conversations`` and read
it with ``gateway/formats``, as RunGuard's own gateway does.
"""

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from importlib.util import find_spec
from itertools import islice
from typing import Any, Final, Unpack

if find_spec("litellm") is None:
    raise ImportError("runguard.litellm needs litellm: pip install 'litellm[proxy]'")

from litellm.exceptions import ModifyResponseException
from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy._types import ProxyException

from runguard.calls.model_calls import Permission
from runguard.calls.run import error_of, guard_of
from runguard.core.decision import Trip
from runguard.core.identity import LruDict, digest
from runguard.engine.guard import Controls
from runguard.gateway.access import PAYERS_KEY_CHARS, agent_named
from runguard.gateway.conversations import IDLE_S, Asked, Call, Conversations, Payer
from runguard.gateway.formats import AnswerReader, Body, ChatCompletions, Embeddings, Messages, Responses, WireFormat
from runguard.policy.keywords import PolicySettings
from runguard.providers.messages import read
from runguard.termination.conditions import Ended

__all__ = ["RunGuardGateway"]

_CHAT, _MESSAGES, _RESPONSES, _EMBEDDINGS = ChatCompletions(), Messages(), Responses(), Embeddings()
_FORMATS: Final[dict[str, WireFormat]] = {
    **dict.fromkeys(("completion", "acompletion"), _CHAT),
    "anthropic_messages": _MESSAGES,
    **dict.fromkeys(("responses", "aresponses"), _RESPONSES),
    **dict.fromkeys(("embeddings", "embedding", "aembedding", "text_completion", "atext_completion"), _EMBEDDINGS),
}
# The rest of LiteLLM's request is for the proxy itself.
_SENT: Final = frozenset(
    {
        *("model", "messages", "system", "tools", "functions", "tool_choice", "input", "prompt", "instructions", "n"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens", "response_format", "text", "thinking", "stream"),
        *("stream_options", "previous_response_id", "conversation", "output_format", "output_config", "background"),
    }
)
_OPEN_KEPT: Final = 50_000
_KINDS_KEPT: Final = 100
_LOST_AT_ONCE: Final = 16  # the oldest come first
_log: Final = logging.getLogger("runguard")


class _Call(Call):
    """One model call of the proxy, with all its retries, until its answer is complete."""

    begun_at = 0.0


class RunGuardGateway(Controls, CustomLogger):  # type: ignore[misc]
    """``callbacks: [my_module.guard]`` in the proxy's settings, with ``guard = RunGuardGateway(max_usd=2)`` in it.

    The keywords are those of every adapter. Whose budgets a request is for says its virtual key: the team is the app,
    the key's user is the user. A stop is an answer with a text. With ``on_stop="raise"``, and where the program expects
    data, it is an error with status 429.
    """

    def __init__(self, *, idle_seconds: float = IDLE_S, **policy: Unpack[PolicySettings]) -> None:
        super().__init__()
        self.guard = guard_of(policy, gives_last_answers=True)
        self._conversations = Conversations(self.guard, idle_seconds=idle_seconds)
        self._calls = LruDict[str, _Call](_OPEN_KEPT)
        self._unguarded = set[str]()  # kinds of requests that are in the log

    # ---- before a call ----------------------------------------------------------------------------------------------

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> Any:
        if self.guard.policy.mode == "off":
            return data
        self._forget_lost()
        wire = _FORMATS.get(call_type)
        if wire is None:
            self._note_unguarded(call_type)
            return data
        body: Body = {name: value for name, value in data.items() if name in _SENT and value is not None}
        asked = _asked(wire, body, data, user_api_key_dict)
        strand, reply = await self._conversations.ask(asked, lambda: wire.request(body, ""))
        if not isinstance(reply, Permission):
            strand.has_answered = True
            raise self._stop(reply, wire, body, data)
        changed = reply.changed(wire.changed, body)
        if changed is not body:
            data.update(changed)
            for name in body.keys() - changed.keys():
                data.pop(name)
        if (before := self._calls.get(_id_of(data))) is not None:  # a client may choose the id
            before.fail(None)
        self._calls[_id_of(data)] = call = _Call(self._conversations, strand, reply, wire)
        call.begun_at = time.monotonic()
        return data

    def _note_unguarded(self, call_type: str) -> None:
        if call_type not in self._unguarded and len(self._unguarded) < _KINDS_KEPT:
            self._unguarded.add(call_type)
            _log.warning("runguard.unguarded: requests to %s pass through: what they cost is not known here", call_type)

    def _forget_lost(self) -> None:
        """Book calls of which the proxy has told nothing for too long: a client may have left before the answer."""
        latest = time.monotonic() - self._conversations.idle_s
        for name in [name for name, call in islice(self._calls.items(), _LOST_AT_ONCE) if call.begun_at < latest]:
            self._calls.pop(name).fail(None)

    def _stop(self, end: Trip | Ended, wire: WireFormat, body: Body, data: dict[str, Any]) -> Exception:
        text = self.guard.stop_text(end) if isinstance(end, Trip) else end.reason
        if self.guard.policy.on_stop == "raise" or wire.asks_for_data(body):
            stop: Exception = ProxyException(text, "runguard_stop", None, 429, headers={"x-should-retry": "false"})
            stop.__cause__ = error_of(end)
        else:
            stop = ModifyResponseException(text, wire.model(body, ""), data, "runguard", {"runguard": end.to_dict()})
        return stop

    # ---- after a call -----------------------------------------------------------------------------------------------

    async def async_post_call_success_hook(self, data: dict[str, Any], user_api_key_dict: Any, response: Any) -> Any:
        """Book the call: its answer is complete, and the program has not got it yet."""
        call = self._calls.get(_id_of(data))
        if call is not None:
            reading = read(response)
            call.settle(reading, reading.size)
        return response

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: AsyncIterator[Any], request_data: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        call = self._calls.get(_id_of(request_data))
        if call is None:
            async for chunk in response:
                yield _streamed(chunk)
            return
        reader, is_whole = AnswerReader(call.wire, "", is_stream=True), False
        before: Any = None
        try:
            async for chunk in response:
                if before is not None:
                    yield before
                reader.take(chunk)
                before = chunk
            is_whole = True
            call.settle(reader.reading, reader.said)
            if before is not None:  # the last piece leaves when everything is booked
                yield before
        finally:
            if not is_whole:
                call.fail(None, reader)

    async def async_log_success_event(
        self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        """Book or correct the call by the proxy's own account, which has the usage of streams without a report."""
        call = self._calls.pop(_id_of(kwargs), None)
        if call is None:
            return
        reading = read(response_obj)
        if call.is_over and reading.usage is not None:
            call.permission.correct(reading.usage, model=reading.model)
        elif not call.is_over:
            call.settle(reading, reading.size)

    async def async_post_call_failure_hook(
        self, request_data: dict[str, Any], original_exception: Exception, user_api_key_dict: Any, *_: Any, **__: Any
    ) -> None:
        """Close a request that has failed for good. A failure that the proxy tries again is only in its log."""
        call = self._calls.pop(_id_of(request_data), None)
        if call is not None:
            call.fail(original_exception)


def _id_of(data: dict[str, Any]) -> str:
    return str(data.get("litellm_call_id") or "")


def _streamed(chunk: Any) -> Any:
    """Return a piece of a stream. The proxy gives a stop as a whole message, also to clients that wait for events."""
    if not isinstance(chunk, dict) or chunk.get("type") != "message":
        return chunk
    return _MESSAGES.stop_events(chunk, "", read(chunk).text).decode()


def _asked(wire: WireFormat, body: Body, data: dict[str, Any], key: Any) -> Asked:
    metadata = data.get("metadata") or data.get("litellm_metadata") or {}
    session = data.get("litellm_session_id") or data.get("litellm_trace_id") or metadata.get("session_id") or ""
    headers = (data.get("proxy_server_request") or {}).get("headers") or {}
    agent = getattr(key, "key_alias", None) or agent_named(str(headers.get("user-agent", "")))
    return Asked.of(wire, body, _payer(key), str(agent), str(session))


def _payer(key: Any) -> Payer:
    """Who pays, as the proxy's own settings say. What a client writes into its request decides nothing."""
    app = getattr(key, "team_id", None) or "litellm"
    user = getattr(key, "user_id", None) or getattr(key, "key_alias", None)
    secret = str(getattr(key, "token", None) or getattr(key, "api_key", None) or "")
    return Payer(str(app), str(user or f"key-{digest(secret).hex()[:PAYERS_KEY_CHARS]}"))
