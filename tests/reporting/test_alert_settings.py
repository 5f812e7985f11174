"""Settings of alerts, and hostile facts in them."""

import copy
import json
import logging
import pickle
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from runguard.alerts import (
    Alert,
    Alerts,
    AlertSettings,
    mask,
    verify_signature,
)
from runguard.errors import PolicyError
from runguard.reporting import delivery as message_formats
from runguard.reporting.alerts import Endpoint, Secret
from tests.kit.alert_servers import (
    CANARY,
    HOOK,
    PATIENT,
    SIGNING,
    Server,
    alert,
    alerts,
    sent,
    short_pauses_and_no_leftovers,  # noqa: F401 - an autouse fixture
)
from tests.kit.examples import each_row

# ---- settings -------------------------------------------------------------------------------------------------------


BAD_SETTINGS: list[tuple[Any, str]] = [
    ({"slack_webhok": HOOK}, "alerts.slack_webhok: no such setting; did you mean 'slack_webhook'?"),
    ({"zzz": 1}, "alerts.zzz: no such setting; known: slack_webhook, pagerduty_key, webhook, log, call,"),
    ({HOOK: True}, "alerts.https://alerts.example/***: no such setting"),
    ({7: True}, "alerts.int: no such setting"),
    (
        HOOK,
        (
            "alerts: must be a table such as {'slack_webhook': 'env:SLACK_WEBHOOK'}, a function, or a list of these, "
            "not a str"
        ),
    ),
    (7, "alerts: must be a table"),
    ([{"log": True}, [print]], "alerts[1]: must be a table"),
    (
        [{"log": True}, {"webhook": {"url": HOOK, "secrets": CANARY}}],
        "alerts[1].webhook.secrets: no such setting; did you mean 'secret'?",
    ),
    ({"slack_webhook": b"x"}, "alerts.slack_webhook: must be a text, not a bytes"),
    ({"slack_webhook": ""}, "alerts.slack_webhook: is empty"),
    ({"slack_webhook": "env:"}, "alerts.slack_webhook: env: must be followed by the name"),
    ({"slack_webhook": "env:A B"}, "alerts.slack_webhook: env: must be followed by the name"),
    ({"webhook": {"secret": CANARY}}, "alerts.webhook.url: missing"),
    ({"webhook": {"url": HOOK, "secret": "canary0"}}, "alerts.webhook.secret: shorter than 16 characters"),
    (
        {"webhook": {"url": HOOK, "headers": [CANARY]}},
        "alerts.webhook.headers: must be a table of names and values, not a list",
    ),
    ({"webhook": {"url": HOOK, "headers": {"Host": CANARY}}}, "alerts.webhook.headers.Host: is set by RunGuard itself"),
    ({"webhook": {"url": HOOK, "headers": {"X-RunGuard-Signature": CANARY}}}, "is set by RunGuard itself"),
    (
        {"webhook": {"url": HOOK, "headers": {"X-A": f"{CANARY}\r\nX-B: 1"}}},
        "alerts.webhook.headers.X-A: must be one line of printable ASCII",
    ),
    (
        {"webhook": {"url": HOOK, "headers": {f"X {CANARY}": "1"}}},
        "alerts.webhook.headers: is not a valid header name",
    ),
    ({"pagerduty_key": f"{CANARY} "}, "alerts.pagerduty_key: must be the integration's routing key"),
    ({"pagerduty_url": HOOK}, "alerts.pagerduty_url: has no effect without pagerduty_key"),
    ({"pagerduty_url": HOOK, "log": True}, "alerts.pagerduty_url: has no effect without pagerduty_key"),
    ({"timeout_seconds": 1}, "alerts: has no receiver; add one of slack_webhook,"),
    ({"log": "loud"}, "alerts.log: must be true, false or one of debug, info, warning, error, critical"),
    ({"log": 1}, "alerts.log: must be true"),
    ({"call": "package.module:function"}, "alerts.call: must be a function of one alert, not a str"),
    ({"log": True, "allow_private": "yes"}, "alerts.allow_private: must be true or false, not a str"),
    ({"log": True, "timeout_seconds": "2"}, "alerts.timeout_seconds: must be a number of seconds, not a str"),
    ({"log": True, "timeout_seconds": True}, "alerts.timeout_seconds: must be a number of seconds, not a bool"),
    ({"log": True, "timeout_seconds": 0}, "alerts.timeout_seconds = 0: must be greater than 0 and at most 60 seconds"),
    ({"log": True, "deadline_seconds": float("nan")}, "alerts.deadline_seconds = nan: must be greater than 0"),
    ({"log": True, "deadline_seconds": float("inf")}, "alerts.deadline_seconds = inf: must be greater than 0"),
    (
        {"log": True, "timeout_seconds": 5, "deadline_seconds": 3},
        "alerts.timeout_seconds = 5: one attempt cannot take longer than deadline_seconds = 3",
    ),
]


@each_row(("settings", "message"), BAD_SETTINGS)
def test_bad_settings_are_named_and_no_secret_is_shown(settings: Any, message: str) -> None:
    with pytest.raises(PolicyError) as raised:
        AlertSettings.parse(settings)
    assert message in str(raised.value)
    assert CANARY not in str(raised.value)
    assert raised.value.__context__ is None or CANARY not in repr(raised.value.__context__)


def test_settings_have_defaults_and_names() -> None:
    settings = AlertSettings.parse(
        [
            {"slack_webhook": HOOK, "pagerduty_key": CANARY, "webhook": HOOK, "log": True, "call": print},
            {"webhook": HOOK, "log": False},
        ]
    )
    assert [receiver.name for receiver in settings.receivers] == [
        "slack",
        "pagerduty",
        "webhook",
        "log",
        "call",
        "webhook-2",
    ]
    assert {(receiver.timeout_s, receiver.deadline_s) for receiver in settings.receivers} == {(2.0, 60.0)}
    assert str(settings.receivers[1].endpoint) == "https://events.pagerduty.com/***"
    assert AlertSettings.parse(settings) is settings
    assert settings.to_dict()["receivers"][2]["url"] == "https://alerts.example/***"
    assert AlertSettings.parse({"log": True, "deadline_seconds": 1}).receivers[0].timeout_s == 1.0


@each_row("nothing", [None, {}, [], {"log": False}, {"slack_webhook": None}])
def test_nobody_to_tell_is_fine(nothing: dict[str, Any] | list[Any] | None) -> None:
    settings = AlertSettings.parse(nothing)
    assert not settings
    told = Alerts(settings)
    told.send(alert())
    assert told.flush(0)
    assert told.counts == {}


def test_settings_and_alerts_are_frozen() -> None:
    with pytest.raises(AttributeError):
        AlertSettings().receivers = ()  # type: ignore[misc]
    with pytest.raises(AttributeError):
        alert().text = "other"  # type: ignore[misc]


def test_an_alert_keeps_its_facts_to_itself() -> None:
    facts = {"calls": 1}
    one = alert(facts=facts)
    facts["calls"] = 2
    assert one.facts == {"calls": 1}
    assert hash(one) == hash(alert(facts={}))
    assert pickle.loads(pickle.dumps(one)) == one


@each_row("wrong", [{"kind": "other"}, {"severity": "loud"}, {"key": ""}, {"key": 7}, {"text": None}])
def test_an_alert_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        alert(**wrong)


# ---- hostile facts --------------------------------------------------------------------------------------------------


class Hostile:
    def __str__(self) -> str:
        raise SystemExit("never asked")

    __repr__ = __str__


def test_every_fact_becomes_bounded_json(serve: Callable[..., Server]) -> None:
    server = serve()
    told = alerts(webhook=server.url())
    facts: dict[Any, Any] = {
        "nan": float("nan"),
        "inf": float("-inf"),
        "huge": 10**10_000,
        "object": Hostile(),
        "list": [1],
        "lone": "\ud800",
        7: "seven",
    }
    told.send(
        alert(text="😀" * 5_000, facts=facts | {f"n{n}" + "x" * 500: "😀" * 5_000 for n in range(100)}, at=float("nan"))
    )
    assert sent(told) == {"sent": 1}
    body = server.requests[0][2]
    assert len(body) < 128_000
    got = json.loads(body, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert got["facts"]["nan"] == "nan"
    assert got["facts"]["inf"] == "-inf"
    assert got["facts"]["huge"] == "a number of 33220 bits"
    assert got["facts"]["object"] == "Hostile"
    assert got["facts"]["list"] == "list"
    assert got["facts"]["int"] == "seven"
    assert got["facts"]["facts_left_out"] == len(facts) + 100 - 32
    assert got["at"] == 0.0


# ---- Secrets stay secret; signatures prove the sender


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
