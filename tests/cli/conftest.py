"""Commands in a clean place, and stores that real ADK runs have filled."""

import functools
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from importlib import metadata
from importlib.metadata import packages_distributions
from pathlib import Path
from unittest import mock

import pytest

from tests.kit.commands import fill_once
from tests.kit.stores import KINDS, Servers, empty_store, missing


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No policy file of the checkout is found."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session", autouse=True)
def packages_are_listed_once() -> Iterator[None]:
    """Reading the files of every installed package takes most of the time of a doctor's visit."""

    @functools.cache
    def on(path: tuple[str, ...]) -> Mapping[str, list[str]]:
        return packages_distributions()

    def here() -> Mapping[str, list[str]]:
        return on(tuple(sys.path))

    with mock.patch.object(metadata, "packages_distributions", here):
        yield


@pytest.fixture(scope="session")
def filled_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "guard.db"
    fill_once(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session", params=list(KINDS))
def filled(request: pytest.FixtureRequest, servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A filled store of each kind, for tests that only look."""
    if reason := missing(request.param):
        pytest.skip(reason)
    store = empty_store(request.param, servers, tmp_path_factory.mktemp("looked-at"))
    fill_once(store)
    return store


@pytest.fixture
def file_store(filled_file: Path, tmp_path: Path) -> str:
    """A filled SQLite store of its own for each test, where the kind of store does not matter."""
    with closing(sqlite3.connect(filled_file)) as filled, closing(sqlite3.connect(tmp_path / "guard.db")) as copy:
        filled.backup(copy)
    return f"sqlite:///{tmp_path}/guard.db"
