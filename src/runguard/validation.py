"""Settings as pydantic models whose mistakes read alike: path, value, and what would be right.

``policy/settings`` and ``pricing/book`` define their settings with ``SettingsModel``.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from runguard.core.errors import PolicyError, did_you_mean, too_many
from runguard.core.money import shown as shown_value

_OTHER_SHAPES: Final = frozenset({"list_type", "tuple_type", "model_type", "dict_type", "literal_error"})
_UNKNOWN: Final = frozenset({"extra_forbidden", "unexpected_keyword_argument"})
_UNION_TAGS: Final = frozenset(
    {"bool", "int", "callable", "constrained-str", "Price", "function-after[_coherent(), ToolRule]"}
)
_NAMED: Final = re.compile(r"[a-z_]+(?:: no such setting| = |: [A-Z]\w+\.)")  # a message that names its setting


if TYPE_CHECKING:  # type checkers read the fields
    _Base = BaseModel
else:

    class _Explained(type(BaseModel)):
        """Calling the class raises ``PolicyError``.

        Nested validation collects pydantic's own errors, so that a path is complete.
        """

        def __call__(cls, *args: Any, **values: Any) -> Any:
            if args:
                raise PolicyError(too_many(cls, 0, list(cls.model_fields)))
            try:
                return super().__call__(**values)
            except ValidationError as error:
                lines = (
                    f"{cls.__name__}{'.' if _names_a_setting(line, cls) else ': '}{line}"
                    for line in faults_of(error, cls)
                )
                raise PolicyError("\n".join(lines)) from None

    def _names_a_setting(line: str, model: type[BaseModel]) -> bool:
        return re.split(r"[:.\[]| = ", line, maxsplit=1)[0] in {*model.model_fields} or ": no such setting" in line

    class _Base(BaseModel, metaclass=_Explained): ...


class SettingsModel(_Base):
    """A frozen group of settings. Unknown names are rejected."""

    # defer_build: pydantic builds a validator when the model is first used, so that starting a program does not wait
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True, defer_build=True)

    parts: ClassVar[Mapping[str, type[BaseModel]]] = {}  # setting -> the model of its values
    meant: ClassVar[Mapping[str, str]] = {}  # a name that other libraries use -> what to write here
    shapes: ClassVar[Mapping[str | int, str]] = {}  # setting -> the shape to give


def faults_of(error: ValidationError, model: type[SettingsModel]) -> list[str]:
    """Return one line per fault: where it is, what was given, what would be right."""
    lines: dict[str, str] = {}  # what was given where -> what would be right
    faults = [(".".join(_parts(fault)), fault) for fault in error.errors(include_url=False)]
    unknown = {path.rpartition(".")[0] for path, fault in faults if fault["type"] in _UNKNOWN}
    for path, fault in faults:
        if fault["type"] in _OTHER_SHAPES and any(other != path and other.startswith(path) for other, _ in faults):
            continue  # the intended shape has a fault of its own
        if fault["type"] == "missing" and path.rpartition(".")[0] in unknown:
            continue  # probably the unknown name, misspelled
        line = _line(path, fault, model)
        if line is None:
            continue
        given, separator, right = line.partition(": ")
        if given in lines and right != lines[given]:  # none of several allowed types
            right = f"{lines[given]} or {right.removeprefix('input should be ')}"
        lines[given] = right if separator else ""
    told = (f"{given}: {right}" if right else given for given, right in lines.items())
    return [_misplaced(line, model) or line for line in told]


def _misplaced(line: str, model: type[SettingsModel]) -> str:
    """Return the fault of a setting that stands inside another one; nothing where it is another fault.

    In TOML every line below a heading belongs to that heading.
    """
    path = re.split(r": no such setting| = ", line, maxsplit=1)[0]
    group, _, name = path.rpartition(".")
    if name not in model.model_fields or not (group == "rules" or (group and ": no such setting" in line)):
        return ""
    return f"{path}: '{name}' is no part of {group}; in a file, write it above the first [heading]"


def _line(path: str, fault: Any, model: type[SettingsModel]) -> str | None:
    given, place = fault.get("input"), fault["loc"]
    is_secret = place[:1] == ("alerts",)  # what is written there may be one: it is not repeated
    shown = (
        shown_value(given)
        if (given is None or isinstance(given, str | int | float | bool)) and not is_secret
        else f"a {type(given).__name__}"
    )
    if fault["type"] in _UNKNOWN:
        fields = model.parts.get(str(place[0]), model).model_fields if len(place) > 1 else model.model_fields
        meant = model.meant.get(path) if fields is model.model_fields else None
        return (
            f"{path}: no such setting; {f'use {meant}' if meant is not None else did_you_mean(str(place[-1]), fields)}"
        )
    if fault["type"] == "value_error":
        message = fault["msg"].removeprefix("Value error, ")
        named = (
            f"{path} = {shown}"
            if isinstance(given, str | int | float | bool) and not is_secret and not message.startswith(shown)
            else path
        )
        if _NAMED.match(message) and not message.startswith(path):  # about one setting inside
            return f"{path}.{message}"
        return f"{named}: {message}" if path and not message.startswith(path) else message
    if fault["type"] == "missing":
        return f"{path}: missing"
    parts = _parts(fault)
    if place[0] == "rules" and len(parts) > 1 and fault["type"] in ("bool_type", "dict_type"):
        return (
            None
            if isinstance(given, dict)
            else f"{path} = {shown}: give rungs such as {{'stop': 5}}, or false to switch the rule off"
        )
    if fault["type"] in _OTHER_SHAPES and place[0] in model.shapes and len(parts) <= 2:
        return f"{path} = {shown}: {model.shapes[place[0]]}"
    return f"{path} = {shown}: {fault['msg'][0].lower()}{fault['msg'][1:]}"


def _parts(fault: Any) -> list[str]:
    return [str(part) for part in fault["loc"] if part not in _UNION_TAGS and "[" not in str(part)]


def summary(lines: Sequence[str], source: str) -> str:
    """Return all mistakes in one message. ``source``: where the settings come from."""
    head = f"the policy ({source}) is not valid:" if source else "the policy is not valid:"
    return f"{head} {lines[0]}" if len(lines) == 1 else "\n  ".join((head, *lines))
