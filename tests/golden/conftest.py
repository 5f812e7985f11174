"""The fixtures of the command tests: an empty folder, and stores that real ADK runs have filled."""

from tests.cli.conftest import empty_folder, filled, filled_file  # noqa: F401 - fixtures
