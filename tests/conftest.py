"""How the suite is shared out between processes, which tests may run twice, and what every test leaves closed."""

import functools
import gc
import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock
from zlib import crc32

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from tests.kit.driver import Driver
    from tests.kit.processes import Process
    from tests.kit.snippets import Snippets
    from tests.kit.stores import Place, Servers

# A slow machine is not a failure.
settings.register_profile(
    "untimed", deadline=None, max_examples=100 if os.environ.get("RUNGUARD_FAULTS") == "long" else 30
)
settings.load_profile("untimed")

# Tests with the same expensive setup run in one process. The key is how the test's id begins. The first ones look at
# all objects of their process, of which there are few at its beginning.
TOGETHER = {
    "tests/faults/test_soak": "soak",
    "tests/faults/test_internal_faults.py": "internal faults",
    "tests/cli/dashboard/test_browser.py": "browser",
    "tests/cli/dashboard/test_command.py::test_every_answer": "dashboard",
    "tests/adk/test_own_processes.py": "fresh processes",
    "tests/adk/test_remote_agents.py::test_a_far_side_that_is_killed": "fresh processes",
    "tests/adk/test_remote_agents.py::test_the_first_remote_agent": "fresh processes",
    "tests/benchmarks/test_seed_table.py": "seed table",
    "tests/docs_site/test_site.py": "site",
    "tests/docs_site/test_catalogue.py": "docs",
    "tests/ledger/identity/test_identity_rollback.py": "identity",
    "tests/ledger/test_postgres.py": "postgres",
    "tests/replay/test_page.py": "page",
    "tests/replay/test_postgres.py": "postgres",
    "tests/replay/test_redis_source.py": "redis",
    "tests/replay/test_same_as_live.py": "same as live",  # its last test looks at what the others met
    "tests/test_architecture.py": "sources",
    "tests/test_docs.py::test_snippet_runs": "docs",
    "tests/providers/test_prompts.py": "litellm",
    "tests/providers/test_usage_of_providers.py": "litellm",
    "tests/wire/test_entered_streams": "litellm",
    "tests/wire/test_model_classes.py": "litellm",
    "tests/wire/test_refused_connections.py": "litellm",
    "tests/wire/test_seed_example.py": "litellm",
}


# So many cases of one test run; ``make faults`` runs all of them. The key is how the test's id begins, and the first
# one that fits counts. Fewer of those that play the same on many topologies, stores or clients, and all where each
# case is something else: a page, a file, a function that is broken. None of a few slow ones that test our own tools.
MOST_CASES = {
    "tests/frameworks/test_framework_examples.py::test_benchmark_measures_every_framework": 0,
    "tests/scripts/test_api_breaks.py::test_the_adapters_of_other_frameworks_are_compared_too": 0,
    "tests/scripts/test_own_tests.py::test_what_the_guard_breaks_is_found": 0,
    **dict.fromkeys(("tests/docs_site/", "tests/faults/", "tests/fuzz/", "tests/golden/"), 1_000),
    **dict.fromkeys(("tests/test_docs.py", "tests/frameworks/test_pages.py"), 1_000),
    **dict.fromkeys(("tests/calls/", "tests/core/", "tests/policy/", "tests/pricing/", "tests/termination/"), 1_000),
    "tests/adk/install/test_adk_cli.py": 1,
    "tests/adk/": 3,
    "tests/examples/": 1,
    "tests/gateway/": 3,
    "tests/ledger/identity/": 2,
    "tests/ledger/shared/": 2,
    "tests/ledger/": 3,
    "tests/replay/test_same_": 8,
    "tests/wire/": 4,
    "": 6,
}
# Each scenario of the conformance kit runs in one of the ways to start an agent.
SCENARIO = "::test_scenario["


# Why a failed test may run once more, by how its id begins. A busy machine can make a real server or process late.
RETRIES = {
    "tests/ledger/": "real stores, servers and processes answer here",
    "tests/faults/": "real servers and processes are stopped here, and real time passes",
    "tests/wire/": "a real server answers here",
    "tests/cli/dashboard/test_browser.py": "a real browser and a real server answer here",
    "tests/monitoring/": "a real server and real time",
}


# Functions of ADK that remember the tools they were called with, by module. Not every release has all of them.
KEPT_BY_ADK = {
    "google.adk.tools.function_tool": "_build_declaration_cached",
    "google.adk.utils._callable_utils": "_get_type_hints_for_unwrapped",
    "google.adk.utils.context_utils": "find_context_parameter",
    "google.adk.workflow._function_node": "_get_type_hints_for_unwrapped",
}


FILES_PER_FREEZE = 15
_files_done = count(1)


class Together(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Each test goes to the next free process, except those of ``TOGETHER``, which begin first: they take longest.

    Half of the processes begin with the first test and half with the last one. So the tests of stores, which wait much,
    run beside those of agents, which compute much.
    """

    @functools.cached_property
    def _indexes(self) -> dict[str, int]:
        return {nodeid: index for index, nodeid in enumerate(self.collection)}

    _groups = tuple(dict.fromkeys(TOGETHER.values()))

    def _assign_work_unit(self, node: Any) -> None:
        if (group := next((group for group in self._groups if group in self.workqueue), None)) is not None:
            scope, unit = group, self.workqueue.pop(group)
        else:
            scope, unit = self.workqueue.popitem(last=self.nodes.index(node) % 2 == 1)
        self.assigned_work[node][scope] = unit
        node.send_runtest_some([self._indexes[nodeid] for nodeid, is_done in unit.items() if not is_done])

    def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
        """Forgets what is done: xdist counts all that a process ever did, after every test."""
        for scope in [scope for scope, unit in workload.items() if all(unit.values())]:
            del workload[scope]
        return sum(not is_done for unit in workload.values() for is_done in unit.values())

    def _split_scope(self, nodeid: str) -> str:
        return next((group for start, group in TOGETHER.items() if nodeid.startswith(start)), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    return Together(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that ``MOST_CASES`` leaves to ``make faults``, unless a case is asked for by its name.

    A failed test runs once more only if ``RETRIES`` or its mark ``retries`` says why; else the failure is final.
    """
    if os.environ.get("RUNGUARD_FAULTS") != "long" and not any("[" in name for name in config.args):
        items[:] = sampled(items)
    for item in items:
        if (why := next((why for start, why in RETRIES.items() if item.nodeid.startswith(start)), None)) is not None:
            item.add_marker(pytest.mark.retries(why))
        if item.get_closest_marker("flaky") is not None:
            raise pytest.UsageError(f"{item.nodeid}: use the marker retries(why) instead of flaky")
        if (mark := item.get_closest_marker("retries")) is not None:
            if not (mark.args and isinstance(mark.args[0], str)):
                raise pytest.UsageError(f'{item.nodeid}: say why: @pytest.mark.retries("…")')
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=1))


def sampled(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests with at most ``MOST_CASES`` of each: always the same ones."""
    cases: dict[str, list[str]] = {}
    for item in items:
        cases.setdefault(_test_of(item.nodeid), []).append(item.nodeid)
    kept = {
        nodeid
        for test, nodeids in cases.items()
        for nodeid in sorted(nodeids, key=lambda nodeid: crc32(nodeid.encode()))[: _most(test)]
    }
    return [item for item in items if item.nodeid in kept]


def _test_of(nodeid: str) -> str:
    return nodeid.rpartition("-")[0] if SCENARIO in nodeid else nodeid.partition("[")[0]


def _most(test: str) -> int:
    return 1 if SCENARIO in test else next(most for start, most in MOST_CASES.items() if test.startswith(start))


def pytest_collection_finish() -> None:
    """What is imported stays, so the garbage collector need not walk all of ADK in each of its rounds. Its rounds are
    rare, because most of what a test makes is gone without them. What a test has just made is still in the young
    generations, which ``gc.collect(1)`` walks in no time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """ADK keeps the tools that it has looked at, and with them all that they refer to: after the tests of the demo,
    400,000 objects that each full collection of garbage walks. What a test process keeps all the same is left out of
    later collections, of which tests make many.
    """
    if nextitem is not None and nextitem.path == item.path:
        return
    for module, name in KEPT_BY_ADK.items():
        if (clear := getattr(getattr(sys.modules.get(module), name, None), "cache_clear", None)) is not None:
            clear()
    if next(_files_done) % FILES_PER_FREEZE == 0:
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    retried = sorted({report.nodeid for report in terminalreporter.stats.get("rerun", ())})
    terminalreporter.write_line(f"retried: {len(retried)}")
    for nodeid in retried:
        terminalreporter.write_line(f"  {nodeid}")


@pytest.fixture(autouse=True)
def _no_ledger_stays_open() -> Iterator[None]:
    """Close the ledgers that a test opened: each has five threads and as many connections. Those of a session-wide
    fixture stay open.
    """
    yield
    remote = sys.modules.get("runguard.ledger.remote")
    for ledger in list(remote._ledgers) if remote is not None else ():
        if not getattr(ledger, "stays_open", False):
            ledger.close()


@pytest.fixture(scope="session", autouse=True)
def _project_file_is_parsed_once() -> Iterator[None]:
    """Every guard looks for its policy in the pyproject.toml above the working directory: here, in that of RunGuard
    itself. To parse it takes longer than most tests.
    """
    file, loads = Path(__file__).parents[1] / "pyproject.toml", tomllib.loads
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    parsed = loads(text)
    with mock.patch("tomllib.loads", lambda asked, **options: parsed if asked == text else loads(asked, **options)):
        yield


@pytest.fixture(scope="session", autouse=True)
def _busy_machine_is_no_outage() -> Iterator[None]:
    """Where a guard leaves ``store_timeout`` at one second, its store gets ten: beside other tests, a healthy store may
    take longer than a second.
    """
    from runguard.engine import money as accounts

    opened = accounts.open_ledger  # type: ignore[attr-defined]  # where it is used

    def patient(url: str, timeout: float, *rest: float) -> Any:
        return opened(url, 10.0 if timeout == 1.0 else timeout, *rest)

    with mock.patch.object(accounts, "open_ledger", patient):
        yield


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees a policy or a store of the environment."""
    for name in [
        name for name in os.environ if name.startswith("RUNGUARD_") and not name.startswith("RUNGUARD_FAULTS")
    ]:
        monkeypatch.delenv(name)


# ---- what several directories use; the imports are here because not every test needs ADK or a store -----------------


@pytest.fixture(scope="session")
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For clients of servers that speak no TLS: to read all certificates takes most of the time of making a client."""
    import certifi

    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")
    path = tmp_path_factory.mktemp("certificate") / "one.pem"
    path.write_text(first + end)
    return path


@pytest.fixture
def drive() -> "type[Driver]":
    """``drive(**policy)`` gives a driver with one started run named "run"."""
    from tests.kit.driver import Driver

    return Driver


@pytest.fixture(scope="session")
def servers() -> "Iterator[Servers]":
    """The servers of this test process."""
    from tests.kit.stores import Servers

    started = Servers()
    yield started
    started.stop()


@pytest.fixture(params=["sqlite", "redis", "postgres"])
def place(request: pytest.FixtureRequest, servers: "Servers", tmp_path: Path) -> "Place":
    """An empty store of every kind."""
    from tests.kit.stores import new_place

    return new_place(request.param, servers, tmp_path)


@pytest.fixture(scope="session")
def snippet_server() -> "Iterator[Snippets]":
    """A process that has ADK imported and runs the snippets of pages."""
    from tests.kit.snippets import Snippets

    server = Snippets()
    yield server
    server.close()


@pytest.fixture(scope="session")
def mother(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a process that has ADK imported and forks workers."""
    from tests.kit.processes import mother_process

    door = str(tmp_path_factory.mktemp("door") / "s")
    with mother_process(door):
        yield door


@pytest.fixture
def process(mother: str) -> "Iterator[Callable[[], Process]]":
    """Starts workers in processes of their own, and kills them with the test."""
    from tests.kit.processes import Process

    made: list[Process] = []

    def make() -> Process:
        made.append(Process(mother))
        return made[-1]

    yield make
    for one in made:
        one.kill()
