"""The public names, what importing them costs, and who may import whom."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import runguard

SOURCE = Path(runguard.__file__).parent
MODULES = {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in sorted(SOURCE.rglob("*.py"))}
PURE = {
    "runguard." + name for name in ("absence", "unfinished", "budget", "events", "fingerprint", "outcomes", "breaker", "decision", "errors", "threshold")
} | {name for name in MODULES if name.startswith("runguard.detectors")}
EDGES = tuple("runguard." + room for room in ("adk", "functions", "replay", "calibrate", "cli", "commands", "dashboard", "testing", "demo"))


_BELOW_THE_CONDUCTOR = tuple(
    "policy pricing faults outbox accounts charges denials ledger ledger.store journal answers runs shared switch "  # noqa: SIM905 - it is a list of names
    "telemetry tools trips alarms summaries succession session_growth".split()
)


def is_edge(module: str) -> bool:
    """Adapters and programs: they import the rest, and nothing imports them."""
    return any(module == edge or module.startswith((edge + ".", edge + "_")) for edge in EDGES)


def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports(module: str) -> set[str]:
    """Every module that ``module`` imports, anywhere in its text; names under TYPE_CHECKING aside."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
            base = ".".join(filter(None, [*package.split(".")[: len(package.split(".")) - node.level + 1], node.module])) if node.level else node.module or ""
            found.update(f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree(module))
    return found


def outside(module: str) -> set[str]:
    """Top-level packages that ``module`` imports from neither the standard library nor this package."""
    return {top for name in imports(module) if (top := name.split(".")[0]) not in sys.stdlib_module_names and top != "runguard"}


def inside(module: str) -> set[str]:
    return {name for name in imports(module) if name.split(".")[0] == "runguard"}


# ---- names ----------------------------------------------------------------------------------------------------------


def test_the_public_names_are_these():
    assert runguard.__all__ == [
        "ADKCostBreaker",
        "AndTerminationCondition",
        "BreakerState",
        "Budget",
        "BudgetExceededError",
        "BudgetMonitor",
        "BudgetPlugin",
        "BudgetPolicy",
        "BudgetStatus",
        "CircuitOpenError",
        "CompressionTriggered",
        "ContextOverflowError",
        "CostGrowthError",
        "CostTermination",
        "DeadlineExceededError",
        "Decision",
        "ExternalTermination",
        "FinalAnswerTermination",
        "Finding",
        "FunctionCallTermination",
        "FunctionalTermination",
        "GuardFailedError",
        "GuardedLlm",
        "HandoffTermination",
        "InstallError",
        "LimitExceededError",
        "LoopDetectedError",
        "MaxIterationsTermination",
        "MaxMessageTermination",
        "ModelLimits",
        "NoProgressTermination",
        "OrTerminationCondition",
        "Policy",
        "PolicyError",
        "Price",
        "RuleTermination",
        "RunGuardError",
        "RunStoppedError",
        "Scope",
        "StateTermination",
        "TerminatedError",
        "TerminationCondition",
        "TerminationPlugin",
        "TerminationResult",
        "TextMentionTermination",
        "Threshold",
        "TimeoutTermination",
        "TokenUsageTermination",
        "ToolRule",
        "Trip",
        "UnpricedModelError",
        "guard",
        "guard_async",
        "install",
        "run",
        "terminate",
        "termination_reason",
        "tool",
        "trip",
        "uninstall",
    ]


@pytest.mark.parametrize("name", runguard.__all__)
def test_every_public_name_is_there(name):
    assert getattr(runguard, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = runguard.no_such_name


def test_dir_shows_the_public_names():
    assert set(dir(runguard)) == {*runguard.__all__, "__version__"}


def test_the_package_is_typed():
    assert (SOURCE / "py.typed").is_file()


# ---- what importing costs -------------------------------------------------------------------------------------------


def modules_after(statement: str) -> set[str]:
    """The modules that ``statement`` loads in a fresh interpreter."""
    script = f"import sys, json; before = set(sys.modules); exec({statement!r}); print(json.dumps(sorted(set(sys.modules) - before)))"
    return set(json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout))


def third_party(modules: set[str]) -> set[str]:
    return {top for name in modules if (top := name.split(".")[0]) not in sys.stdlib_module_names and top != "runguard"}


def test_importing_the_package_loads_nothing_else_and_little_at_that():
    loaded = modules_after("import runguard")
    assert third_party(loaded) == set()
    assert {name for name in loaded if name.startswith("runguard")} == {"runguard"}
    assert len(loaded) < 60


@pytest.mark.parametrize("name", ["Trip", "trip", "Finding", "Budget", "Threshold", "BudgetMonitor", "BreakerState", "RunStoppedError", "LoopDetectedError"])
def test_names_of_the_pure_part_load_no_third_party_module(name):
    assert third_party(modules_after(f"import runguard; runguard.{name}")) == set()


@pytest.mark.parametrize("statement", ["import runguard; runguard.Policy", "import runguard.conductor"])
def test_policy_and_guard_do_without_any_framework(statement):
    assert "google" not in third_party(modules_after(statement))


def test_without_adk_the_error_says_what_to_install():
    script = """
import sys
sys.modules["google"] = None
sys.modules["google.adk"] = None
import runguard
try:
    runguard.install
except ImportError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "runguard-agents[adk]" in said


# ---- who imports whom -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", sorted(PURE))
def test_pure_modules_import_the_standard_library_and_each_other(module):
    assert outside(module) == set()
    assert inside(module) <= PURE


@pytest.mark.parametrize("module", sorted(PURE))
def test_pure_modules_do_no_io_read_no_clock_and_await_nothing(module):
    tops = {name.split(".")[0] for name in imports(module)}
    assert tops & {"time", "asyncio", "os", "io", "pathlib", "socket", "subprocess", "logging", "random", "secrets", "queue"} == set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("open", "print", "input"), called
            assert called.rpartition(".")[2] not in ("now", "utcnow", "today", "fromtimestamp", "monotonic", "perf_counter"), called
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await)


@pytest.mark.parametrize(
    ("module", "packages", "rooms"),
    [
        ("runguard.log_lines", set(), {"runguard.printable"}),
        ("runguard.policy", {"pydantic"}, PURE | {"runguard.log_lines", "runguard.pricing", "runguard.ledger.urls", "runguard.alerts.settings"}),
        ("runguard.monitor", set(), PURE | {"runguard.log_lines", "runguard.reading.call_usage"}),
        ("runguard.pricing", set(), set()),
        ("runguard.reading", set(), set()),
        ("runguard.reading.call_usage", set(), {"runguard.pricing", *(f"runguard.reading.{room}" for room in ("fields", "sizes", "usage"))}),
        ("runguard.reading.usage", set(), {"runguard.pricing", "runguard.reading.fields"}),
        ("runguard.reading.sizes", set(), PURE | {"runguard.reading.fields"}),
        ("runguard.reading.fields", set(), set()),
        ("runguard.reading.failures", set(), PURE),
        ("runguard.pricing.rates", set(), set()),
        ("runguard.pricing.model_ids", set(), set()),
        ("runguard.pricing.given", {"pydantic"}, {"runguard.pricing.rates"}),
        ("runguard.pricing.price_list", {"genai_prices"}, {"runguard.model_limits", "runguard.pricing.model_ids", "runguard.pricing.rates"}),
        (
            "runguard.pricing.book",
            set(),
            PURE | {"runguard.model_limits"} | {f"runguard.pricing.{room}" for room in ("given", "model_ids", "price_list", "rates")},
        ),
        ("runguard.switch", set(), PURE),
        ("runguard.shared", set(), PURE | {"runguard.ledger", "runguard.ledger.control", "runguard.ledger.store"}),
        ("runguard.ledger.store", set(), PURE | {"runguard.log_lines"}),
        ("runguard.ledger.base", set(), PURE | {"runguard.ledger.store"}),
        ("runguard.ledger.packing", set(), set()),
        ("runguard.ledger.packed", set(), PURE | {"runguard.ledger.base", "runguard.ledger.packing"}),
        ("runguard.ledger.memory", set(), PURE | {"runguard.ledger.base", "runguard.ledger.packed", "runguard.ledger.store"}),
        ("runguard.ledger.sqlite", set(), PURE | {"runguard.ledger.identity", "runguard.ledger.store"}),
        ("runguard.ledger.redis", {"redis"}, PURE | {"runguard.ledger.identity", "runguard.ledger.store"}),
        ("runguard.ledger.postgres", {"psycopg"}, PURE | {"runguard.ledger.identity", "runguard.ledger.store"}),
        ("runguard.background", set(), {"runguard.log_lines"}),
        ("runguard.ledger.facts", set(), {"runguard.ledger.base", "runguard.ledger.store"}),
        ("runguard.ledger.faults", set(), PURE | {"runguard.ledger.store"}),
        ("runguard.ledger.identity", set(), {"runguard.ledger.store"}),
        ("runguard.ledger.control", set(), PURE | {"runguard.ledger.faults", "runguard.ledger.store", "runguard.switch"}),
        (
            "runguard.ledger.remote",
            set(),
            PURE | {"runguard.background"} | {f"runguard.ledger.{room}" for room in ("base", "control", "facts", "faults", "identity", "memory", "store")},
        ),
        ("runguard.charges", set(), PURE | {f"runguard.{room}" for room in ("policy", "pricing", "switch", "ledger")}),
        ("runguard.denials", set(), PURE | {"runguard.charges", "runguard.switch"}),
        ("runguard.accounts", set(), {"runguard.accounts.bill", "runguard.accounts.spending"}),
        ("runguard.accounts.history", set(), PURE | {"runguard.charges", "runguard.ledger.packing"}),
        ("runguard.accounts.spending", set(), PURE | {"runguard.accounts.history", "runguard.charges"}),
        ("runguard.accounts.expectations", set(), PURE | {f"runguard.{room}" for room in ("charges", "policy", "pricing")}),
        ("runguard.accounts.reached", set(), PURE | {"runguard.charges", "runguard.ledger"}),
        ("runguard.accounts.layers", set(), PURE | {"runguard.charges", "runguard.ledger"}),
        ("runguard.accounts.fitting", set(), PURE | {f"runguard.{room}" for room in ("charges", "ledger", "pricing")}),
        ("runguard.accounts.caps", set(), PURE | {"runguard.charges"}),
        (
            "runguard.accounts.finder",
            set(),
            PURE | {f"runguard.{room}" for room in ("accounts.caps", "accounts.layers", "charges", "ledger", "policy", "pricing")},
        ),
        (
            "runguard.accounts.reserving",
            set(),
            PURE
            | {f"runguard.accounts.{room}" for room in ("finder", "fitting", "layers", "reached")}
            | {f"runguard.{room}" for room in ("charges", "ledger", "policy", "pricing", "switch")},
        ),
        (
            "runguard.accounts.bill",
            set(),
            PURE
            | {f"runguard.accounts.{room}" for room in ("expectations", "finder", "layers", "reached", "reserving", "spending")}
            | {f"runguard.{room}" for room in ("charges", "ledger", "ledger.urls", "policy", "pricing", "switch")},
        ),
        ("runguard.runs", set(), PURE | {"runguard.policy", "runguard.charges", "runguard.inflight", "runguard.journal", "runguard.session_growth"}),
        ("runguard.inflight", set(), PURE),
        ("runguard.journal", set(), PURE | {"runguard.pricing"}),
        ("runguard.once", {"pydantic"}, PURE),
        ("runguard.tools", set(), PURE | {"runguard.once", "runguard.policy"}),
        ("runguard.trips", set(), PURE | {"runguard.policy", "runguard.runs"}),
        ("runguard.answers", set(), PURE | {"runguard.policy", "runguard.runs", "runguard.tools"}),
        ("runguard.faults", set(), set()),
        ("runguard.outbox", set(), {"runguard.background"}),
        ("runguard.telemetry", {"opentelemetry"}, PURE | {"runguard", "runguard.outbox"}),
        (
            "runguard.conductor",
            set(),
            PURE | {f"runguard.{room}" for room in (*_BELOW_THE_CONDUCTOR, "carried", "paused")},
        ),
    ],
)
def test_each_layer_imports_only_what_lies_below(module, packages, rooms):
    assert outside(module) <= packages
    assert inside(module) <= rooms


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_adapters_and_programs_know_a_framework(module):
    if not is_edge(module):
        assert "google" not in outside(module)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_nobody_below_imports_an_adapter_or_a_program(module):
    if not is_edge(module):
        assert {name for name in inside(module) if is_edge(name)} == set()


def test_the_package_itself_imports_nothing_of_its_own():
    assert inside("runguard") == set()
    assert outside("runguard") == set()


def test_the_graph_is_really_read():
    assert "runguard.events" in inside("runguard.conductor")
    assert "runguard.detectors.repetition" in inside("runguard.detectors")
    assert "pydantic" in outside("runguard.policy")
    assert "google" in outside("runguard.adk.plugin")
