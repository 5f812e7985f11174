"""The fixtures of the command tests: a clean place, and stores that real ADK runs have filled."""

from ..cli.conftest import clean_place, filled, filled_file, servers  # noqa: F401, TID252 - fixtures; the tests are no package
