"""A mutant changes one place of a file that decides something, and the file still compiles."""

from pathlib import Path

from tests.kit.scripts import script

mutants = script("mutants")

SOURCE = '''"""A text with 1 < 2 and not this."""
import logging

_log = logging.getLogger("1")


def spare(spent: int, limit: int = 3) -> int | None:
    """Return 5."""
    _log.info("left %d", limit - 1)
    if spent is not None and not spent >= limit:
        return limit - spent * -2
    for one in (True,):
        if one not in (False,):
            break
    raise ValueError(1 + 1)
'''


def test_each_mutant_changes_one_deciding_place_and_compiles() -> None:
    """No mutant lies in a docstring, a signature, a log line or an error; signs and the ``in`` of loops stay."""
    found = list(mutants.mutants_of(Path("spare.py"), SOURCE))
    changes = [(one.line, SOURCE[one.begin : one.end], one.text) for one in found]
    assert changes == [
        (10, "is not", "is"),
        (10, "and", "or"),
        (10, "not", ""),
        (10, ">=", ">"),
        (11, "-", "+"),
        (11, "*", "//"),
        (11, "2", "3"),
        (12, "True", "False"),
        (13, "not in", "in"),
        (13, "False", "True"),
        (14, "break", "continue"),
    ]
    for one in found:
        compile(one.apply(SOURCE), "spare.py", "exec")
