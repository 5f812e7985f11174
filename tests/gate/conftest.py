"""Tests of this directory run in an empty folder."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No policy file of the checkout is found."""
    monkeypatch.chdir(tmp_path)
