"""``runguard dashboard`` from outside: how it starts, whom it answers, how it ends."""

import http.client
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from runguard.cli.main import main
from tests.kit.dashboards import Served, command, serve
from tests.kit.guarded_runs import guard, runaway

Serve = Callable[..., Served]


@pytest.fixture
def filled(store: str) -> str:
    guard(store).guard.check_store()
    return store


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["dashboard", "--no-open", *arguments])
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    assert (done.stdout, len(done.stderr.strip().splitlines()) in (1, 2)) == ("", True), "one message"
    return done.stderr


class Client:
    """One connection, with a host name of its own choice."""

    def __init__(self, served: Served) -> None:
        self.served, self.cookie = served, ""

    def ask(self, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        link = http.client.HTTPConnection("127.0.0.1", self.served.port, timeout=15)
        told = {
            "Host": f"127.0.0.1:{self.served.port}",
            **({"Cookie": self.cookie} if self.cookie else {}),
            **{k.replace("_", "-"): v for k, v in headers.items()},
        }
        link.request(method, path, headers=told)
        reply = link.getresponse()
        found = reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read().decode()
        link.close()
        return found

    def enter(self) -> None:
        status, headers, _ = self.ask(self.served.url.removeprefix(self.served.origin))
        assert (status, headers["location"]) == (303, "/")
        self.cookie, _, more = headers["set-cookie"].partition(";")
        self.attributes = {part.strip().lower() for part in more.split(";")}


def test_each_mistake_is_one_message(filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "a durable store" in refused("--store", "memory")
    assert "ends with its process" in refused(), "without a policy the store is memory"
    assert "no such store" in refused("--store", f"sqlite:///{tmp_path}/none.db")
    assert not (tmp_path / "none.db").exists()
    assert "no such store" in refused("--store", "mysql://x")
    assert "on loopback only" in refused("--store", filled, "--host", "0.0.0.0")
    assert "must be a loopback address" in refused("--store", filled, "--host", "example.com")
    assert "must be a number up to 65535, or auto" in refused("--store", filled, "--port", "many")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port} is in use" in refused("--store", filled, "--port", port)


def test_without_its_packages_the_extra_is_named(filled: str) -> None:
    without = "import sys; sys.modules['starlette'] = sys.modules['uvicorn'] = None; " + command()[4]
    done = subprocess.run(
        [*command()[:4], without, "dashboard", "--store", filled, "--no-open"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 2
    assert "pip install 'runguard-agents[dashboard]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_token_opens_once_and_the_cookie_stays(
    filled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runguard.toml").write_text(f'store = "{filled}"\n', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    process = subprocess.Popen(command("--no-open", "--port", "auto"), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert filled.rpartition("/")[2] in process.stdout.readline(), "the store of the policy is the default"
    dashboard = Served(process, (process.stdout.readline() + process.stdout.readline()).strip(), filled)
    one, two = Client(dashboard), Client(dashboard)
    status, _, body = one.ask()
    assert status == 403
    assert "runguard dashboard" in body
    assert one.ask("/?token=wrong")[0] == 403
    assert one.ask("/api/overview?token=" + dashboard.url.partition("token=")[2])[0] == 403, (
        "the front page alone takes it"
    )
    status, headers, _ = one.ask(dashboard.url.removeprefix(dashboard.origin), "HEAD")
    assert (status, headers["allow"], "set-cookie" in headers) == (405, "GET", False), (
        "a preview of the link leaves the token unused"
    )
    one.enter()
    assert one.attributes == {"httponly", "path=/", "samesite=strict"}
    assert dashboard.url.partition("token=")[2] not in one.cookie
    status, headers, _ = one.ask("/api/overview")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert two.ask(dashboard.url.removeprefix(dashboard.origin))[0] == 403, "used"
    status, headers, _ = one.ask(dashboard.url.removeprefix(dashboard.origin))
    assert (status, headers["location"]) == (303, "/"), "whoever is in stays in, and the token leaves the address bar"
    dashboard.stop()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Somebody who has entered."""
    store = f"sqlite:///{tmp_path_factory.mktemp('dashboard')}/guard.db"
    guard(store).guard.check_store()
    dashboard = serve(store)
    made = Client(dashboard)
    made.enter()
    yield made
    dashboard.stop()


@pytest.mark.parametrize("path", ["/", "/api/overview", "/static/overview.js", "/static/page.css", "/nowhere"])
def test_every_answer_is_locked_down(client: Client, path: str) -> None:
    _, headers, _ = client.ask(path)
    assert headers["content-security-policy"] == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
    )
    assert (headers["x-content-type-options"], headers["referrer-policy"], headers["cache-control"]) == (
        "nosniff",
        "no-referrer",
        "no-store",
    )
    assert not [name for name in headers if name.startswith("access-control")]
    assert "server" not in headers


def test_only_the_page_itself_is_answered(client: Client) -> None:
    dashboard = client.served
    ours = f"http://127.0.0.1:{dashboard.port}"
    for host in (
        "evil.example",
        f"evil.example:{dashboard.port}",
        "127.0.0.1",
        f"127.0.0.1:{dashboard.port + 1}",
        f"127.0.0.1.evil:{dashboard.port}",
        "",
    ):
        assert client.ask("/api/overview", Host=host)[0] in (400, 421), host
    assert client.ask("/api/overview", Host=f"LOCALHOST:{dashboard.port}")[0] == 200
    for origin in (
        "http://evil.example",
        "null",
        f"https://127.0.0.1:{dashboard.port}",
        "http://127.0.0.1:1",
        f"{ours}.evil.example",
    ):
        assert client.ask("/api/overview", Origin=origin)[0] == 403, origin
    assert client.ask("/api/overview", Origin=ours)[0] == 200
    for site in ("cross-site", "same-site"):
        status, _, body = client.ask("/api/overview", Sec_Fetch_Site=site)
        assert status == 403
        assert "from another site" in body
    assert (
        client.ask("/api/overview", Sec_Fetch_Site="same-origin")[0] == client.ask("/", Sec_Fetch_Site="none")[0] == 200
    )
    for method in ("HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert client.ask("/api/overview", method)[0] == 405, method


def test_odd_questions_are_answered_shortly(client: Client) -> None:
    assert client.ask("/api/overview?by=moon")[0] == client.ask("/api/overview?range=9y")[0] == 400
    assert client.ask("/api/trips/none")[0] == client.ask("/nowhere")[0] == 404
    for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py", "/static/"):
        assert client.ask(path)[0] == 404, path
    stranger = Client(client.served)
    stranger.cookie = "runguard=\x01; ;;==" + "x" * 3_000
    assert stranger.ask()[0] in (400, 403)


def test_the_page_is_served_over_every_store(place: object, served: Serve) -> None:
    url = getattr(place, "url", "")
    plugin = guard(url)
    runaway(plugin, user_id="alice")
    client = Client(served(url))
    client.enter()
    status, _, body = client.ask("/api/overview?by=user&range=15m")
    assert status == 200
    assert '"alice"' in body
    assert "s3cret" not in body, "no password of the store"
