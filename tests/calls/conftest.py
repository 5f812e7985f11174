"""Fixtures of this directory."""

from pathlib import Path

import pytest


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/budgets.db"
