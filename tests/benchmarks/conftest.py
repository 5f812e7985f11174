"""The benchmarks are scripts beside each other: their folder is where they find each other."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
