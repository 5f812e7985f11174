"""What a tool of ADK declares about its arguments, and which of them reach its code.

``FunctionTool`` calls its function with the arguments that the signature names and drops all others, also where the
function takes ``**kwargs``. It injects the tool context and what else it lists in ``_ignore_params``. A subclass with
its own ``run_async`` may treat arguments in another way, so there every argument counts, as for MCP, OpenAPI and all
other tools; only the types in their schema are used.
"""

import inspect
import weakref
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from google.adk.tools.base_tool import BaseTool
from google.adk.tools.function_tool import FunctionTool
from pydantic import BaseModel, RootModel

from runguard.policy.tools import Each, Fields, Kind

_INJECTED: Final = ("tool_context", "input_stream")
_EMPTY: Final[tuple[Any, ...]] = (list, dict, set, tuple, str)  # factories of defaults that are always the same
_OWN_READING: Final = ("__get_pydantic_core_schema__", "model_validate")
# Everything that decides which arguments reach the function. ADK's own classes add arguments and change none.
_STEPS: Final = ("run_async", "_preprocess_args", "_preprocess_args_with_validation", "_prepare_invocation_args")
_PLAIN: Final = {
    f"google.adk.tools.{module}" for module in ("function_tool", "authenticated_function_tool", "google_tool")
}

_known: "weakref.WeakKeyDictionary[BaseTool, tuple[int, Fields | None]]" = weakref.WeakKeyDictionary()


def declared_by(tool: BaseTool) -> Fields | None:
    """What is declared about the arguments of a tool; None where nothing is known."""
    try:
        known, function = _known.get(tool), id(getattr(tool, "func", None))
        if known is None or known[0] != function:
            known = _known[tool] = (
                function,
                _parameters(tool) if isinstance(tool, FunctionTool) and _is_plain(type(tool)) else _schema(tool),
            )
        return known[1]
    except Exception:  # an unhashable tool, or a declaration that cannot be read
        return None


# ---- functions ------------------------------------------------------------------------------------------------------


def _parameters(tool: FunctionTool) -> Fields:
    """The parameters that a model can fill in."""
    injected = {*_INJECTED, *getattr(tool, "_ignore_params", ())}
    hints = _hints(tool.func)
    fields = Fields(drops_others=True)
    for name, parameter in inspect.signature(tool.func).parameters.items():
        if name in injected:
            continue
        fields.kinds[name] = _parameter(hints.get(name, parameter.annotation))
        if parameter.default is not inspect.Parameter.empty:
            fields.defaults[name] = parameter.default
    return fields


def _is_plain(kind: type) -> bool:
    """Whether arguments take the way that ``FunctionTool`` defines."""
    return all(
        next((owner.__module__ in _PLAIN for owner in kind.__mro__ if step in vars(owner)), True) for step in _STEPS
    )


def _hints(function: Any) -> dict[str, Any]:
    """Annotations by parameter. One that cannot be resolved does not hide the others."""
    while isinstance(function, partial):
        function = function.func
    target: Any = function if inspect.isroutine(function) else type(function).__call__
    try:
        return get_type_hints(target, include_extras=True)
    except Exception:
        space = getattr(inspect.unwrap(target), "__globals__", {})
        return {
            name: _resolved(annotation, space) for name, annotation in getattr(target, "__annotations__", {}).items()
        }


def _resolved(annotation: Any, space: dict[str, Any]) -> Any:
    try:
        return get_type_hints(SimpleNamespace(__annotations__={"it": annotation}), space, include_extras=True)["it"]
    except Exception:
        return None


def _parameter(annotation: Any) -> Kind:
    """ADK makes models of parameters that are a model or a list of models, and hands on everything else as it came."""
    annotation = _one(annotation)
    inner = get_args(annotation)
    item = _one(inner[0]) if get_origin(annotation) is list and inner else None
    if _is_model(annotation):
        return _kind(annotation, {})
    return Each(_kind(item, {})) if _is_model(item) else _kind(annotation, None)


def _kind(annotation: Any, models: dict[type, Fields | None] | None) -> Kind:
    """What an annotation says about a value. ``models``: those met on the way; None where models are not made."""
    annotation = _one(annotation)
    if annotation is int or annotation is float or annotation is bool:
        return annotation
    if _is_model(annotation):
        return None if models is None else models[annotation] if annotation in models else _model(annotation, models)
    origin, inner = get_origin(annotation), get_args(annotation)
    if not isinstance(origin, type):
        return None
    if issubclass(origin, Mapping):
        return Each(_kind(inner[1], models))
    if issubclass(origin, Sequence | AbstractSet) and (len(inner) == 1 or inner[1:] == (...,)):
        return Each(_kind(inner[0], models))
    return None


def _one(annotation: Any) -> Any:
    """The type behind ``Annotated``, ``NewType``, an alias and ``Optional``; ``int | float`` is a float."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) in (Union, UnionType):
            members = {_one(member) for member in get_args(annotation)} - {type(None)}
            if members == {int, float}:
                return float
            if len(members) != 1:
                return None
            annotation = members.pop()
        elif (
            behind := getattr(annotation, "__supertype__", None) or getattr(annotation, "__value__", None)
        ) is not None and not isinstance(annotation, type):
            annotation = behind
        else:
            return annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _model(model: type[BaseModel], models: dict[type, Fields | None]) -> Fields | None:
    """The fields of a model that drops what it does not declare; None for one
    that may look at everything it is given.
    """
    if _reads_input(model):
        models[model] = None
        return None
    # known before its fields are read: one of them may be the model itself
    fields = models[model] = Fields(drops_others=True)
    by_name = model.model_config.get("populate_by_name") or model.model_config.get("validate_by_name")
    for name, of in model.model_fields.items():
        fields.kinds[name] = _kind(of.annotation, models)
        if isinstance(of.validation_alias, str):
            fields.names[name] = (of.validation_alias, name) if by_name else (of.validation_alias,)
        if of.default_factory in _EMPTY:
            fields.defaults[name] = of.default_factory()  # type: ignore[call-arg, misc]
        elif of.default_factory is None and not of.is_required():
            fields.defaults[name] = of.default
    return fields


def _reads_input(model: type[BaseModel]) -> bool:
    """Whether more than the names of its fields decides what a model makes of its input."""
    config, decorators = model.model_config, model.__pydantic_decorators__
    paths = any(not isinstance(of.validation_alias, str | None) for of in model.model_fields.values())
    validators = any(found.info.mode != "after" for found in decorators.model_validators.values()) or bool(
        decorators.root_validators
    )
    own = any(
        name in vars(owner)
        for owner in model.__mro__
        if owner is not BaseModel and issubclass(owner, BaseModel)
        for name in _OWN_READING
    )
    special = (
        config.get("extra") not in (None, "ignore")
        or config.get("validate_by_alias") is False
        or issubclass(model, RootModel)
    )
    return paths or validators or own or special or model.__pydantic_custom_init__


# ---- schemas --------------------------------------------------------------------------------------------------------


def _schema(tool: BaseTool) -> Fields | None:
    """The types that a tool's schema declares.

    What its code makes of other arguments is unknown, so all of them count.
    """
    declaration = tool._get_declaration()
    if declaration is None:
        return None
    schema: Any = getattr(declaration, "parameters_json_schema", None)
    if schema is None and declaration.parameters is not None:
        schema = declaration.parameters.model_dump(mode="json", exclude_none=True, by_alias=True)
    kind = _schema_kind(schema)
    return kind if isinstance(kind, Fields) else None


def _schema_kind(schema: Any) -> Kind:
    if not isinstance(schema, dict):
        return None
    if options := schema.get("anyOf"):
        left = [
            option for option in options if not isinstance(option, dict) or str(option.get("type")).lower() != "null"
        ]
        return _schema_kind(left[0]) if len(left) == 1 else None
    names = schema.get("type")
    names = [str(name).lower() for name in (names if isinstance(names, list) else [names])]
    match [name for name in names if name != "null"]:
        case ["integer"]:
            return int
        case ["number"]:
            return float
        case ["boolean"]:
            return bool
        case ["array"]:
            return Each(_schema_kind(schema.get("items")))
        case ["object"]:
            return Fields({name: _schema_kind(of) for name, of in (schema.get("properties") or {}).items()})
    return None
