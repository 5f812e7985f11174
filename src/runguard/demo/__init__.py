"""``runguard demo``: four runaways and six healthy look-alikes on real ADK, each run without and with the guard.

``stories`` holds the agents, ``play`` runs and measures them, ``show`` puts the result on a screen. Loading this package loads
nothing of Google's; the work begins with ``run``.
"""

import warnings
from types import ModuleType


class AdkMissingError(Exception):
    """google-adk is not there, or too old; the message says what to do."""


def run(*, as_json: bool = False) -> int:
    """Play everything and show it; the exit code: 0 when every runaway was stopped and no healthy run was touched, else 1."""
    from runguard.demo.show import show, show_json

    return show_json() if as_json else show()


def load() -> ModuleType:
    """The module that plays; it takes ADK along."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from runguard.demo import play
    except ImportError as error:
        name = error.name or ""
        if name.split(".")[0] != "google":
            raise
        reason = "which is not installed" if name in ("google", "google.adk") else f"the installed one lacks {name}"
        raise AdkMissingError(f"runguard demo needs google-adk 2.3 or newer, {reason}: pip install -U 'runguard-agents[adk]'") from None
    return play
