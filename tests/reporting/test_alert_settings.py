"""Settings of alerts, and hostile facts in them."""

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from runguard.alerts import (
    Alerts,
    AlertSettings,
)
from runguard.errors import PolicyError
from tests.kit.alert_servers import (
    CANARY,
    HOOK,
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
