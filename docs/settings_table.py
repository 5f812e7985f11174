"""Writes ``reference/settings.md`` from the policy's own fields: ``python docs/settings_table.py``.

A test tells when it is out of date.
"""  # noqa: INP001

from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from runguard.policy import RULES, Policy, PolicyFile, ToolRule
from runguard.policy.settings import RemoteAgent

PAGE = Path(__file__).parent / "reference" / "settings.md"
WORDS = """# Settings

Everything that a policy may say: keywords of `install`, `RunGuardPlugin` and `GuardedLlm`,
and keys of `runguard.toml`. `runguard check --schema` prints the
same as JSON Schema.

{policy}

Only in code:

{code}

## Of a rule

Under `rules`: the count at which a rule warns, nudges, refuses the call, or stops; `false` switches it off.
[What each sees](../rules.md).

{rules}

## Of a tool

Under `tools`, by name or glob, or beside the tool with `@runguard.tool(...)`.

{tool}

## Of a remote agent

Under `remote_agents`, by name or glob. [Remote agents](../a2a.md).

{remote}
"""


def page() -> str:
    code = {name: field for name, field in Policy.model_fields.items() if name not in PolicyFile.model_fields}
    return WORDS.format(
        policy=_table(PolicyFile.model_fields),
        code=_table(code),
        rules=_rules(),
        tool=_table(ToolRule.model_fields),
        remote=_table(RemoteAgent.model_fields),
    )


def _table(fields: dict[str, FieldInfo]) -> str:
    rows = [f"| `{name}` | {_shown(field.default)} | {field.description} |" for name, field in fields.items()]
    return "\n".join(["| setting | default | |", "|---|---|---|", *rows])


def _shown(value: Any) -> str:
    """A default that says something; nothing for what is simply not set."""
    if value is None or (isinstance(value, dict | tuple) and not value):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int | float | Decimal):
        return f"{value:g}"
    return f'`"{value}"`' if isinstance(value, str) else ""


def _rules() -> str:
    rows = []
    for rule, (rungs, allowed) in RULES.items():
        cells = [
            _rung(getattr(rungs, name), name in allowed) for name in ("warn", "nudge", "withhold", "block", "stop")
        ]
        rows.append(f"| `{rule}` | {' | '.join(cells)} |")
    return "\n".join(["| rule | warn | nudge | withhold | block | stop |", "|---|---|---|---|---|---|", *rows])


def _rung(number: float | None, allowed: bool) -> str:
    return "–" if not allowed else f"{number:g}" if number is not None else "off"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
