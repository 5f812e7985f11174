"""``runguard demo``: four runaways and six healthy look-alikes on real ADK, each run without and with the guard.

``stories`` holds the agents, ``play`` runs and measures them, ``show`` puts the result on a screen. Loading this package loads
nothing of Google's; the work begins with ``run``.
"""


def run(*, as_json: bool = False) -> int:
    """Play everything and show it; the exit code: 0 when every runaway was stopped and no healthy run was touched."""
    from runguard.demo.show import show, show_json

    return show_json() if as_json else show()
