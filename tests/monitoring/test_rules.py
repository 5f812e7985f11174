"""The alert rules and the dashboard: they use metrics that exist, each alert has a runbook, promtool accepts them."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from runguard.reporting import telemetry
from tests.kit.examples import each_row
from tests.kit.scripts import ROOT

FOLDER = ROOT / "examples" / "monitoring"
RULES = yaml.safe_load((FOLDER / "runguard.rules.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
BOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
PANEL_QUERIES = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
OPERATIONS = (ROOT / "docs" / "reference" / "prometheus.md").read_text(encoding="utf-8")
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed; `make test-operations` installs it"
)


def in_prometheus(name: str) -> str:
    return name.replace(".", "_")


METRICS = {
    f"{in_prometheus(telemetry.DECISIONS)}_total",
    *(in_prometheus(name) for name in (telemetry.BUDGET_LIMIT, telemetry.BUDGET_USED, telemetry.BUDGET_RESERVED)),
    *(f"{in_prometheus(telemetry.GUARD_DURATION)}_seconds_{part}" for part in ("bucket", "count", "sum")),
}
LABELS = {
    in_prometheus(name)
    for name in (
        *(telemetry.DECISION, telemetry.RULE, telemetry.ENFORCED, telemetry.AGENT, telemetry.TOOL),
        *(telemetry.SCOPE_KIND, telemetry.SCOPE_ID, telemetry.UNIT, telemetry.WINDOW),
    )
}


@each_row("query", [*(rule["expr"] for rule in RULES), *PANEL_QUERIES])
def test_queries_use_metrics_and_labels_that_exist(query: str) -> None:
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    words = set(re.findall(r"(?:runguard|gen_ai)[\w:]*", re.sub(r'"[^"]*"', "", query)))
    assert words
    assert words <= METRICS | LABELS | recorded


def test_the_dashboard_can_be_imported_beside_others() -> None:
    assert BOARD["uid"] == "runguard"
    assert "id" not in BOARD
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert {panel["datasource"]["uid"] for panel in BOARD["panels"]} == {"${datasource}"}
    assert all(panel["description"] for panel in BOARD["panels"])


@each_row("alert", ALERTS)
def test_every_alert_has_a_runbook(alert: str) -> None:
    assert ALERTS[alert]["annotations"]["runbook"] == f"reference/prometheus.md#{alert.lower()}"
    section = OPERATIONS.partition(f"## {alert}\n")[2].partition("\n#")[0]
    assert all(f"**{part}**" in section for part in ("Means", "Look", "Do")), f"docs/reference/prometheus.md: {alert}"


def test_every_runbook_has_an_alert() -> None:
    assert set(re.findall(r"^## (RunGuard\w+)$", OPERATIONS, re.MULTILINE)) == set(ALERTS)


def promtool(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    assert PROMTOOL is not None
    command = [PROMTOOL, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


@needs_promtool
def test_promtool_accepts_the_rules_and_their_tests() -> None:
    assert promtool("check", "rules", FOLDER / "runguard.rules.yml").returncode == 0
    ran = promtool("test", "rules", FOLDER / "runguard.rules.test.yml")
    assert ran.returncode == 0, ran.stdout + ran.stderr


CHANGES = {
    "> 4.5": "> 450",
    "last_over_time(runguard_decisions_total[1h] offset 15m)": "runguard_decisions_total offset 15m",
    "unless last_over_time(runguard_decisions_total[1h] offset 15m)": "and on () vector(0) > 1",
    "runguard_budget_used / (runguard_budget_limit > 0)": "runguard_budget_limit / runguard_budget_limit",
    "> 0.8 and": "> 0.95 and",
    'runguard_rule="guard_error"': 'runguard_rule="budget"',
    'runguard_enforced="false"': 'runguard_enforced="true"',
    "histogram_quantile(0.99": "histogram_quantile(0.0001",
}


@needs_promtool
def test_every_changed_rule_fails_its_test(tmp_path: Path) -> None:
    rules = (FOLDER / "runguard.rules.yml").read_text(encoding="utf-8")
    tests = (FOLDER / "runguard.rules.test.yml").read_text(encoding="utf-8")
    files = []
    for number, (before, after) in enumerate(CHANGES.items()):
        assert before in rules
        (tmp_path / f"{number}.rules.yml").write_text(rules.replace(before, after))
        files.append(tmp_path / f"{number}.yml")
        files[-1].write_text(tests.replace("[runguard.rules.yml]", f"[{number}.rules.yml]"))
    ran = promtool("test", "rules", *files)
    assert ran.returncode != 0
    survivors = [number for number in range(len(CHANGES)) if f"{number}.yml\n  SUCCESS" in ran.stdout + ran.stderr]
    assert [list(CHANGES)[number] for number in survivors] == []
