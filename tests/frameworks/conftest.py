"""These tests need the other frameworks, which have an environment of their own. Elsewhere they are not collected."""

from importlib.util import find_spec

_INSTALLED = all(find_spec(name) is not None for name in ("langchain", "agents", "pydantic_ai"))
collect_ignore_glob = [] if _INSTALLED else ["test_*.py"]
