"""A mistake of the user, or a store that is away: one readable message, exit code 2, never a traceback."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.commands import PROGRAM, runguard, told
from tests.kit.examples import each_row

STORE_COMMANDS = {
    "status": ["status"],
    "trips": ["trips"],
    "show": ["trips", "show", "last"],
    "stop": ["stop", "all", "--reason", "x"],
    "resume": ["resume", "all"],
    "extend": ["extend", "user:a/b", "--usd", "1"],
    "dashboard": ["dashboard", "--no-open"],
}
MISTAKES = {
    "redis://127.0.0.1:1/0": "Start the store, check host and port, or pass another --store",
    "postgresql://me:hunter2@127.0.0.1:1/db": "Start the store, check host and port, or pass another --store",
    "sqlite:///absent.db": "absent.db: no such store",
    "sqlite:///absent/guard.db": "absent does not exist; create the folder, or name another file",
    "sqlite:////": "is a directory; name a file in it",
    "memory": "store = 'memory' ends with its process",
    "guard.db": "a file is written 'sqlite:///guard.db'",
    "C:\\guard.db": "a file is written 'sqlite:///path/to/file.db'",
}


@each_row("store", MISTAKES)
@each_row("command", STORE_COMMANDS.values())
def test_a_store_that_cannot_be_used(command: list[str], store: str) -> None:
    ran = runguard(*command, "--store", store)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert MISTAKES[store] in ran.stderr
    assert "hunter2" not in ran.stderr
    assert not Path("absent.db").exists(), "looking makes no file"
    assert MISTAKES[store] in told(*command, "--store", store, code=2)["error"]


def test_the_store_of_the_policy_is_used_and_the_environment_wins(
    file_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "ends with its process" in runguard("status").stderr
    Path("runguard.toml").write_text(f'store = "{file_store}"\n')
    below = Path("below")
    below.mkdir()
    monkeypatch.chdir(below)
    assert runguard("status").exit_code == 0
    monkeypatch.setenv("RUNGUARD_STORE", "redis://127.0.0.1:1/0")
    assert "redis://127.0.0.1:1" in runguard("status").stderr
    assert runguard("status", "--store", file_store).exit_code == 0, "and --store over both"


@each_row(
    ("file", "message"),
    [
        ("mod = 'shadow'\n[tools.x]\npollling = true", "tools.x.pollling: no such setting; did you mean 'polling'?"),
        ("mode = ", "not valid TOML"),
        ("[prices]\nacme = 3", "prices.acme"),
    ],
)
@each_row("command", [*STORE_COMMANDS.values(), ["prices"], ["check"], ["replay", "x.jsonl"]])
def test_a_wrong_policy_is_told_by_its_path(command: list[str], file: str, message: str) -> None:
    Path("runguard.toml").write_text(file)
    ran = runguard(*command)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert message in ran.stderr
    assert "runguard.toml" in ran.stderr


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there Path.is_dir and the like answer False")
@pytest.mark.parametrize(
    "command",
    [
        ["status", "--store", "sqlite:///locked/guard.db"],
        ["init", "locked/runguard.toml"],
        ["doctor", "--store", "sqlite:///locked/guard.db"],
    ],
    ids=lambda command: command[0],
)
def test_a_folder_that_may_not_be_entered_is_no_traceback(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(path: Path, **_: bool) -> os.stat_result:
        if "locked" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return os.stat(path)  # noqa: PTH116 - Path.stat is replaced

    monkeypatch.setattr(Path, "stat", locked)
    ran = runguard(*command)
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert "locked" in ran.stderr
    assert "Permission denied" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_a_folder_of_recordings_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(Path, "iterdir", locked)
    monkeypatch.setattr(Path, "rglob", lambda *_: [])  # it is silent about a folder that it may not read
    ran = runguard("replay", "runs")
    assert (ran.exit_code, ran.stderr) == (2, "runs: cannot be read: Permission denied\n")


def test_a_policy_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNGUARD_POLICY", "absent.toml")
    said = runguard("status").stderr.splitlines()
    assert said == [
        "absent.toml: no such policy file (named by RUNGUARD_POLICY)",
        "pass --store URL to work without this policy",
    ]


def test_a_wrong_policy_says_how_to_stop_without_it(file_store: str) -> None:
    Path("runguard.toml").write_text("mod = 1\n")
    assert runguard("stop", "all", "--reason", "x").stderr.endswith("\npass --store URL to work without this policy\n")
    assert runguard("stop", "all", "--reason", "x", "--store", file_store).exit_code == 0, "and so it is"


def test_a_wrong_environment_is_told(file_store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNGUARD_MODE", "shadwo")
    for command in ("check", "status"):
        ran = runguard(command)
        assert (ran.exit_code, ran.stdout) == (2, "")
        assert "(RUNGUARD_MODE) is not valid: mode = 'shadwo'" in ran.stderr
    assert "RUNGUARD_MODE and --store) is not valid" in runguard("status", "--store", file_store).stderr, (
        "told, and left out"
    )
    monkeypatch.setenv("RUNGUARD_MODE", "shadow")
    assert told("status", "--store", file_store)["mode"] == "shadow"
    monkeypatch.setenv("RUNGUARD_STORE", "guard.db")
    assert "a file is written 'sqlite:///guard.db'" in told("check", code=2)["error"]


@each_row(
    ("arguments", "message"),
    [
        (["status", "--since", "yesterday"], "Invalid value for '--since'"),
        (["init", "--preset", "nope"], "'nope' is not one of"),
        (["trips", "show"], "Missing argument 'TRIP'"),
        (["statu"], "No such command 'statu'; did you mean 'status'?"),
        (["zzz"], "No such command 'zzz'; known: demo, init"),
        ([], "put --json after a command: runguard status --json"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_json_where_json_is_asked_for(
    arguments: list[str], message: str
) -> None:
    answer = told(*arguments, code=2)
    assert (answer["ok"], set(answer)) == (False, {"ok", "error"})
    assert message in answer["error"]


def test_a_disk_that_is_full_is_no_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [*PROGRAM, "prices", "gemini-2.5-flash", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=50,
            check=False,
        )
    assert (ran.returncode, ran.stderr) == (2, "cannot write the result: No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["prices", "acme-1"], 1), (["statu"], 2)],
    ids=["found", "mistake"],
)
def test_an_output_that_is_closed_is_no_traceback(arguments: list[str], code: int) -> None:
    ran = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *PROGRAM, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=50,
        check=False,
    )
    assert ran.returncode == code
    assert "Traceback" not in ran.stderr
    assert (
        subprocess.run(
            ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *PROGRAM, *arguments], timeout=50, check=False
        ).returncode
        == code
    )


def test_a_missing_client_of_a_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, store, extra in (
        ("redis", "redis://127.0.0.1:1/0", "redis"),
        ("psycopg", "postgresql://127.0.0.1:1/d", "postgres"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        ran = runguard("stop", "all", "--reason", "x", "--store", store)
        assert ran.exit_code == 2
        assert f"needs {package}, which is not installed: pip install 'runguard-agents[{extra}]'" in ran.stderr


ADK_APP = Path(__file__).parents[2] / "examples" / "adk_app" / "clerk"
WITHOUT = """
import sys
sys.modules[{missing!r}] = None
from runguard.cli.main import main
main({arguments}, prog_name="runguard")
"""


@pytest.mark.parametrize(
    ("missing", "arguments", "message"),
    [
        ("google.adk", ["doctor", "--app", str(ADK_APP)], "google-adk is not installed, or too old"),
        ("google.adk", ["doctor", "--app", "json:dumps"], "json:dumps is a function; it must be an App, a Runner or"),
        ("google.adk", ["demo"], "runguard demo needs google-adk 2.3 or newer"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_missing_extra_is_named(missing: str, arguments: list[str], message: str) -> None:
    code = WITHOUT.format(missing=missing, arguments=arguments)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert ran.returncode == (1 if arguments[0] == "doctor" else 2)
    assert message in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("since", ["yesterday", "-3d", ""])
def test_a_time_that_is_none(since: str) -> None:
    ran = runguard("trips", "--since", since)
    assert ran.exit_code == 2
    assert "use a span such as 90m, 24h or 7d, or a day such as 2026-11-01" in " ".join(ran.stderr.split())
