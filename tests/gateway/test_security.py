"""Who may use a gateway, and what a hostile client can do to it."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse

import runguard as package
from runguard.core.errors import PolicyError
from runguard.gateway.access import Access, Upstreams
from runguard.gateway.serving import BoundedProtocol
from tests.kit.commands import PROGRAM, runguard, told
from tests.kit.examples import each_row
from tests.kit.gateways import MODEL, RawUpstream, a_gateway, chat_answer, chat_events, served

CHAT = "/v1/chat/completions"
ASKED = {"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": "hi"}]}
TOKEN = "a-token-of-the-tests"


@pytest.fixture
def fine(upstream: RawUpstream) -> RawUpstream:
    upstream.answer = lambda request: JSONResponse(chat_answer())
    return upstream


# ---- the token


def test_without_its_token_nothing_passes(fine: RawUpstream) -> None:
    with served(a_gateway(fine.url, access=Access(token=TOKEN))) as url:
        for headers in ({}, {"x-runguard-token": "wrong"}, {"authorization": f"Bearer {TOKEN}"}):
            assert httpx.post(f"{url}{CHAT}", json=ASKED, headers=headers).status_code == 401
        assert httpx.post(f"{url}/token/wrong{CHAT}", json=ASKED).status_code == 401
        assert httpx.get(f"{url}/token/{TOKEN[:-1]}/v1/models").status_code == 401
    assert not fine.arrived


def test_the_token_opens_the_gateway_and_goes_no_further(fine: RawUpstream) -> None:
    with served(a_gateway(fine.url, access=Access(token=TOKEN))) as url:
        assert httpx.post(f"{url}{CHAT}", json=ASKED, headers={"x-runguard-token": TOKEN}).status_code == 200
        assert httpx.post(f"{url}/token/{TOKEN}{CHAT}", json=ASKED).status_code == 200
        assert httpx.post(f"{url}/token/{TOKEN}/openai{CHAT}", json=ASKED).status_code == 200
    for request in fine.arrived:
        assert request.path == CHAT
        assert TOKEN not in str(request.headers)


# ---- browsers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1:1"}, 421),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"upgrade": "websocket", "connection": "Upgrade"}, 426),
    ],
)
def test_a_web_page_cannot_use_it(fine: RawUpstream, headers: dict[str, str], status: int) -> None:
    gateway = a_gateway(fine.url)
    with served(gateway) as url:
        gateway.access = Access(hosts=Access.loopback(httpx.URL(url).port or 0))
        assert httpx.post(f"{url}{CHAT}", json=ASKED).status_code == 200
        assert httpx.post(f"{url}{CHAT}", json=ASKED, headers=headers).status_code == status
    assert len(fine.arrived) == 1


# ---- no open relay


def status_of(url: str, target: str, *headers: str) -> int:
    """Ask for a target exactly as it is written, and give the status of the answer."""
    lines = [f"GET {target} HTTP/1.1", "Host: evil.example", *headers, "Connection: close", "", ""]
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=10) as connection:
        connection.sendall("\r\n".join(lines).encode())
        return int(connection.makefile("rb").readline().split()[1])


@pytest.mark.parametrize("header", ["x-other: 1", "anthropic-version: 1"])  # chooses the provider, and so the address
@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://EVIL/v1/models", 400),
        ("@EVIL/v1/models", 400),
        (".example/v1/models", 400),
        ("*", 400),
        ("/v1/models#@EVIL/", 400),
        ("/v1/models?a=#@EVIL/", 400),
        ("/v1/../../@EVIL/x", 400),
        ("/anthropic/%2e%2e/..%2f..%2f@EVIL", 400),
        ("//EVIL/v1/models", 200),
        ("/anthropic@EVIL/x", 200),
        ("/anthropic/@EVIL/x", 200),
        ("/%61nthropic/v1/models", 200),  # an encoded name must not shift what is cut off
        ("/token/a%2fb/v1/models", 200),
    ],
)
def test_a_request_goes_to_the_set_addresses_only(fine: RawUpstream, header: str, target: str, status: int) -> None:
    evil = RawUpstream()
    try:
        with served(a_gateway(fine.url)) as url:
            assert status_of(url, target.replace("EVIL", evil.url.removeprefix("http://")), header) == status
    finally:
        evil.close()
    assert not evil.arrived
    assert len(fine.arrived) == (status == 200)
    for request in fine.arrived:
        assert request.headers["host"] == fine.url.removeprefix("http://")


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions/", "/v1//chat//completions", "/v1/chat%2fcompletions", "/v1/Chat/Completions"),
        *("/v1beta/tunedModels/a-model:generateContent", "/v1/projects/p/endpoints/a-model:generateContent"),
    ],
)
def test_another_spelling_of_a_path_passes_no_budget(fine: RawUpstream, path: str) -> None:
    with served(a_gateway(fine.url, max_usd="0.000001")) as url:
        answer = httpx.post(f"{url}{path}", json=ASKED)
    assert answer.headers["x-runguard-stop"] == "budget"
    assert not fine.arrived


@each_row(
    "url", ["ftp://x", "api.openai.com", "http://user:secret@x/v1", "http://x/?key=1", "http://", "file:///etc/passwd"]
)
def test_an_address_that_is_none_is_rejected(url: str) -> None:
    with pytest.raises(PolicyError):
        Upstreams({"openai": url})


def test_paths_find_their_provider() -> None:
    upstreams = Upstreams({"openai": "http://o/api/v1", "anthropic": "http://a", "gemini": "http://g/"})

    def url(path: str, **headers: str) -> str:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return str(upstreams.target(path, "", given).url)

    assert url("/v1/chat/completions") == "http://o/api/v1/chat/completions"
    assert url("/openai/v1/chat/completions") == "http://o/api/v1/chat/completions"
    assert url("/chat/completions") == "http://o/api/v1/chat/completions"
    assert url("/v1/models") == "http://o/api/v1/models"
    assert url("/v1/models", anthropic_version="1") == "http://a/v1/models"
    assert url("/v1/messages") == url("/anthropic/v1/messages") == "http://a/v1/messages"
    assert url("/v1beta/models/x:generateContent") == "http://g/v1beta/models/x:generateContent"
    assert url("/gemini/v1/x") == "http://g/v1/x"


def test_codex_with_a_login_has_an_address_of_its_own() -> None:
    account, public = {"chatgpt-account-id": "a"}, Upstreams()
    assert (
        str(public.target("/openai/v1/responses", "", account).url) == "https://chatgpt.com/backend-api/codex/responses"
    )
    assert str(public.target("/v1/responses", "", {}).url) == "https://api.openai.com/v1/responses"
    assert str(public.target("/anthropic/v1/messages", "", account).url) == "https://api.anthropic.com/v1/messages"
    given = Upstreams({"openai": "http://o/v1"})
    assert str(given.target("/v1/responses", "", account).url) == "http://o/v1/responses"


# ---- who pays


@pytest.mark.parametrize(
    "several",
    [
        [("authorization", f"{scheme} k") for scheme in ("Bearer", "bearer", "BEARER", "Bearer  ")],
        [("x-api-key", "k"), ("authorization", "Bearer k"), ("x-goog-api-key", "k"), ("api-key", "k")],
    ],
)
def test_another_spelling_of_a_key_is_no_other_user(fine: RawUpstream, several: list[tuple[str, str]]) -> None:
    with served(a_gateway(fine.url, budgets=[{"calls": 2, "per": "user"}])) as url:
        for number, header in enumerate(several):
            asked = {**ASKED, "messages": [{"role": "user", "content": f"question {number}"}]}
            httpx.post(f"{url}{CHAT}", json=asked, headers=[header])
    assert len(fine.arrived) == 2


def test_a_second_key_chooses_no_other_user(fine: RawUpstream) -> None:
    twice = [("authorization", "Bearer k"), ("authorization", "Bearer other")]
    two: list[Any] = [{"x-goog-api-key": "k", "x-api-key": "other"}, {"x-api-key": "k", "api-key": "other"}, twice]
    with served(a_gateway(fine.url)) as url:
        for headers in two:
            assert httpx.post(f"{url}{CHAT}", json=ASKED, headers=headers).status_code == 400
        assert httpx.post(f"{url}{CHAT}?key=other", json=ASKED, headers={"x-goog-api-key": "k"}).status_code == 400
        assert not fine.arrived
        same = {"authorization": "Bearer k", "x-api-key": "k"}  # what Claude Code sends with a key helper
        assert httpx.post(f"{url}{CHAT}", json=ASKED, headers=same).status_code == 200
    with served(a_gateway(fine.url, access=Access(user="ann"))) as url:  # here no key decides
        assert httpx.post(f"{url}{CHAT}", json=ASKED, headers=two[0]).status_code == 200


def test_the_names_of_this_machine() -> None:
    assert Access.loopback(8_788, "127.0.0.2") == {
        *("127.0.0.1:8788", "127.0.0.2:8788", "localhost:8788", "[::1]:8788"),
    }
    assert Access.loopback(8_788, "::1") == Access.loopback(8_788, "localhost") == Access.loopback(8_788)
    assert {"localhost", "localhost:80"} <= Access.loopback(80)


# ---- sizes and time


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(fine: RawUpstream) -> None:
    gateway = a_gateway(fine.url, access=Access(max_body=10_000))
    with served(gateway) as url:
        assert httpx.post(f"{url}{CHAT}", content=b"x" * 10_001).status_code == 413

        def chunks() -> Any:
            for _ in range(20):
                yield b"x" * 1_000

        assert httpx.post(f"{url}{CHAT}", content=chunks()).status_code == 413
        assert httpx.post(f"{url}{CHAT}", json=ASKED).status_code == 200
    assert len(fine.arrived) == 1


def test_a_packed_bomb_is_not_unpacked(fine: RawUpstream) -> None:
    import gzip

    bomb = gzip.compress(b"[" + b" " * 200_000_000)
    with served(a_gateway(fine.url, max_usd=1)) as url:
        answer = httpx.post(f"{url}{CHAT}", content=bomb, headers={"content-encoding": "gzip"}, timeout=30)
        assert answer.status_code == 400
    assert not fine.arrived


def test_large_headers_are_refused(fine: RawUpstream) -> None:
    # the connection may be closed while the client still sends
    with served(a_gateway(fine.url)) as url, suppress(httpx.HTTPError):
        assert httpx.get(f"{url}/v1/models", headers={"x-large": "x" * 200_000}).status_code in (400, 431)
    assert not fine.arrived


def test_a_slow_request_is_closed(fine: RawUpstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "request_seconds", 0.2)
    with (
        served(a_gateway(fine.url)) as url,
        socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0), timeout=10) as slow,
    ):
        slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab")
        assert slow.recv(100) == b""
    assert not fine.arrived


def test_many_streams_at_once_are_whole_and_within_their_budget(upstream: RawUpstream) -> None:
    from starlette.responses import StreamingResponse

    body = b"".join(chat_events("word " * 20))
    upstream.answer = lambda request: StreamingResponse(iter([body]), media_type="text/event-stream")
    gateway = a_gateway(upstream.url, budgets=[{"calls": 120, "per": "app"}], max_wait_seconds=0)
    answers: list[bytes] = []

    def ask(number: int) -> None:
        asked = {**ASKED, "stream": True, "messages": [{"role": "user", "content": f"question {number}"}]}
        answers.append(client.post(f"{url}{CHAT}", json=asked).content)

    with served(gateway) as url, httpx.Client(timeout=40, limits=httpx.Limits(max_connections=200)) as client:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers.count(body) == len(upstream.arrived) == 120
        assert len(answers) == 200
        assert gateway.tally.refused == 80


# ---- the command


def command(*arguments: Any, **environment: str) -> "subprocess.Popen[str]":
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(package.__file__).parents[1]), **environment}
    return subprocess.Popen(
        [*PROGRAM, "gateway", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd="/",
    )


@each_row(
    ("arguments", "token", "said"),
    [
        (("--host", "0.0.0.0"), "", "set RUNGUARD_GATEWAY_TOKEN to a secret of 16 characters or more"),
        (("--host", "0.0.0.0"), "short", "16 characters"),
        (("--host", "not-an-address"), "", "must be an address"),
        (("--upstream", "openai"), "", "give a provider and its address"),
        (("--policy", "/no/such/file.toml"), "", "no such policy file"),
    ],
)
def test_it_does_not_start_where_it_would_be_unsafe(arguments: tuple[str, ...], token: str, said: str) -> None:
    ran = runguard("gateway", *arguments, **({"RUNGUARD_GATEWAY_TOKEN": token} if token else {}))
    assert ran.exit_code == 2
    assert said in ran.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_books_the_calls_in_flight(upstream: RawUpstream, tmp_path: Path, number: signal.Signals) -> None:
    store, policy = f"sqlite:///{tmp_path / 'guard.db'}", tmp_path / "team.toml"
    policy.write_text('[prices."a-model"]\ninput = 1\noutput = 10\n[[budgets]]\nusd = 1\nper = "app"\n')
    upstream.answer = lambda request: upstream.never_ending(chat_events("word " * 100)[:1])
    arguments = ("--port", 0, "--policy", policy, "--upstream", f"openai={upstream.url}/v1", "--json")
    with command(*arguments, RUNGUARD_STORE=store) as ran:
        assert ran.stdout is not None
        url = json.loads(ran.stdout.readline())["url"]
        with httpx.stream("POST", f"{url}{CHAT}", json={**ASKED, "stream": True}, timeout=20) as answer:
            next(answer.iter_raw())
            ran.send_signal(number)
            ran.communicate(timeout=20)
        assert ran.returncode == 0
    (budget,) = told("status", "--store", store)["budgets"]
    assert float(budget["reserved"]) == 0 < float(budget["spent"])


def test_the_command_serves_a_policy_and_ends_with_a_signal(fine: RawUpstream, tmp_path: Path) -> None:
    policy = tmp_path / "team.toml"
    policy.write_text('[prices."a-model"]\ninput = 1\noutput = 10\n[[budgets]]\ncalls = 2\nper = "user"\n')
    arguments = ("--port", 0, "--policy", policy, "--upstream", f"openai={fine.url}/v1", "--json")
    with command(*arguments, RUNGUARD_STORE=f"sqlite:///{tmp_path / 'guard.db'}") as ran:
        assert ran.stdout is not None
        url = json.loads(ran.stdout.readline())["url"]
        client = httpx.Client(headers={"authorization": "Bearer k"}, timeout=10)
        for number in range(4):
            body = {**ASKED, "messages": [{"role": "user", "content": f"question {number}"}]}
            answer = client.post(f"{url}{CHAT}", json=body)
            assert answer.status_code == 200
        assert answer.headers["x-runguard-stop"] == "budget"
        assert len(fine.arrived) == 2
        begin = time.monotonic()
        ran.send_signal(signal.SIGINT)
        _, stderr = ran.communicate(timeout=20)
        assert ran.returncode == 0, stderr
        assert time.monotonic() - begin < 15
