"""Runs the fuzzers: ``python -m tests.fuzz.play [TARGET] [--seconds N] [--inputs N] [--seed N]``.

Where atheris is installed, coverage guides the search (``make fuzz`` installs it). Without it the inputs are random,
and the same seed gives the same inputs. An input that fails is made smaller, printed, and kept in ``tests/fuzz/found``:
``make test`` checks every file there.
"""

import argparse
import faulthandler
import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from time import monotonic
from types import FrameType
from typing import Any, Final

import runguard

NAMES: Final = ("fingerprints", "outcomes", "readers", "sources")
FOUND: Final = Path(__file__).parent / "found"
_OURS: Final = str(Path(runguard.__file__).parent)
_HANGS_S: Final = 120  # an input that takes this long is reported as a crash
_MOST_CHARS: Final = 20_000  # of one input as JSON


def inputs(target: Any, seed: int) -> Iterator[Any]:
    """Yield made-up forms without end."""
    from .values import Mutator

    random = Random(seed)
    mutator = Mutator(random, target.names)
    while True:
        begin = random.choice(target.begin)
        yield mutator.make() if random.random() < 0.1 else mutator.change(begin, random.randrange(9))


def steps_of(check: Callable[[Any], None], form: Any) -> int:
    """Run a check; return how many lines of RunGuard it took. Unlike time, this is the same on every machine."""
    count = 0

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: FrameType, event: str, arg: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(_OURS) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        check(form)
    finally:
        sys.settrace(before)
    return count


def keep(name: str, form: Any, error: BaseException) -> Path:
    """Make a failing input smaller, print it and keep it."""
    from .targets import TARGETS, as_text
    from .values import shrink

    def fails(smaller: Any) -> bool:
        try:
            TARGETS[name].check(smaller)
        except Exception as other:
            return type(other) is type(error)
        return False

    text = as_text(shrink(form, fails))
    path = FOUND / name / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    print(f"\n{name}: {type(error).__name__}: {error}\n{text[:4_000]}\nkept in {path}", flush=True)
    return path


def play(name: str, seed: int, seconds: float, most: int, *, watched: bool = False) -> int:
    """Random inputs for so many seconds or so many inputs; return how many there were.

    ``watched``: an input that hangs ends the process.
    """
    from .targets import TARGETS

    target, until = TARGETS[name], monotonic() + seconds
    for done, form in enumerate(inputs(target, seed)):
        if done >= most or monotonic() > until:
            return done
        if watched:
            faulthandler.dump_traceback_later(_HANGS_S, exit=True)
        try:
            target.check(form)
        except Exception as error:
            keep(name, form, error)
            raise
    raise AssertionError("inputs do not end")


def guided(name: str, seed: int, seconds: float, most: int) -> None:
    """The same with coverage as guide. Ends the process: with 0, or with the exit code of libFuzzer after a crash."""
    import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]

    with atheris.instrument_imports(
        include=["runguard.core", "runguard.providers", "runguard.replay", "runguard.reporting"]
    ):
        from .targets import TARGETS
    from .values import Mutator

    target = TARGETS[name]

    def one(data: bytes) -> None:
        try:
            form = json.loads(data)
        except (ValueError, RecursionError):
            return
        try:
            target.check(form)
        except Exception as error:
            keep(name, form, error)
            raise

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        mutator = Mutator(Random(seed), target.names)
        try:
            form = mutator.change(json.loads(data), 1 + seed % 4)
        except (ValueError, RecursionError):
            form = mutator.make()
        text = json.dumps(form).encode()
        return text if len(text) <= max_size else b"{}"

    corpus = Path(tempfile.mkdtemp(prefix=f"runguard-fuzz-{name}-"))
    for number, form in enumerate(target.begin):
        (corpus / f"begin-{number}").write_text(json.dumps(form))
    options = [
        f"-max_total_time={int(seconds)}",
        f"-seed={seed + 1}",
        f"-timeout={_HANGS_S}",
        f"-max_len={_MOST_CHARS}",
    ]
    options += [f"-runs={most}", "-verbosity=1", "-print_final_stats=1", "-rss_limit_mb=4096"]
    options += [f"-artifact_prefix={corpus}/crash-", str(corpus)]
    atheris.Setup([sys.argv[0], *options], one, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz fingerprints, outcomes, readers and sources.")
    parser.add_argument("target", nargs="?", choices=NAMES)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all targets together, or for the named one")
    parser.add_argument("--inputs", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random", action="store_true", help="without the guide, even if atheris is installed")
    asked = parser.parse_args()
    if asked.target is None:
        share = asked.seconds / len(NAMES)
        options = ["--seconds", str(share), "--inputs", str(asked.inputs), "--seed", str(asked.seed)]
        options += ["--random"] if asked.random else []
        codes = [
            subprocess.run([sys.executable, "-m", "tests.fuzz.play", name, *options], check=False).returncode
            for name in NAMES
        ]
        return int(any(codes))
    if not asked.random and importlib.util.find_spec("atheris") is not None:
        guided(asked.target, asked.seed, asked.seconds, asked.inputs)
    done = play(asked.target, asked.seed, asked.seconds, asked.inputs, watched=True)
    print(f"{asked.target}: {done:,} random inputs from seed {asked.seed}, no failure")
    return 0


if __name__ == "__main__":
    sys.exit(main())
