"""A real Prometheus scrapes a guarded app: the dashboard shows data, and the right alerts fire."""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.scripts import ROOT

FOLDER = ROOT / "examples" / "monitoring"
PROMETHEUS = shutil.which("prometheus")
if PROMETHEUS is None:
    pytest.skip("Prometheus is not installed; `make test-operations` installs it", allow_module_level=True)
if find_spec("opentelemetry.exporter.prometheus") is None:
    pytest.skip("the exporter is installed in the newest environment alone", allow_module_level=True)
pytestmark = pytest.mark.timeout(120)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rules_without_delay(folder: Path) -> Path:
    """The same rules, firing at once and evaluated each second."""
    rules = yaml.safe_load((FOLDER / "runguard.rules.yml").read_text(encoding="utf-8"))
    for rule in rules["groups"][0]["rules"]:
        rule.pop("for", None)
    file = folder / "rules.yml"
    file.write_text(yaml.safe_dump(rules))
    return file


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("prometheus")
    app_port, port = free_port(), free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules_without_delay(folder))],
        "scrape_configs": [{"job_name": "agents", "static_configs": [{"targets": [f"127.0.0.1:{app_port}"]}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with contextlib.ExitStack() as stack:
        app = subprocess.Popen(
            [sys.executable, "-m", "tests.monitoring.guarded_app", str(app_port)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(app.wait)
        stack.callback(app.kill)
        assert app.stdout is not None
        assert app.stdout.readline() == b"ready\n"
        server = subprocess.Popen(
            [
                str(PROMETHEUS),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(server.wait)
        stack.callback(server.kill)
        yield f"http://127.0.0.1:{port}"


def asked(address: str, path: str, **parameters: str) -> Any:
    url = f"{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["data"]


def eventually(question: Any, is_enough: Any, seconds: float = 60) -> Any:
    end, found = time.monotonic() + seconds, None
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            found = question()
            if is_enough(found):
                return found
        time.sleep(0.3)
    raise AssertionError(f"after {seconds:g} s: {found}")


def test_the_alerts_that_fit_fire_and_no_others(prometheus: str) -> None:
    def firing() -> set[str]:
        return {alert["labels"]["alertname"] for alert in asked(prometheus, "alerts")["alerts"]}

    # The app has spent 0.34 of 0.35 USD, and one run met the end of the budget. One loop is not yet an alert.
    expected = {"RunGuardBudgetNearlyUsed", "RunGuardBudgetRefusals"}
    eventually(firing, lambda found: found >= expected)
    assert firing() == expected
    unhealthy = [
        rule["name"]
        for group in asked(prometheus, "rules")["groups"]
        for rule in group["rules"]
        if rule["health"] not in ("ok", "unknown")
    ]
    assert unhealthy == []


def test_every_panel_of_the_dashboard_shows_data(prometheus: str) -> None:
    board = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
    values = {"$__rate_interval": "5s", "$__range": "1h", '"$job"': '"agents"'}
    for panel in board["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in values.items():
                query = query.replace(name, value)
            assert not re.search(r"\$", query), query
            ask = partial(asked, prometheus, "query", query=query)
            if panel["title"] == "Stopped runs":  # it needs two scrapes to see an increase
                eventually(ask, lambda data: [series["value"][1] for series in data["result"]] == ["2"])
            found = eventually(ask, lambda data: data["result"])["result"]
            if panel["title"] == "Budgets":
                assert [float(series["value"][1]) for series in found] == [pytest.approx(0.34 / 0.35)]
