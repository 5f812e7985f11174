"""What starting a guard imports. How long it takes is measured by ``benchmarks/startup.py``."""

import subprocess
import sys

SCRIPT = """
import sys
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.runners import Runner
before = set(sys.modules)
from runguard.adk import RunGuardPlugin
RunGuardPlugin(max_usd=1)
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
print(*sorted(name for name in set(sys.modules) - before if name.startswith("google.adk.workflow")))
"""
HEAVY = {
    "click",
    "cryptography",
    "fastapi",
    "genai_prices",
    "httpx",
    "psycopg",
    "redis",
    "requests",
    "rich",
    "sqlite3",
    "starlette",
}


def test_a_guard_imports_nothing_heavy_beside_adk() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    packages, workflow = done.stdout.split("\n")[:2]
    assert not HEAVY & set(packages.split())
    assert workflow == "", "ADK's workflow code loads its web server"
