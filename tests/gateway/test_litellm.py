"""The callback for the LiteLLM proxy: its hooks with the library's own classes, and behind the real proxy."""

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, StreamingResponse

import runguard as package
from tests.kit.gateways import FAILED, MODEL, PRICES, TOOL, Arrived, RawUpstream, chat_answer, chat_loop

pytestmark = [
    pytest.mark.skipif(find_spec("litellm") is None, reason="LiteLLM is not installed"),
    pytest.mark.usefixtures("library"),
]

# litellm brings the proxy's own packages only with its extra
PROXY = os.environ.get("RUNGUARD_LITELLM_PYTHON", sys.executable)


@pytest.fixture(scope="module")
def library() -> None:
    """LiteLLM takes two seconds to import: the processes of other tests need not."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network when it is imported
    globals().update(
        litellm=import_module("litellm"),
        ModifyResponseException=import_module("litellm.exceptions").ModifyResponseException,
        ProxyException=import_module("litellm.proxy._types").ProxyException,
        RunGuardGateway=import_module("runguard.litellm").RunGuardGateway,
    )


litellm: Any = None
ModifyResponseException: Any = None
ProxyException: Any = None
RunGuardGateway: Any = None


class Key:
    """What the proxy knows of a virtual key."""

    def __init__(self, user: str = "ann", team: str = "shop") -> None:
        self.user_id, self.team_id, self.key_alias, self.token, self.api_key = user, team, "", "hash", None


def data(messages: list[Any], number: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": messages, "max_tokens": 300, "litellm_call_id": f"id-{number}", **more}


def answer(number: int) -> Any:
    function = {"name": TOOL, "arguments": json.dumps({"n": number})}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"c-{number}", "type": "function", "function": function}],
    }
    usage = {"prompt_tokens": 1_000, "completion_tokens": 250, "total_tokens": 1_250}
    choices = [{"index": 0, "message": message, "finish_reason": "tool_calls"}]
    return litellm.ModelResponse(model=MODEL, choices=choices, usage=usage)


async def play(guard: Any, most: int = 20, **more: Any) -> tuple[int, str]:
    """An agent that calls a failing tool, with the hooks in the order of the proxy."""
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for number in range(1, most + 1):
        asked = data(messages, number, **more)
        try:
            await guard.async_pre_call_hook(Key(), None, asked, "acompletion")
        except ModifyResponseException as stop:
            return number - 1, stop.message
        given = answer(number)
        await guard.async_post_call_success_hook(asked, Key(), given)
        await guard.async_log_success_event(asked, given, 0.0, 0.0)
        call = given.choices[0].message
        messages = [*messages, call.model_dump(), {"role": "tool", "tool_call_id": f"c-{number}", "content": FAILED}]
    return most, ""


async def test_a_loop_behind_the_proxy_ends_with_an_answer() -> None:
    guard = RunGuardGateway(prices=PRICES)
    calls, said = await play(guard)
    assert (calls, said) == (6, "I stopped because a step kept failing in the same way.")
    (trip,) = guard.trips
    assert (trip.app, trip.user_id) == ("shop", "ann")
    assert str(guard.spend()["usd"]) == "0.021"


async def test_the_notice_and_the_lower_limit_reach_the_request() -> None:
    guard = RunGuardGateway(prices=PRICES, max_usd="0.05", min_output_tokens=10)
    asked = data([{"role": "user", "content": "go"}], 1, max_tokens=90_000, user="somebody else")
    await guard.async_pre_call_hook(Key(), None, asked, "acompletion")
    assert asked["max_tokens"] < 5_000
    assert asked["litellm_call_id"] == "id-1"
    await guard.async_post_call_failure_hook(asked, ConnectionRefusedError(), Key())
    assert all(not run["reserved_usd"] for run in guard.snapshot()["runs"])


async def test_a_tool_that_keeps_failing_is_left_out_of_the_next_request() -> None:
    guard = RunGuardGateway(prices=PRICES, rules={"stall": {"withhold": 4}})
    tools = [{"type": "function", "function": {"name": name}} for name in (TOOL, "look")]
    offered: list[list[str]] = []
    messages: list[Any] = [{"role": "user", "content": "go"}]
    for number in range(1, 6):
        asked = data(messages, number, tools=tools)
        await guard.async_pre_call_hook(Key(), None, asked, "acompletion")
        offered.append([tool["function"]["name"] for tool in asked["tools"]])
        given = answer(number)
        await guard.async_post_call_success_hook(asked, Key(), given)
        call = given.choices[0].message.model_dump()
        messages = [*messages, call, {"role": "tool", "tool_call_id": f"c-{number}", "content": FAILED}]
    assert offered == [[TOOL, "look"]] * 4 + [["look"]]


async def test_an_attempt_that_the_proxy_repeats_does_not_end_the_call() -> None:
    guard = RunGuardGateway(prices=PRICES, max_usd=1)
    asked = data([{"role": "user", "content": "go"}], 1)
    await guard.async_pre_call_hook(Key(), None, asked, "acompletion")
    await guard.async_log_failure_event({**asked, "exception": ConnectionRefusedError()}, None, 0.0, 0.0)
    await guard.async_post_call_success_hook(asked, Key(), answer(1))
    assert str(guard.spend()["usd"]) == "0.0035"


async def test_calls_with_the_same_id_are_billed_one_by_one() -> None:
    guard = RunGuardGateway(prices=PRICES, max_usd=1)
    for content in ("one", "two"):  # both at once
        asked = data([{"role": "user", "content": content}], 1)
        await guard.async_pre_call_hook(Key(), None, asked, "acompletion")
    await guard.async_post_call_success_hook(asked, Key(), answer(1))
    assert guard.spend()["calls"] == 2
    assert all(not run["reserved_usd"] for run in guard.snapshot()["runs"])


async def test_a_call_of_which_the_proxy_tells_nothing_is_booked_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = RunGuardGateway(prices=PRICES, max_usd=1, idle_seconds=60)
    await guard.async_pre_call_hook(Key(), None, data([{"role": "user", "content": "one"}], 1), "acompletion")
    assert guard.spend()["calls"] == 0
    later = time.monotonic() + 100
    monkeypatch.setattr("runguard.litellm.time.monotonic", lambda: later)
    await guard.async_pre_call_hook(Key(), None, data([{"role": "user", "content": "two"}], 2), "acompletion")
    assert guard.spend()["calls"] == 1


async def test_what_is_not_understood_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    guard = RunGuardGateway(prices=PRICES, max_usd=1)
    for number in range(2):
        asked = {"model": MODEL, "prompt": "a picture", "litellm_call_id": f"id-{number}"}
        assert await guard.async_pre_call_hook(Key(), None, asked, "image_generation") is asked
    assert caplog.text.count("runguard.unguarded: requests to image_generation pass through") == 1


async def test_a_stream_is_settled_before_its_last_piece_leaves() -> None:
    guard = RunGuardGateway(prices=PRICES)
    asked = data([{"role": "user", "content": "go"}], 1)
    await guard.async_pre_call_hook(Key(), None, asked, "acompletion")

    async def pieces() -> AsyncIterator[Any]:
        for text, finish in (("hello", None), ("", "stop")):
            delta = {"role": "assistant", "content": text}
            yield litellm.ModelResponseStream(
                choices=[{"index": 0, "delta": delta, "finish_reason": finish}], model=MODEL
            )

    seen = [chunk async for chunk in guard.async_post_call_streaming_iterator_hook(Key(), pieces(), asked)]
    assert len(seen) == 2
    estimated = guard.spend()["usd"]
    assert estimated
    await guard.async_log_success_event(asked, answer(1), 0.0, 0.0)  # the proxy's own account
    assert str(guard.spend()["usd"]) == "0.0035"


@pytest.mark.parametrize(
    ("policy", "more"), [({}, {"response_format": {"type": "json_object"}}), ({"on_stop": "raise"}, {})]
)
async def test_a_stop_that_no_text_can_say_is_an_error_that_nobody_tries_again(
    policy: dict[str, Any], more: dict[str, Any]
) -> None:
    guard = RunGuardGateway(prices=PRICES, max_usd="0.0001", **policy)
    asked = data([{"role": "user", "content": "go"}], 1, **more)
    with pytest.raises(ProxyException) as raised:
        await guard.async_pre_call_hook(Key(), None, asked, "acompletion")
    assert (raised.value.code, raised.value.headers) == ("429", {"x-should-retry": "false"})
    assert raised.value.message == "I stopped because this request reached a safety limit."
    assert isinstance(raised.value.__cause__, package.RunStoppedError)


async def test_a_stop_in_a_stream_of_messages_is_a_series_of_events() -> None:
    """The proxy gives it as one whole message, which Anthropic's clients do not read in a stream."""
    guard = RunGuardGateway(prices=PRICES)

    async def pieces() -> AsyncIterator[Any]:
        yield {"type": "message", "role": "assistant", "model": MODEL, "content": [{"type": "text", "text": "over"}]}

    asked = data([], 1)
    (said,) = [chunk async for chunk in guard.async_post_call_streaming_iterator_hook(Key(), pieces(), asked)]
    assert [line for line in said.splitlines() if line.startswith("event:")][:2] == [
        "event: message_start",
        "event: content_block_start",
    ]
    assert '"text": "over"' in said
    assert said.endswith('data: {"type": "message_stop"}\n\n')


# ---- the real proxy

CONFIG = """
model_list:
  - model_name: {model}
    litellm_params: {{model: hosted_vllm/{model}, api_base: {url}/v1, api_key: none}}
litellm_settings:
  callbacks: [callback.guard]
  telemetry: false
  num_retries: 1
"""
CALLBACK = """
from runguard.litellm import RunGuardGateway
guard = RunGuardGateway(prices={{"*{model}": {{"input": 1, "output": 10}}}}, {policy})
"""


@pytest.fixture(scope="module")
def is_installed() -> bool:
    """Whether the proxy's own packages are there, too."""
    if sys.executable == PROXY and find_spec("backoff") is None:
        return False
    command = [PROXY, "-c", "import litellm.proxy.proxy_server"]
    return subprocess.run(command, capture_output=True, check=False, timeout=120).returncode == 0


@pytest.fixture
def proxy(is_installed: bool, upstream: RawUpstream, tmp_path: Path) -> Iterator[Any]:
    if not is_installed:
        pytest.skip("litellm[proxy] is not installed; RUNGUARD_LITELLM_PYTHON may name a Python that has it")
    started: list[subprocess.Popen[bytes]] = []

    def start(policy: str = "") -> str:
        import socket

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        (tmp_path / "config.yaml").write_text(CONFIG.format(model=MODEL, url=upstream.url))
        (tmp_path / "callback.py").write_text(CALLBACK.format(model=MODEL, policy=policy))
        env = {
            **os.environ,
            "PYTHONPATH": str(Path(package.__file__).parents[1]),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # it answers on loopback, to this test
        }
        run = "from litellm import run_server; run_server()"
        command = [PROXY, "-c", run, "--config", "config.yaml", "--port", str(port), "--host", "127.0.0.1"]
        with (tmp_path / "log").open("wb") as log:
            started.append(subprocess.Popen(command, cwd=tmp_path, env=env, stdout=log, stderr=log))
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 50
        while time.monotonic() < end:
            try:
                httpx.get(f"{url}/health/liveliness", timeout=2)
                return url
            except httpx.HTTPError:
                assert started[-1].poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.2)
        raise AssertionError((tmp_path / "log").read_text())

    yield start
    for one in started:
        one.terminate()
        one.wait(20)


def by_script(request: Arrived) -> Any:
    number = sum(message["role"] == "assistant" for message in request.json["messages"]) + 1
    function = {"name": TOOL, "arguments": json.dumps({"page": number})}
    calls = [{"index": 0, "id": f"c-{number}", "type": "function", "function": function}]
    if not request.json.get("stream"):
        return JSONResponse(chat_answer("", tool_calls=calls))
    head = {"id": "c", "object": "chat.completion.chunk", "model": MODEL, "created": 1}
    usage = {"prompt_tokens": 1_000, "completion_tokens": 250, "total_tokens": 1_250}
    chunks: list[Any] = [
        {**head, "choices": [{"index": 0, "delta": {"role": "assistant", "tool_calls": calls}, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {**head, "choices": [], "usage": usage},
    ]
    lines = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks]
    return StreamingResponse(iter([*lines, b"data: [DONE]\n\n"]), media_type="text/event-stream")


@pytest.mark.timeout(240)
def test_the_real_proxy_stops_a_loop_streamed_and_not(proxy: Any, upstream: RawUpstream) -> None:
    upstream.answer = by_script
    url = proxy()
    for stream in (False, True):
        upstream.arrived.clear()
        turns, said = chat_loop(url, stream=stream, prompt=f"go {stream}", timeout=30)
        assert (turns, said) == (7, "I stopped because a step kept failing in the same way.")
        assert len(upstream.arrived) == 6


@pytest.mark.timeout(240)
def test_the_real_proxy_holds_a_budget_with_many_calls_at_once(proxy: Any, upstream: RawUpstream) -> None:
    from concurrent.futures import ThreadPoolExecutor

    upstream.answer = lambda request: JSONResponse(chat_answer())
    url = proxy("budgets=[{'calls': 10, 'per': 'app'}], max_wait_seconds=0")
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda n: chat_loop(url, prompt=f"question {n}", timeout=60)[1], range(50)))
    sent = [request for request in upstream.arrived if request.method == "POST"]
    assert len(sent) == answers.count("fine") == 10
    assert answers.count("I stopped because this request reached a safety limit.") == 40
