"""The names of ADK's own tools are written once."""

from pathlib import Path

import runguard
from runguard.providers.messages import is_framework_tool
from tests.kit.examples import each_row

SOURCE = Path(runguard.__file__).parent


@each_row("name", ["transfer_to_agent", "exit_loop", "finish_task", "adk_request_credential"])
def test_tools_of_the_framework(name: str) -> None:
    assert is_framework_tool(name)


@each_row("name", ["search", "transfer", "", "request_input"])
def test_tools_of_the_user(name: str) -> None:
    assert not is_framework_tool(name)


def test_the_list_exists_once() -> None:
    holders = [path.name for path in SOURCE.rglob("*.py") if '"set_model_response"' in path.read_text(encoding="utf-8")]
    assert holders == ["messages.py"]
