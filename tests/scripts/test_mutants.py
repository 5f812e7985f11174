"""A mutant changes one place of a file that decides something, and the file still compiles."""

from collections import Counter
from pathlib import Path

from tests.kit.scripts import script

mutants = script("mutants")

SOURCE = '''"""A text with 1 < 2 and not this."""
import logging

_log = logging.getLogger("1")
_KEPT = 3 * 4


def spare(spent: int, limit: int = 3) -> int | None:
    """Return 5."""
    _log.info("left %d", limit - 1)
    if spent is not None and not spent >= limit and spent < 1_000:
        return limit - spent * -2
    for one in (True,):
        if one not in (False,):
            break
    raise ValueError(1 + 1)
'''


def test_each_mutant_changes_one_deciding_place_and_compiles() -> None:
    """No mutant lies in a docstring, a signature, a log line, an error or a constant of the module. Signs, large
    numbers and the ``in`` of loops stay.
    """
    found = list(mutants.mutants_of(Path("spare.py"), SOURCE))
    changes = [(one.line, SOURCE[one.begin : one.end], one.text) for one in found]
    assert changes == [
        (11, "is not", "is"),
        (11, "and", "or"),
        (11, "not", ""),
        (11, ">=", ">"),
        (11, "and", "or"),
        (11, "<", "<="),
        (12, "-", "+"),
        (12, "*", "//"),
        (12, "2", "3"),
        (13, "True", "False"),
        (14, "not in", "in"),
        (14, "False", "True"),
        (15, "break", "continue"),
    ]
    for one in found:
        compile(one.apply(SOURCE), "spare.py", "exec")


def test_a_mutant_is_given_to_as_many_tests_as_fit_into_a_minute() -> None:
    tests = [
        f"tests/{package}/test_x.py::test_{name}" for package in ("core", "adk") for name in ("broad", "slow", "own")
    ]
    breadth = Counter({name: len(name) + 100 * ("broad" in name) for name in tests})
    chosen = mutants.chosen(
        [*tests, *tests], "core", breadth, {name: 50.0 if "slow" in name else 1.0 for name in tests}
    )
    assert [name.partition("/")[2] for name in chosen] == [
        "core/test_x.py::test_own",
        "core/test_x.py::test_slow",
        "core/test_x.py::test_broad",
        "adk/test_x.py::test_own",
        "adk/test_x.py::test_broad",
    ]
    slow = [name for name in tests if "slow" in name]
    assert mutants.chosen(slow, "core", breadth, dict.fromkeys(slow, 500.0)) == slow[:1], "one in any case"
