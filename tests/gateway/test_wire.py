"""What passes through unchanged, what the gateway adds, and what it books when a call does not end well."""

import asyncio
import gzip
import json
import socket
import threading
import time
from decimal import Decimal
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from runguard import Budget
from runguard.gateway.serving import listen
from tests.kit.gateways import MODEL, RawUpstream, a_gateway, chat_answer, chat_events, served

CHAT = "/v1/chat/completions"


def asked(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": "hi"}], **more}


def spent(gateway: Any) -> Decimal:
    return Decimal(gateway.spend()["usd"])


def eventually(condition: Any) -> None:
    """Wait until the other side has noticed."""
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- byte for byte


def test_a_request_and_its_answer_pass_byte_for_byte(upstream: RawUpstream) -> None:
    body = (
        b'{"model": "a-model",\n "max_tokens":300, "x": {"b":1,"a":1.0},'
        b'"messages":[{"role":"user","content":"\\u00e9"}] }'
    )
    given = b'{"usage":{"prompt_tokens":1000,"completion_tokens":250,"total_tokens":1250},  "choices":[], "x":1.50}'
    upstream.answer = lambda request: Response(given, headers={"x-ratelimit-remaining": "7", "request-id": "r-1"})
    with served(a_gateway(upstream.url)) as url:
        headers = {"authorization": "Bearer k", "openai-beta": "assistants=v2", "content-type": "application/json"}
        answer = httpx.post(f"{url}{CHAT}?api-version=1", content=body, headers=headers)
    seen = upstream.arrived[0]
    assert (seen.path, seen.query, seen.body) == (CHAT, "api-version=1", body)
    assert {name: seen.headers[name] for name in headers} == headers
    assert seen.headers["host"] == upstream.url.removeprefix("http://")
    assert answer.content == given
    assert (answer.headers["x-ratelimit-remaining"], answer.headers["request-id"]) == ("7", "r-1")
    assert "server" not in answer.headers or answer.headers["server"] == ""


def test_a_stream_passes_byte_for_byte_and_is_billed_by_its_report(upstream: RawUpstream) -> None:
    events = chat_events("one two three")
    upstream.answer = lambda request: StreamingResponse(iter([b"".join(events)]), media_type="text/event-stream")
    gateway = a_gateway(upstream.url)
    with served(gateway) as url:
        answer = httpx.post(f"{url}{CHAT}", json=asked(stream=True))
        assert answer.content == b"".join(events)
        assert spent(gateway) == Decimal("0.0035")


def test_a_packed_answer_passes_packed_and_is_read(upstream: RawUpstream) -> None:
    packed = gzip.compress(json.dumps(chat_answer()).encode())
    upstream.answer = lambda request: Response(packed, headers={"content-encoding": "gzip"})
    gateway = a_gateway(upstream.url)
    with served(gateway) as url:
        headers = {"accept-encoding": "gzip, deflate, br, zstd"}
        with httpx.stream("POST", f"{url}{CHAT}", json=asked(), headers=headers) as answer:
            assert b"".join(answer.iter_raw()) == packed
        assert upstream.arrived[0].headers["accept-encoding"] == "gzip"
        assert spent(gateway) == Decimal("0.0035")


def test_a_packed_request_is_read(upstream: RawUpstream) -> None:
    upstream.answer = lambda request: JSONResponse(chat_answer())
    gateway = a_gateway(upstream.url, max_usd=1)
    with served(gateway) as url:
        packed = gzip.compress(json.dumps(asked()).encode())
        answer = httpx.post(f"{url}{CHAT}", content=packed, headers={"content-encoding": "gzip"})
        assert answer.status_code == 200
        assert upstream.arrived[0].body == packed


def test_other_requests_pass_unread_and_cost_nothing(upstream: RawUpstream) -> None:
    upstream.answer = lambda request: JSONResponse({"seen": request.path})
    gateway = a_gateway(upstream.url, max_usd=0.000001)
    with served(gateway) as url:
        assert httpx.get(f"{url}/v1/models").json() == {"seen": "/v1/models"}
        assert httpx.head(f"{url}/anthropic/").status_code == 200
        counted = httpx.post(f"{url}/v1/messages/count_tokens", json={"model": MODEL, "messages": []})
        assert counted.json() == {"seen": "/v1/messages/count_tokens"}
        upload = httpx.post(f"{url}/v1/files", content=b"x" * 100_000)
        assert upload.status_code == 200
        assert len(upstream.arrived[-1].body) == 100_000
        assert gateway.tally.calls == 0
        assert gateway.spend()["usd"] in ("0", 0, Decimal(0))


def test_a_message_in_a_thread_of_openai_asks_no_model(upstream: RawUpstream) -> None:
    upstream.answer = lambda request: JSONResponse({"object": "thread.message"})
    gateway = a_gateway(upstream.url, max_usd=1)
    with served(gateway) as url:
        said = httpx.post(f"{url}/openai/v1/threads/t-1/messages", json={"role": "user", "content": "hi"}).json()
        assert said == {"object": "thread.message"}
        assert gateway.tally.calls == gateway.tally.refused == 0


def test_embeddings_are_reserved_and_billed(upstream: RawUpstream) -> None:
    usage = {"prompt_tokens": 1_000, "total_tokens": 1_000}
    upstream.answer = lambda request: JSONResponse({"object": "list", "data": [], "model": MODEL, "usage": usage})
    gateway = a_gateway(upstream.url, budgets=[Budget(usd="0.0015", per="app")])
    with served(gateway) as url:
        texts = {"model": MODEL, "input": ["x" * 2_000]}
        assert httpx.post(f"{url}/v1/embeddings", json=texts).status_code == 200
        assert spent(gateway) == Decimal("0.001")
        refused = httpx.post(f"{url}/v1/embeddings", json=texts)
        assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
        assert len(upstream.arrived) == 1


def test_a_history_that_codex_lets_shorten_is_reserved_and_billed(upstream: RawUpstream) -> None:
    usage = {"input_tokens": 1_000, "output_tokens": 250, "total_tokens": 1_250}
    upstream.answer = lambda request: JSONResponse({"object": "response.compaction", "output": [], "usage": usage})
    budgets, models = [Budget(usd="0.0045", per="app")], {MODEL: {"max_output_tokens": 300}}
    gateway = a_gateway(upstream.url, budgets=budgets, models=models, min_output_tokens=1)
    body = {"model": MODEL, "input": "x" * 2_000}
    with served(gateway) as url:
        assert httpx.post(f"{url}/v1/responses/compact", json=body).status_code == 200
        assert upstream.arrived[0].json == body
        assert spent(gateway) == Decimal("0.0035")
        assert httpx.post(f"{url}/v1/responses/compact", json=body).status_code == 429
        assert len(upstream.arrived) == 1


@pytest.mark.parametrize("path", ["/v1beta/models/m:predictLongRunning", "/v1/models/m:rawPredict", "/v1/interactions"])
def test_what_is_paid_and_not_understood_is_counted(upstream: RawUpstream, path: str) -> None:
    gateway = a_gateway(upstream.url, max_usd=1)
    with served(gateway) as url:
        assert httpx.post(f"{url}{path}", json=asked()).status_code == 200
        assert httpx.post(f"{url}/v1beta/models/m:countTokens", json=asked()).status_code == 200
    assert gateway.tally.unguarded == 1


def test_a_batch_is_refused_under_a_budget_only(upstream: RawUpstream) -> None:
    policies: list[tuple[dict[str, Any], int]] = [({}, 200), ({"max_usd": 1}, 403)]
    for policy, status in policies:
        with served(a_gateway(upstream.url, **policy)) as url:
            assert httpx.post(f"{url}/v1/messages/batches", json={"requests": []}).status_code == status
            assert httpx.get(f"{url}/v1/messages/batches").status_code == 200


def test_small_pieces_leave_at_once() -> None:
    """asyncio switches Nagle's algorithm off only where a socket names its protocol."""
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()) as client:
        assert client.getpeername() == listening.getsockname()
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP


def test_a_stream_of_gemini_without_events_comes_in_pieces(upstream: RawUpstream) -> None:
    usage = {"promptTokenCount": 1_000, "candidatesTokenCount": 250, "totalTokenCount": 1_250}
    candidate = {"content": {"role": "model", "parts": [{"text": "fine"}]}}
    end = {"candidates": [{**candidate, "finishReason": "STOP"}], "usageMetadata": usage, "modelVersion": MODEL}
    first_came = threading.Event()
    said = [b"[" + json.dumps({"candidates": [candidate]}).encode(), b",\n", json.dumps(end).encode() + b"]"]

    def answer(_: Any) -> StreamingResponse:
        async def pieces() -> Any:
            yield said[0]
            yield said[1]
            assert await asyncio.to_thread(first_came.wait, 10)
            yield said[2]

        return StreamingResponse(pieces(), media_type="application/json")

    upstream.answer = answer
    gateway = a_gateway(upstream.url, max_usd=1)
    path = f"/v1beta/models/{MODEL}:streamGenerateContent"
    with served(gateway) as url, httpx.stream("POST", f"{url}{path}", json={"contents": []}) as streamed:
        pieces = streamed.iter_raw()
        got = [next(pieces)]
        first_came.set()
        got += pieces
        assert b"".join(got) == b"".join(said)
        assert spent(gateway) == Decimal("0.0035")


# ---- errors


def test_an_error_of_the_provider_passes_with_its_headers_and_costs_nothing(upstream: RawUpstream) -> None:
    said = {"error": {"message": "slow down", "type": "rate_limit"}}
    upstream.answer = lambda request: JSONResponse(said, 429, {"retry-after": "7"})
    gateway = a_gateway(upstream.url, max_usd=1)
    with served(gateway) as url:
        headers = {"x-stainless-retry-count": "2"}  # the gateway has seen the attempts before
        answer = httpx.post(f"{url}{CHAT}", json=asked(), headers=headers)
        assert (answer.status_code, answer.headers["retry-after"], answer.json()) == (429, "7", said)
        assert gateway.spend()["usd"] in (0, Decimal(0))
        assert all(not run["reserved_usd"] for run in gateway.snapshot()["runs"])


def test_a_provider_that_cannot_be_reached_costs_nothing(upstream: RawUpstream) -> None:
    free = socket.socket()
    free.bind(("127.0.0.1", 0))
    gateway = a_gateway(f"http://127.0.0.1:{free.getsockname()[1]}", max_usd=1)
    with served(gateway) as url, free:
        answer = httpx.post(f"{url}{CHAT}", json=asked())
        assert answer.status_code == 502
        assert "cannot be reached" in answer.json()["error"]["message"]
        assert gateway.spend()["usd"] in (0, Decimal(0))
        assert httpx.get(f"{url}/v1/models").status_code == 502


def test_a_stream_that_breaks_is_billed_by_what_came(upstream: RawUpstream) -> None:
    def broken(_: Any) -> StreamingResponse:
        async def pieces() -> Any:
            yield chat_events("word " * 100)[0]
            raise ConnectionResetError

        return StreamingResponse(pieces(), media_type="text/event-stream")

    upstream.answer = broken
    gateway = a_gateway(upstream.url, max_usd=1)
    with served(gateway) as url:
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(f"{url}{CHAT}", json=asked(stream=True))
        assert Decimal("0.001") < spent(gateway) < Decimal("0.0035")
        assert all(not run["reserved_usd"] for run in gateway.snapshot()["runs"])


def test_a_whole_answer_that_breaks_is_billed_as_if_it_had_come(upstream: RawUpstream) -> None:
    """Its first bytes come when the model has said everything; some providers send blanks until then."""

    def broken(_: Any) -> StreamingResponse:
        async def pieces() -> Any:
            yield b"\n" * 20
            raise ConnectionResetError

        return StreamingResponse(pieces(), media_type="application/json")

    upstream.answer = broken
    gateway = a_gateway(upstream.url, max_usd=1)
    with served(gateway) as url:
        assert httpx.post(f"{url}{CHAT}", json=asked()).status_code == 502
        assert gateway.spend()["output_tokens"] == 300
        assert not gateway.guard.guard_errors


def test_a_client_that_leaves_ends_the_call_and_pays_for_what_came(upstream: RawUpstream) -> None:
    upstream.answer = lambda request: upstream.never_ending(chat_events("word " * 100)[:1])
    gateway = a_gateway(upstream.url, max_usd=1)
    with served(gateway) as url:
        with httpx.stream("POST", f"{url}{CHAT}", json=asked(stream=True)) as answer:
            next(answer.iter_raw())
        assert upstream.left.wait(10)
        eventually(lambda: gateway.spend()["usd"])
        assert Decimal("0.001") < spent(gateway) < Decimal("0.0035")
        eventually(lambda: all(not run["reserved_usd"] for run in gateway.snapshot()["runs"]))


def anthropic_events(**usage: int) -> list[bytes]:
    """The beginning of an answer: what was reported with its first event, and 2,000 bytes of text."""
    message = {"type": "message", "model": MODEL, "content": [], "usage": {"output_tokens": 1, **usage}}
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "word " * 400}},
    ]
    return [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in events]


@pytest.mark.parametrize("last", [b"", b'event: error\ndata: {"type": "error", "error": {}}\n\n'])
def test_a_stream_without_its_last_report_is_billed_by_what_was_said(upstream: RawUpstream, last: bytes) -> None:
    """Anthropic reports one token of output at the beginning."""
    said = [*anthropic_events(input_tokens=1_000), last]
    upstream.answer = lambda request: StreamingResponse(iter(said), media_type="text/event-stream")
    gateway = a_gateway(upstream.url, max_usd=1)
    with served(gateway) as url:
        httpx.post(f"{url}/v1/messages", json=asked(stream=True))
        found = gateway.spend()
    assert (found["input_tokens"], found["output_tokens"], found["estimated_calls"]) == (1_000, 500, 1)


def test_a_client_that_leaves_pays_for_the_prompt_that_was_reported(upstream: RawUpstream) -> None:
    said = anthropic_events(input_tokens=10, cache_read_input_tokens=100_000)
    upstream.answer = lambda request: upstream.never_ending(said)
    gateway = a_gateway(upstream.url, max_usd=1)
    with served(gateway) as url:
        with httpx.stream("POST", f"{url}/v1/messages", json=asked(stream=True)) as answer:
            pieces, got = answer.iter_raw(), b""
            while b"word" not in got:
                got += next(pieces)
        eventually(lambda: gateway.spend()["calls"])
        found = gateway.spend()
    assert (found["input_tokens"], found["cached_tokens"], found["output_tokens"]) == (100_010, 100_000, 500)


def test_a_client_that_leaves_before_the_answer_begins_ends_the_call(upstream: RawUpstream) -> None:
    upstream.answer = lambda request: upstream.never_ending([])
    gateway = a_gateway(upstream.url, max_usd=1)
    with served(gateway) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}{CHAT}", json=asked(), timeout=0.3)
        assert upstream.left.wait(10)
        eventually(lambda: gateway.spend()["usd"])


@pytest.mark.parametrize("body", [b"not json", b"[1, 2]", b""])
def test_a_request_that_cannot_be_read_is_not_sent_under_a_budget(upstream: RawUpstream, body: bytes) -> None:
    with served(a_gateway(upstream.url, max_usd=1)) as url:
        assert httpx.post(f"{url}{CHAT}", content=body).status_code == 400
    assert not upstream.arrived
    gateway = a_gateway(upstream.url)
    with served(gateway) as url:
        assert httpx.post(f"{url}{CHAT}", content=body).status_code == 200
        assert gateway.tally.unguarded == 1
        assert not gateway.guard.guard_errors
    assert upstream.arrived[0].body == body


def test_an_unknown_encoding_of_a_request_is_named(upstream: RawUpstream) -> None:
    with served(a_gateway(upstream.url, max_usd=1)) as url:
        answer = httpx.post(f"{url}{CHAT}", content=b"(\xb5/\xfd", headers={"content-encoding": "zstd"})
    assert answer.status_code == 415
    assert "its encoding zstd is unknown" in answer.json()["error"]["message"]
    assert not upstream.arrived


def test_hostile_bodies_end_in_an_answer(upstream: RawUpstream) -> None:
    bodies: list[Any] = [
        {"model": 7, "messages": "x"},
        {"model": MODEL, "messages": [None, 3, {"role": "tool"}, {"role": "user", "content": [[]]}]},
        {"model": MODEL, "messages": [{"role": "assistant", "tool_calls": [3]}, {"role": "tool", "content": []}]},
        {"model": MODEL, "input": {"a": 1}, "text": 3, "conversation": []},
        {"model": MODEL, "messages": [], "max_tokens": -1, "n": 10**9, "stream_options": 4, "stream": True},
        {"contents": {"parts": 3}, "generationConfig": [], "toolConfig": 3},
    ]
    upstream.answer = lambda request: JSONResponse(chat_answer())
    gateway = a_gateway(upstream.url, max_usd=1)
    with served(gateway) as url:
        for path in (CHAT, "/v1/responses", "/v1/messages", "/v1beta/models/m:generateContent", "/v1/embeddings"):
            for body in bodies:
                assert httpx.post(f"{url}{path}", json=body).status_code in (200, 429)


# ---- what the gateway adds


def test_a_lowered_limit_is_in_the_request_and_the_rest_is_as_it_came(upstream: RawUpstream) -> None:
    upstream.answer = lambda request: JSONResponse(chat_answer())
    gateway = a_gateway(upstream.url, max_usd="0.05", min_output_tokens=100)
    with served(gateway) as url:
        httpx.post(f"{url}{CHAT}", json=asked(max_tokens=50_000, seed=7))
        sent = upstream.arrived[0].json
        assert 4_000 < sent.pop("max_tokens") < 5_000
        assert sent == {key: value for key, value in asked(seed=7).items() if key != "max_tokens"}
        assert len(upstream.arrived[0].body) == int(upstream.arrived[0].headers["content-length"])


def test_a_request_without_a_limit_gets_one_that_its_model_understands(upstream: RawUpstream) -> None:
    upstream.answer = lambda request: JSONResponse(chat_answer())
    models = {MODEL: {"max_output_tokens": 60_000}, "gpt-x": {"max_output_tokens": 60_000}}
    prices = {name: {"input": 1, "output": 10} for name in models}
    gateway = a_gateway(upstream.url, max_usd="0.05", min_output_tokens=100, models=models, prices=prices)
    with served(gateway) as url:
        for model, name in ((MODEL, "max_tokens"), ("gpt-x", "max_completion_tokens")):
            httpx.post(f"{url}{CHAT}", json={"model": model, "messages": [{"role": "user", "content": model}]})
            assert upstream.arrived[-1].json[name] < 5_000


def test_several_answers_are_reserved_together(upstream: RawUpstream) -> None:
    upstream.answer = lambda request: JSONResponse(chat_answer())
    gateway = a_gateway(upstream.url, max_usd="0.010", min_output_tokens=1)
    with served(gateway) as url:
        httpx.post(f"{url}{CHAT}", json=asked(n=4))
        assert upstream.arrived[0].json["max_tokens"] < 300


def test_a_notice_stands_behind_the_last_cached_block(upstream: RawUpstream) -> None:
    failed = json.dumps({"status": "partial_parse_error"})
    messages: list[Any] = [{"role": "user", "content": "go"}]

    def answer(request: Any) -> JSONResponse:
        use = {"type": "tool_use", "id": f"t-{len(upstream.arrived)}", "name": "parse", "input": {"n": len(messages)}}
        usage = {"input_tokens": 1_000, "output_tokens": 250}
        return JSONResponse({"type": "message", "role": "assistant", "model": MODEL, "content": [use], "usage": usage})

    upstream.answer = answer
    with served(a_gateway(upstream.url)) as url:
        for _ in range(4):
            said = httpx.post(f"{url}/v1/messages", json={"model": MODEL, "max_tokens": 9, "messages": messages}).json()
            use = said["content"][0]
            marked = {"cache_control": {"type": "ephemeral"}}
            result = {"type": "tool_result", "tool_use_id": use["id"], "content": failed, **marked}
            messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": [result]}]
    sent, whole = upstream.arrived[3].json["messages"], messages[:7]
    assert sent[:-1] == whole[:-1]
    *before, notice = sent[-1]["content"]
    assert before == whole[-1]["content"]
    assert notice["type"] == "text"
    assert "failed in the same way" in notice["text"]


def test_a_last_answer_is_given_without_tools(upstream: RawUpstream) -> None:
    failed = json.dumps({"status": "partial_parse_error"})

    def answer(request: Any) -> JSONResponse:
        if request.json.get("tool_choice") == "none":
            return JSONResponse(chat_answer("the best I have"))
        call = {
            "id": f"c-{len(upstream.arrived)}",
            "type": "function",
            "function": {"name": "parse", "arguments": "{}"},
        }
        return JSONResponse(chat_answer("", tool_calls=[call]))

    upstream.answer = answer
    tools = [{"type": "function", "function": {"name": "parse"}}]
    messages: list[Any] = [{"role": "user", "content": "go"}]
    with served(a_gateway(upstream.url, final_answer="Say what you know.", max_usd=1)) as url:
        for _ in range(10):
            said = httpx.post(f"{url}{CHAT}", json=asked(messages=messages, tools=tools)).json()["choices"][0][
                "message"
            ]
            messages.append(said)
            if not said.get("tool_calls"):
                break
            messages.append({"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": failed})
    assert said["content"] == "the best I have"
    assert upstream.arrived[-1].json["tools"] == tools
    assert upstream.arrived[-1].json["messages"][-1] == {"role": "user", "content": "Say what you know."}


# ---- stops


def test_a_stop_as_an_error_asks_for_no_other_try(upstream: RawUpstream) -> None:
    with served(a_gateway(upstream.url, max_usd="0.0001", on_stop="raise")) as url:
        for path in (CHAT, "/v1/responses", "/v1/messages"):
            answer = httpx.post(f"{url}{path}", json=asked(input="hi"))
            assert (answer.status_code, answer.headers["x-should-retry"]) == (429, "false")
            assert answer.json()["error"]["message"] == "I stopped because this request reached a safety limit."
        answer = httpx.post(f"{url}/v1beta/models/{MODEL}:generateContent", json={"contents": []})
        assert answer.json()["error"]["status"] == "RESOURCE_EXHAUSTED"
    assert not upstream.arrived


def test_a_program_that_expects_data_gets_an_error(upstream: RawUpstream) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    with served(a_gateway(upstream.url, max_usd="0.0001")) as url:
        answers = [
            httpx.post(f"{url}{CHAT}", json=asked(response_format=schema)),
            httpx.post(f"{url}/v1/responses", json=asked(input="x", text={"format": schema})),
            httpx.post(f"{url}/v1/messages", json=asked(tool_choice={"type": "any"})),
            httpx.post(
                f"{url}/v1beta/models/{MODEL}:generateContent",
                json={"contents": [], "generationConfig": {"responseMimeType": "application/json"}},
            ),
        ]
    assert [answer.status_code for answer in answers] == [429] * 4


def test_the_kill_switch_ends_a_stream_with_an_event(upstream: RawUpstream) -> None:
    upstream.answer = lambda request: upstream.never_ending(chat_events("begun")[:1])
    gateway = a_gateway(upstream.url)
    with served(gateway) as url, httpx.stream("POST", f"{url}{CHAT}", json=asked(stream=True)) as answer:
        pieces = answer.iter_raw()
        assert b"begun" in next(pieces)
        gateway.stop("all", actor="ops", reason="enough")
        last = b"".join(pieces)
        assert json.loads(last.removeprefix(b"data: "))["error"]["type"] == "runguard_stop"
        assert upstream.left.wait(10)


def test_shadow_mode_stops_nothing_and_off_reads_nothing(upstream: RawUpstream) -> None:
    upstream.answer = lambda request: JSONResponse(chat_answer())
    for mode, trips in (("shadow", 1), ("off", 0)):
        gateway = a_gateway(upstream.url, max_usd="0.0001", mode=mode)
        with served(gateway) as url:
            assert httpx.post(f"{url}{CHAT}", json=asked()).json() == chat_answer()
            assert len(gateway.trips) == trips


def test_a_tool_that_keeps_failing_is_left_out_of_the_next_request(upstream: RawUpstream) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("parse", "look")]
    messages: list[Any] = [{"role": "user", "content": "go"}]

    def answer(request: Any) -> JSONResponse:
        function = {"name": "parse", "arguments": json.dumps({"n": len(messages)})}
        call = {"id": f"c-{len(upstream.arrived)}", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
        return JSONResponse({"model": MODEL, "choices": [choice], "usage": usage})

    upstream.answer = answer
    with served(a_gateway(upstream.url, rules={"stall": {"withhold": 4}})) as url:
        for _ in range(5):
            body = {"model": MODEL, "messages": messages, "tools": tools}
            message = httpx.post(f"{url}{CHAT}", json=body).json()["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Error: no grammar"}
            messages += [message, result]
    sent = [[tool["function"]["name"] for tool in request.json["tools"]] for request in upstream.arrived]
    assert sent == [["parse", "look"]] * 4 + [["look"]]
    assert "Use 'look'" in upstream.arrived[3].json["messages"][-1]["content"]
