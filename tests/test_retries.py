"""Only a test that says why may run twice, and the run prints which did."""

import shutil
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

seen = []

{mark}
def test_fails_the_first_time():
    seen.append(1)
    assert len(seen) > 1
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    """An empty project with the conftest of this one."""
    shutil.copy(Path(__file__).parent / "conftest.py", pytester.path / "conftest.py")
    pytester.makeini(
        "[pytest]\nasyncio_default_fixture_loop_scope = function\naddopts = --strict-markers\n"
        "markers =\n    retries(why): x\n    flaky: x\n"
    )
    return pytester


def test_a_failure_is_final_unless_the_test_says_why_it_may_run_twice(suite: pytest.Pytester) -> None:
    suite.makepyfile(TESTS.format(mark=""))
    result = suite.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["retried: 0"])


def test_a_marked_test_runs_twice_and_the_run_names_it(suite: pytest.Pytester) -> None:
    suite.makepyfile(TESTS.format(mark='@pytest.mark.retries("a real server may be slow")'))
    result = suite.runpytest_inprocess()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["retried: 1", "  *::test_fails_the_first_time"])


def test_a_directory_of_real_servers_may_run_twice(suite: pytest.Pytester) -> None:
    (suite.mkdir("tests") / "ledger").mkdir()
    (suite.path / "tests/ledger/test_store.py").write_text(TESTS.format(mark=""), encoding="utf-8")
    result = suite.runpytest_inprocess()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["retried: 1", "  tests/ledger/*::test_fails_the_first_time"])


@pytest.mark.parametrize("mark", ["@pytest.mark.retries", "@pytest.mark.retries()", "@pytest.mark.flaky(reruns=3)"])
def test_a_retry_without_a_reason_is_an_error(suite: pytest.Pytester, mark: str) -> None:
    suite.makepyfile(TESTS.format(mark=mark))
    assert suite.runpytest_inprocess().ret == pytest.ExitCode.USAGE_ERROR
