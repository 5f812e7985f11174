"""``runguard demo``: four runaways and six healthy look-alikes on real ADK, each run without and with the guard.

``stories`` holds the agents, ``play`` runs and measures them, ``show`` puts the result on a screen. ``seed_table`` and
``seed_screen`` do the same for the table of the seed. Loading this package loads nothing of Google's; the work begins
with ``run``.
"""

import json
import sys
import warnings
from importlib import import_module
from types import ModuleType


class AdkMissingError(Exception):
    """google-adk is missing or too old; the message says what to do."""


def run(*, as_json: bool = False, seed_table: bool = False) -> int:
    """Run the demo, or the seed's table, and print it.

    Returns the exit code: 0 if everything ended as expected, otherwise 1.
    """
    if as_json:
        play = load("seed_table" if seed_table else "play")
        result = play.play_table() if seed_table else play.play(play.new_report())
        sys.stdout.write(json.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n")
        return 0 if result.ok else 1
    from runguard.demo import seed_screen, show

    return seed_screen.show() if seed_table else show.show()


def load(name: str = "play") -> ModuleType:
    """Import the module that runs the demo; it imports ADK."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module(f"runguard.demo.{name}")
    except ImportError as error:
        name = error.name or ""
        if name.split(".")[0] != "google":
            raise
        reason = "which is not installed" if name in ("google", "google.adk") else f"the installed one lacks {name}"
        raise AdkMissingError(
            f"runguard demo needs google-adk 2.3 or newer, {reason}: pip install -U 'runguard-agents[adk]'"
        ) from None
