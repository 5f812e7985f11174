"""What ``import runguard`` costs a fresh process: CPU milliseconds above a bare interpreter, and the modules it loads.

python benchmarks/imports.py [--json]
"""

import argparse
import json
import resource
import subprocess
import sys
from statistics import median

RUNS = 9
TARGET_MS = 60
STATEMENTS = {
    "bare interpreter": "pass",
    "import runguard": "import runguard",
    "runguard.Policy": "import runguard; runguard.Policy",  # the first name that needs pydantic
}
LOADED = "import sys; before = set(sys.modules); import runguard; print(*sorted(set(sys.modules) - before))"


def cpu_ms(statement: str) -> float:
    """User and system time of one fresh process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="machine-readable")
    options = parser.parse_args()
    spent: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for number in range(RUNS + 1):
        for name, statement in STATEMENTS.items():
            taken = cpu_ms(statement)
            if number:  # the first round fills the disk cache
                spent[name].append(taken)
    medians = {name: median(values) for name, values in spent.items()}
    modules = subprocess.run([sys.executable, "-c", LOADED], check=True, capture_output=True, text=True).stdout.split()
    if options.json:
        print(json.dumps({"cpu_ms": medians, "modules": modules, "target_ms": TARGET_MS}, indent=1))
        return
    bare = medians["bare interpreter"]
    print(
        f"CPU milliseconds of a fresh process (median of {RUNS})\n| statement | total | above a bare "
        "interpreter |\n|---|---|---|"
    )
    for name, taken in medians.items():
        print(f"| {name} | {taken:.1f} | {taken - bare:.1f} |")
    added = medians["import runguard"] - bare
    print(f"\nimport runguard: {added:.1f} ms, target <= {TARGET_MS}{'' if added <= TARGET_MS else ' (over)'}")
    print(f"It loads {len(modules)} modules: {', '.join(modules)}")


if __name__ == "__main__":
    main()
