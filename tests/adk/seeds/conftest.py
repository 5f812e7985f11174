"""The samples of the seeds run guarded: a fixture that installs RunGuard and reports every decision
that touched a run.
"""

import pytest

import runguard
from runguard.core.decision import Action, Decision


@pytest.fixture
def interventions() -> list[Decision]:
    """RunGuard is installed with its defaults.

    The list fills with everything that changed a run; a healthy sample leaves it empty.
    """
    found: list[Decision] = []
    runguard.install(on_decision=lambda decision: found.append(decision) if decision.action >= Action.NUDGE else None)
    return found
