"""``runguard doctor`` says what a crash of the store's server would lose. On a real Valkey."""

import json
from typing import Any

import pytest
import redis

from tests.kit.commands import runguard
from tests.kit.valkey_server import valkey

FEW_RIGHTS = ("on", ">pw", "~{runguard}:*", "+@read", "+@write", "+@scripting", "+time")


def store_line(url: str) -> dict[str, str]:
    ran = runguard("doctor", "--json", "--store", url)
    lines: list[dict[str, str]] = json.loads(ran.stdout)["checks"]
    return next(line for line in lines if line["check"] == "store")


def test_a_server_without_an_append_only_file_gets_a_warning() -> None:
    with valkey() as url:
        line = store_line(url)
    assert line["state"] == "warning"
    assert "forgets what was spent since its last snapshot" in line["found"]
    assert line["do"] == "set appendonly yes on the server"


def test_a_server_with_an_append_only_file_is_fine() -> None:
    with valkey(aof=True) as url:
        line = store_line(url)
    assert line["state"] == "ok"
    assert "loses nothing with appendfsync always" in line["found"]


@pytest.mark.parametrize(
    ("rights", "state"), [(("+info",), "warning"), (("+config|get",), "warning"), ((), "ok")], ids=str
)
def test_what_a_user_may_not_ask_is_not_guessed(rights: tuple[str, ...], state: str) -> None:
    with valkey() as url:
        raw: Any = redis.Redis.from_url(url)
        raw.execute_command("ACL", "SETUSER", "few", *FEW_RIGHTS, *rights)
        raw.close()
        line = store_line(url.replace("redis://", "redis://few:pw@"))
    assert line["state"] == state


def test_a_server_that_wants_a_password_need_not_be_started() -> None:
    with valkey() as url:
        raw: Any = redis.Redis.from_url(url)
        raw.config_set("requirepass", "s3cret")
        raw.close()
        line = store_line(url)
    assert line["state"] == "problem"
    assert "wants another user name or password" in line["found"]
    assert line["do"] == "correct the store's URL or its rights"
