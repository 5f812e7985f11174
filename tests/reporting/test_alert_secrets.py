"""Secrets stay secret; signatures prove the sender."""

import copy
import json
import logging
import pickle
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from runguard.alerts import Alert, Alerts, AlertSettings, mask, verify_signature
from runguard.errors import PolicyError
from runguard.reporting import delivery as message_formats
from runguard.reporting.alerts import Endpoint, Secret
from tests.kit.alert_servers import (
    CANARY,
    PATIENT,
    SIGNING,
    Server,
    alert,
    alerts,
    sent,
    short_pauses_and_no_leftovers,  # noqa: F401 - an autouse fixture
)
from tests.kit.examples import each_row

# ---- secrets --------------------------------------------------------------------------------------------------------


SECRETS = {
    "sk-proj-AbCdEf0123456789xyz": "***",
    "sk-ant-api03-AbCdEf0123456789": "***",
    "sk_live_AbCdEf0123456789": "***",
    "AIzaSyA0123456789abcdefghijklmnopqrstuv": "***",
    "ya29.a0AfH6SMBx": "***",
    "xoxb-123456789012-abcdefABCDEF": "***",
    "xapp-1-A0123-abcdef": "***",
    "ghp_0123456789abcdefghij": "***",
    "github_pat_0123456789abcdefghij": "***",
    "AKIAIOSFODNN7EXAMPLE": "***",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl": "***",
    "Bearer abcdef123456": "Bearer ***",
    "basic dXNlcjpwYXNzd29yZA==": "basic ***",
    "OPENAI_API_KEY=abc123": "OPENAI_API_KEY=***",
    '{"password": "hunter2"}': '{"password": "***"}',
    "token: abcdef": "token: ***",
    "redis://user:pw@cache:6379/0": "redis://cache:6379/***",
    "https://hooks.slack.com/services/T00/B00/XXX": "https://hooks.slack.com/***",
    "https://alerts.example?key=abc": "https://alerts.example/***",
    "-----BEGIN EC PRIVATE KEY----- MHcCAQ== -----END EC PRIVATE KEY-----": "***",
    "sk-\u200bproj-AbCdEf0123456789xyz": "***",
}


@each_row(("text", "masked"), SECRETS.items())
def test_secrets_are_masked(text: str, masked: str) -> None:
    assert mask(f"before {text} after") == f"before {masked} after"


@each_row(
    "text",
    [
        (
            "stopped by stall of tool 'parse_document': 6 equal failures, limit 6 in root→extractor; 6 model "
            "calls, 1200 tokens so far"
        ),
        "tokens: 1200, max_tokens=50",
        "task-force-of-many-long-words and risk_management_system",
        "a basic understanding",
        "user:docs/alice of https://alerts.example",
        "digest 0123456789abcdef0123456789abcdef",
    ],
)
def test_ordinary_texts_stay_as_they_are(text: str) -> None:
    assert mask(text) == text


def test_a_text_becomes_one_line_without_tricks() -> None:
    assert mask("a\r\nb\x00c\x1b[31m \u202egnp.exe\u2028d") == "a b c [31m gnp.exe d"


@pytest.mark.parametrize(
    "piece",
    [
        "eyJ-",
        "eyJ",
        "sk-",
        "a",
        "https://",
        "a://b:",
        "bearer ",
        "password=",
        "-----BEGIN ",
        "-----BEGIN KEY-----",
        "@",
        "token",
        "\u200b",
        "xox",
    ],
)
def test_a_megabyte_of_anything_is_cut_and_done(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    begin = time.process_time()
    assert len(mask(text)) <= 1_000
    assert time.process_time() - begin < 1.0  # it takes about a millisecond; what is not linear takes minutes
    begin = time.process_time()
    mask(text, 200_000)
    assert time.process_time() - begin < 10.0


@each_row("start", [*range(60, 104, 3), *range(570, 615, 3)])
def test_a_key_that_crosses_a_cut_does_not_show_its_first_half(start: int) -> None:
    """At the end of what is shown, and at the end of what is looked at,
    which is shown when much before it was masked.
    """
    before = f"password={'x' * 120} " * 5
    text = before[:start].rstrip() + " sk-proj-AbCdEf0123456789AbCdEf0123456789 and so on" + " more" * 500
    assert "sk-" not in mask(text, 100)


def everything_said(server: Server) -> str:
    return "\n".join(f"{path} {headers} {body.decode()}" for path, headers, body, _ in server.requests)


def flat(body: bytes) -> list[str]:
    """Every text of a JSON, at every depth."""
    found: list[str] = []

    def walk(value: Any) -> None:
        for item in (
            (*value.keys(), *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
        ):
            walk(item)
        found.extend([value] if isinstance(value, str) else [])

    walk(json.loads(body))
    return found


def test_the_canary_is_in_no_message_no_log_and_no_repr(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever an alert holds, and whatever the receivers' own secrets look like, they do not leave."""
    hook, failing = serve(), serve(400)
    failing.body = f"{{'error': 'bad {SIGNING} for /hook/{CANARY}'}}".encode()
    heard: list[Alert] = []
    settings = AlertSettings.parse(
        [
            {
                "slack_webhook": hook.url("/slack"),
                "webhook": {"url": hook.url("/hook"), "secret": SIGNING},
                "log": True,
                "call": heard.append,
            },
            {"webhook": failing.url(), "pagerduty_key": "routing" + CANARY, "pagerduty_url": failing.url("/pd")},
        ]
    )
    told = Alerts(settings)
    with caplog.at_level(logging.DEBUG):
        told.send(
            alert(
                f"key with {SIGNING}",
                text=f"routing{CANARY} and sk-{CANARY} and {SIGNING}",
                facts={
                    "url": failing.url(),
                    "password": CANARY,
                    "note": f"Bearer {CANARY}",
                    f"x-{SIGNING}": 1,
                    "store": f"redis://u:{CANARY}@h/0",
                },
            )
        )
        assert told.flush(PATIENT)
    assert {name: (counts["sent"], counts["failed"]) for name, counts in told.counts.items()} == {
        "slack": (1, 0),
        "webhook": (1, 0),
        "log": (1, 0),
        "call": (1, 0),
        "webhook-2": (0, 1),
        "pagerduty": (0, 1),
    }
    records = "".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    for place in (
        everything_said(hook),
        caplog.text,
        records,
        repr(heard),
        repr(settings),
        str(settings),
        repr(asdict(settings)),
        json.dumps(settings.to_dict()),
    ):
        assert len(place) > 100
        assert CANARY not in place
    leaks = [text for _, _, body, _ in failing.requests for text in flat(body) if CANARY in text]
    assert len(failing.requests) == 2
    assert leaks == ["routing" + CANARY]  # where it belongs: the routing key, once


def test_settings_from_the_environment_are_pickled_by_name_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Server]
) -> None:
    server = serve()
    monkeypatch.setenv("HOOK", server.url())
    monkeypatch.setenv("SIGN", SIGNING)
    monkeypatch.setenv("PD_KEY", CANARY)
    settings = AlertSettings.parse(
        {"webhook": {"url": "env:HOOK", "secret": "env:SIGN"}, "pagerduty_key": "env:PD_KEY"}
    )
    data = pickle.dumps(settings)
    assert CANARY.encode() not in data
    assert b"env:HOOK" in data
    assert pickle.loads(data) == settings
    told = Alerts(pickle.loads(pickle.dumps(AlertSettings.parse({"webhook": "env:HOOK"}))))
    told.send(alert())
    assert sent(told) == {"sent": 1}
    written_out = AlertSettings.parse({"webhook": server.url()})
    with pytest.raises(TypeError, match="env:NAME") as raised:
        pickle.dumps(written_out)
    assert CANARY not in str(raised.value)
    assert copy.deepcopy(settings) == settings


def test_a_secret_shows_itself_to_nobody() -> None:
    secret = Secret(CANARY)
    assert CANARY not in f"{secret} {secret!r} {[secret]} {secret!s:>40}" % ()
    assert secret.reveal() == CANARY
    assert secret == Secret(CANARY)
    assert secret != Secret("other")
    endpoint = Endpoint.of(Secret(f"https://alerts.example/{CANARY}"), "x", allow_private=False)
    assert str(endpoint) == "https://alerts.example/***"
    assert CANARY not in repr(endpoint)


def test_secrets_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Server]) -> None:
    server = serve()
    monkeypatch.setenv("ALERT_HOOK", server.url("/from/env") + "\n")  # as from a mounted file
    monkeypatch.setenv("ALERT_AUTH", "Bearer from-env")
    told = alerts(webhook={"url": "env:ALERT_HOOK", "headers": {"X-Auth": "env:ALERT_AUTH"}})
    monkeypatch.delenv("ALERT_HOOK")  # read once, when the settings were
    told.send(alert())
    assert sent(told) == {"sent": 1}
    assert server.requests[0][0] == "/from/env"
    assert server.requests[0][1]["x-auth"] == "Bearer from-env"


@pytest.mark.parametrize("setting", ["slack_webhook", "pagerduty_key", "webhook"])
def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.delenv("NO_SUCH_THING", raising=False)
    with pytest.raises(PolicyError, match=rf"^alerts\.{setting}: the environment variable NO_SUCH_THING is not set$"):
        AlertSettings.parse({setting: "env:NO_SUCH_THING"})
    monkeypatch.setenv("NO_SUCH_THING", " ")
    with pytest.raises(PolicyError, match="NO_SUCH_THING is empty"):
        AlertSettings.parse({setting: "env:NO_SUCH_THING"})


# ---- signatures -----------------------------------------------------------------------------------------------------


def test_a_signature_is_what_anybody_can_compute() -> None:
    """Fixed, because receivers in other languages rely on it; computed with ``openssl dgst -sha256 -hmac``."""
    expected = "v1=6cee4736a889a04e2d81c8397febddeb6db6f8b60d7eacee906bb482211159be"
    assert message_formats.signature("a-secret-of-16-chars", "1700000000", b'{"v":1}') == expected


def verified(**over: Any) -> bool:
    body = b'{"v":1}'
    good = {
        "secret": SIGNING,
        "timestamp": "1700000000",
        "body": body,
        "signature": message_formats.signature(SIGNING, "1700000000", body),
        "now": 1_700_000_100.0,
    }
    return verify_signature(**{**good, **over})


def test_a_good_signature_is_verified() -> None:
    assert verified()
    assert verified(timestamp=1_700_000_000)
    assert verified(now=1_700_000_300.0)
    assert verified(now=1_700_000_301.0, tolerance_seconds=301)


@each_row(
    "wrong",
    [
        {"secret": SIGNING + "x"},
        {"timestamp": "1700000001"},
        {"timestamp": "1700000000 "},
        {"timestamp": "-1"},
        {"timestamp": "١٧٠٠٠٠٠٠٠٠"},
        {"timestamp": "9" * 5_000},
        {"timestamp": None},
        {"body": b'{"v":2}'},
        {"body": '{"v":1}'},
        {"signature": ""},
        {"signature": "v1="},
        {"signature": "v1=é"},
        {"signature": None},
        {"now": 1_700_000_301.0},
        {"now": 1_699_999_699.0},
    ],
)
def test_anything_else_is_not(wrong: dict[str, Any]) -> None:
    assert verified(**wrong) is False


def test_an_empty_secret_is_no_secret() -> None:
    with pytest.raises(ValueError, match="empty"):
        verified(secret="")
