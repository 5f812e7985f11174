"""Break the source in small ways and count how many of the breaks the tests notice.

    make mutants                     100 mutants, the same ones each time
    make mutants MUTANTS=300 SEED=7  more, and others

The tests run once under coverage, which records the lines that each of them reaches, and how long each takes. Then each
mutant, a copy of the source with one operator, number or statement changed, is given to tests that reach its line, the
most specific ones first, as many as fit into a minute. A mutant that no test reaches is counted apart: `make coverage`
looks for those.

Some changes no test can or should notice, and they are not made: of what is logged or said in an error, of the numbers
at the top of a module (how much is kept, how often something is looked at), and of one in a number above twenty.
"""

import argparse
import ast
import io
import keyword
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("core", "engine", "ledger", "calls", "pricing", "providers", "policy", "termination")
SECONDS_OF_TESTS: Final = 60.0  # for each mutant
SECONDS_PER_MUTANT: Final = 240
GOAL: Final = 0.9
_SMALL: Final = 20
_REPORT: Final = "report.xml"
OTHER: Final = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in", "not": "", "and": "or", "or": "and",
    "+": "-", "-": "+", "*": "//", "//": "*",
    "True": "False", "False": "True", "continue": "break", "break": "continue",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the text between two offsets is replaced."""

    path: Path
    line: int
    begin: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        return source[: self.begin] + self.text + source[self.end :]

    def describe(self, source: str) -> str:
        line = source.splitlines()[self.line - 1].strip()
        return f"{self.path}:{self.line}: {source[self.begin : self.end]!r} -> {self.text!r} in: {line}"


def mutants_of(path: Path, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a file, except in signatures, docstrings, log lines, errors and ``if TYPE_CHECKING``."""
    skipped = _skipped_lines(ast.parse(source))
    starts = [0, *(index + 1 for index, char in enumerate(source) if char == "\n")]
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    loops = {token.start[0] for token in tokens if token.string == "for"}  # the ``in`` of a loop compares nothing
    for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        row = token.start[0]
        if row in skipped or row != after.start[0] or (token.string == "in" and row in loops):
            continue
        old = f"{token.string} {after.string}" if token.string in ("is", "not") else token.string
        old = old if old in OTHER else token.string
        if token.type == tokenize.NUMBER and old.isdigit() and int(old) <= _SMALL:
            new = str(int(old) + 1)
        elif old not in OTHER or before.string in ("is", "not") or (old in "*-+" and not _ends_value(before)):
            continue
        else:
            new = OTHER[old]
        begin = starts[row - 1] + token.start[1]
        yield Mutant(path, row, begin, begin + len(old), new)


def _ends_value(token: tokenize.TokenInfo) -> bool:
    """Return whether an operator after this token has a value on its left, so that it is no sign and no star."""
    return (
        token.type == tokenize.NUMBER
        or token.string in (")", "]")
        or (token.string.isidentifier() and (not keyword.iskeyword(token.string)))
    )


def _skipped_lines(tree: ast.Module) -> set[int]:
    skipped = {
        line
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Constant | ast.BinOp | ast.UnaryOp)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    for node in ast.walk(tree):
        begin, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            skipped.update(range(begin, node.body[0].lineno))
        elif (
            isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.Assert)
            or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            or (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("_log."))
            or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        ):
            skipped.update(range(begin, end + 1))
    return skipped


# ---- Which tests reach a line


def record(data: Path, tests: list[str]) -> None:
    """Run the tests under coverage and keep, for each line, the names of the tests that reach it, and their times."""
    data.parent.mkdir(parents=True, exist_ok=True)
    for old in data.parent.iterdir():
        old.unlink()
    settings = data.with_name("settings.ini")
    sources = "\n    ".join(str(ROOT / "src/runguard" / name) for name in PACKAGES)
    settings.write_text(
        f"[run]\nparallel = true\npatch = subprocess\ndata_file = {data}\ndynamic_context = test_function\n"
        f"source =\n    {sources}\n"
    )
    python = [sys.executable, "-m"]
    told = ["-q", "--timeout", "300", "-n", "4", f"--junitxml={data.with_name(_REPORT)}"]
    run = [*python, "coverage", "run", f"--rcfile={settings}", "-m", "pytest", *told, *tests]
    subprocess.run(run, cwd=ROOT, check=False)
    subprocess.run([*python, "coverage", "combine", "-q", f"--rcfile={settings}"], cwd=ROOT, check=True)


def tests_by_line(data: Path) -> dict[tuple[str, int], list[str]]:
    """Return the tests that reach each line, as pytest takes them."""
    from coverage.numbits import numbits_to_nums  # here: the tests of this script run without coverage, too

    names: dict[tuple[str, int], list[str]] = {}
    with sqlite3.connect(data) as connection:
        rows = connection.execute(
            "SELECT file.path, context.context, line_bits.numbits FROM line_bits JOIN file ON file.id = file_id "
            "JOIN context ON context.id = context_id WHERE context.context != ''"
        )
        for path, context, numbits in rows:
            module, _, test = context.rpartition(".")
            name = f"{module.replace('.', '/')}.py::{test}"
            if (ROOT / name.split("::")[0]).exists():
                for line in numbits_to_nums(numbits):
                    names.setdefault((path, line), []).append(name)
    return names


def seconds_by_test(report: Path) -> dict[str, float]:
    """Return how long each test took, with all its cases."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '').partition('[')[0]}"
        seconds[name] += float(case.get("time", 0))
    return seconds


# ---- One mutant


def is_killed(mutant: Mutant, tests: list[str], tree: Path) -> bool:
    """Run tests on a copy of the source with the change. Return whether one of them failed or went on for too long."""
    place = tree / mutant.path.relative_to(ROOT)
    place.write_text(mutant.apply(place.read_text()))
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "60", *tests]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=SECONDS_PER_MUTANT)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode not in (0, 5)


def chosen(tests: list[str], package: str, breadth: Counter[str], seconds: Mapping[str, float]) -> list[str]:
    """Return the tests that say most about a line: those of its package first, and those that reach few lines first."""
    found: list[str] = []
    left = SECONDS_OF_TESTS
    for name in sorted(set(tests), key=lambda name: (not name.startswith(f"tests/{package}/"), breadth[name], name)):
        if not found or seconds.get(name, 0.0) < left:
            found.append(name)
            left -= seconds.get(name, 0.0)
    return found


def outcome_of(mutant: Mutant, tests: list[str]) -> str:
    """Return what became of a mutant: "killed", "survived", or "unreached"."""
    if not tests:
        return "unreached"
    with tempfile.TemporaryDirectory(prefix="runguard-mutant-") as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src")  # with what Python has compiled
        if is_killed(mutant, tests, Path(folder)):
            return "killed"
    print(f"survived: {mutant.describe(mutant.path.read_text()).removeprefix(f'{ROOT}/')}", flush=True)
    return "survived"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--known", action="store_true", help="use the lines recorded last time")
    parser.add_argument("tests", nargs="*", default=[f"tests/{name}" for name in PACKAGES])
    asked = parser.parse_args()
    data = ROOT / "build/mutants/lines"
    if not (asked.known and data.exists()):
        record(data, asked.tests)
    reached, dice = tests_by_line(data), random.Random(asked.seed)
    breadth = Counter(name for names in reached.values() for name in set(names))
    files = [path for name in PACKAGES for path in sorted((ROOT / "src/runguard" / name).rglob("*.py"))]
    every = [mutant for path in files for mutant in mutants_of(path, path.read_text())]
    seconds = seconds_by_test(data.with_name(_REPORT))
    sampled = dice.sample(every, min(asked.number, len(every)))

    def play(mutant: Mutant) -> str:
        package = mutant.path.relative_to(ROOT / "src/runguard").parts[0]
        return outcome_of(mutant, chosen(reached.get((str(mutant.path), mutant.line), []), package, breadth, seconds))

    with ThreadPoolExecutor(asked.workers) as pool:
        found = Counter(pool.map(play, sampled))
    share = found["killed"] / max(found["killed"] + found["survived"], 1)
    print(
        f"{found['killed']} of {found['killed'] + found['survived']} mutants killed ({share:.0%}), "
        f"{found['unreached']} not reached by these tests"
    )
    return 0 if share >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
