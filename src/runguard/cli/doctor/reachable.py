"""What code can reach: the agents and models that a tool calls, found in its closures, globals and attributes.

Nothing is called. An attribute that only exists while the code runs is not found.
"""

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

_OBJECTS: Final = 50_000  # an application with more is examined in part
_OURS: Final = "runguard"
# Frameworks and what they use: what their functions mention in general is not the user's.
_FRAMEWORKS: Final = frozenset(
    {"agents", "anthropic", "deepagents", "google", "httpx", "langchain", "langchain_core", "langgraph", "langsmith"}
    | {"mcp", "openai", "opentelemetry", "pydantic", "pydantic_ai", "pydantic_core", "pydantic_graph", "starlette"}
)
_PLAIN: Final = (str, bytes, int, float, complex, bool, type(None), type, CodeType, ModuleType)
_CONTAINERS: Final = (list, tuple, set, frozenset, deque)
# The original of a guarded tool and its agent, which a guarded copy keeps and does not call.
_ORIGINALS: Final = frozenset({"_function_tool", "_agent_instance"})


def reachable(start: object, is_wanted: Callable[[object], bool], is_end: Callable[[object], bool]) -> Iterator[Any]:
    """Yield every wanted object that the attributes of ``start`` lead to. What an end refers to is not looked at."""
    seen: dict[int, object] = {id(start): start}
    waiting = deque(_attributes(start))
    while waiting and len(seen) < _OBJECTS:
        one = waiting.popleft()
        if id(one) in seen or isinstance(one, _PLAIN):
            continue
        seen[id(one)] = one
        if is_wanted(one):
            yield one
        if not is_end(one):
            waiting.extend(_parts(one))


def _parts(one: object) -> Iterable[object]:
    if isinstance(one, FunctionType):
        return _named_by(one)
    if isinstance(one, MethodType):
        return (one.__self__, one.__func__)
    if isinstance(one, functools.partial):
        return (one.func, *one.args, *one.keywords.values())
    if isinstance(one, dict):
        return list(one.values())
    if isinstance(one, _CONTAINERS):
        return list(one)
    home = _home(type(one).__module__)
    if home == _OURS:
        return (inner,) if (inner := getattr(one, "_inner", None)) is not None and callable(one) else ()
    return () if home in sys.stdlib_module_names else _attributes(one)


def _attributes(one: object) -> list[object]:
    found: dict[str, object] = {}
    for kind in type(one).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            slot: Any = vars(kind).get(name)
            if hasattr(slot, "__get__") and not isinstance(slot, property):
                try:
                    found[name] = slot.__get__(one, kind)
                except AttributeError:  # never set
                    continue
    found |= getattr(one, "__dict__", None) or {}
    found |= getattr(one, "__pydantic_private__", None) or {}
    return [value for name, value in found.items() if name not in _ORIGINALS]


def _named_by(function: FunctionType) -> list[object]:
    """What a function can use: its closure and defaults; in the user's code also the globals that it names."""
    home = _home(function.__module__ or "")
    if home == _OURS:
        return []
    found: list[object] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    if is_of_framework(home):
        return found
    names = _names_in(function.__code__)
    for name in names:
        value = function.__globals__.get(name, sys.modules.get(name))
        if not isinstance(value, ModuleType):
            found.append(value)
        elif not is_of_framework(value.__name__):
            found += [vars(value)[other] for other in names if other in vars(value)]
    return found


def _names_in(code: CodeType) -> set[str]:
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


def is_of_framework(module: str) -> bool:
    home = _home(module)
    return home in _FRAMEWORKS or home in sys.stdlib_module_names


def _home(module: str) -> str:
    return module.partition(".")[0]
