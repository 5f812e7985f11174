"""Write what follows from the policy's own fields: ``python docs/settings_table.py``.

That is ``reference/settings.md``, and the typed keywords in ``policy/keywords.py``. Tests tell when they are out of
date.
"""  # noqa: INP001

import types
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from runguard.calls.function_settings import ELSEWHERE, ONLY_AGENTS
from runguard.core.money import Budget
from runguard.policy import RULES, Policy, PolicyFile, ToolRule
from runguard.policy.settings import RemoteAgent
from runguard.pricing.book import ModelLimits, Price
from runguard.reporting.alerts import AlertSettings

PAGE = Path(__file__).parent / "reference" / "settings.md"
KEYWORDS = Path(__file__).parents[1] / "src" / "runguard" / "policy" / "keywords.py"
BEGIN, END = "# ---- Settings of a policy: written by docs/settings_table.py.\n", "# ---- Settings of ``guard``"
GIVEN = {  # what a user may give for a value of this type
    Decimal: "Dollars",
    Price: "PriceOf",
    AlertSettings: "Alerts",
    Budget: "Budget | Mapping[str, Any]",
    ModelLimits: "ModelLimits | Mapping[str, Any]",
    ToolRule: "ToolRule | Mapping[str, Any]",
    RemoteAgent: "RemoteAgent | Mapping[str, Any]",
    type(None): "None",
    Any: "Any",
    ...: "...",
}
SPECIAL = {"rules": "Mapping[str, Mapping[str, float] | Literal[False]]"}  # true is refused
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
    """Return a default that says something, or nothing for what is simply not set."""
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


def keywords() -> str:
    """Return the module of the typed keywords, with the classes of the policy's settings as the models have them."""
    text = KEYWORDS.read_text(encoding="utf-8")
    fields = Policy.model_fields
    agents = {*ELSEWHERE, *ONLY_AGENTS, "tokens"}
    common = _typed_dict("CommonSettings(TypedDict, total=False)", "Settings of every guard.", fields.keys() - agents)
    policy = _typed_dict(
        "PolicySettings(CommonSettings, total=False)", "Settings of a guard that sees agents and their tools.", agents
    )
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n\n{common}\n\n{policy}\n\n{text[text.index(END) :]}"


def _typed_dict(head: str, about: str, names: Iterable[str]) -> str:
    lines = [f"class {head}:", f'    """{about}"""', ""]
    for name, field in Policy.model_fields.items():
        if name in set(names):
            lines += [f"    # {field.description}", f"    {name}: {SPECIAL.get(name) or _given(field.annotation)}"]
    return "\n".join(lines) + "\n"


def _given(kind: Any) -> str:
    """Return the type of what may be given for a field of this type, as source code."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in GIVEN:
        return GIVEN[kind]
    if origin is Annotated:
        return _given(inner[0])
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(_given, inner)))
    if origin is Literal:
        return f"Literal[{', '.join(map(_quoted, inner))}]"
    if origin in (tuple, list):
        return f"Sequence[{_given(inner[0])}]"
    if origin in (dict, Mapping):
        return f"Mapping[{_given(inner[0])}, {_given(inner[1])}]"
    if origin is Callable:
        asked = "..." if inner[0] is ... else f"[{', '.join(map(_given, inner[0]))}]"
        return f"Callable[{asked}, {_given(inner[1])}]"
    return str(kind.__name__)


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    KEYWORDS.write_text(keywords(), encoding="utf-8")
