"""Puts an exception into any function of the package, and finds out which functions a run reaches.

A function is broken by giving it other code (``function.__code__``), so every reference to it is affected: imported
names, stored bound methods, callbacks, functions in other threads. A function that is made anew in each call of another
one is broken through the constants of that other one.

The exception is raised only where RunGuard's own code makes the call. Nothing can protect the first line of a function
that a framework, an event loop or the user calls.
"""

import functools
import gc
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, Final

import runguard

PACKAGE: Final = str(Path(runguard.__file__).parent)
# what users write tests with, and what shows things off
_NOT_THE_GUARD: Final = (f"{PACKAGE}/testing/", f"{PACKAGE}/cli/demo.py", f"{PACKAGE}/cli/stories.py")
_TRANSPARENT: Final = ("contextlib.py", "functools.py", "<string>")  # who calls through these is the caller
_NOT_FUNCTIONS: Final = ("<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
# Several callers share these. In each, a ``try`` or a ``with`` is around everything that can fail.
_SHIELDS: Final = (
    "adk.runs:within",
    "adk.patching:shield",
    "adk.patching:shield_here",
    "calls.function_calls:GuardedCall.ask",
    "calls.function_calls:GuardedCall.ask_now",
    "calls.functions:_finished",
    "calls.streams:_StreamManager._entered",
    "calls.streams:GuardedObject._asking",
    "calls.streams:GuardedObject._end",
    "calls.streams:_Pieces._anext",
    "calls.streams:_Pieces._next",
    "calls.streams:_Pieces._taken",
    "calls.model_calls:Permission.being_made",
    "calls.model_calls:Permission.changed",
    "calls.model_calls:Permission.in_flight",
    "calls.model_calls:Permission.pieces",
    "calls.model_calls:Permission.stopped",
    "calls.model_calls:_ending.<locals>.end",
    "calls.run:AgentRun.start",
    "calls.run:AgentRun.stopped",
    "engine.decide:GuardFaults.attempt",
    # and in these nothing can fail: they assign or read variables
    "calls.ending:EndingConditions.__init__",
    "calls.function_calls:GuardedCall.__init__",
    "calls.function_calls:GuardedCall.is_open",
    "calls.model_calls:CallMark.__enter__",
    "calls.model_calls:CallMark.__exit__",
    "calls.model_calls:CallMark.__init__",
    "calls.model_calls:Interruption.undone",
    "calls.model_calls:Permission.__init__",
    "calls.model_calls:Permission.charges",
    "calls.model_calls:_InFlight.__enter__",
    "calls.model_calls:_InFlight.__exit__",
    "calls.model_calls:_InFlight.__init__",
    "calls.run:AgentRun.__init__",
    "calls.surroundings:_here",
    "calls.tool_calls:InsideTool.__init__",
    "calls.tool_calls:RunTools.__init__",
)
_STARTS: Final = 0  # the argument of RESUME where a function begins; others continue after a yield or an await


class FaultError(Exception):
    """What a bug in RunGuard would raise."""


def is_ours(code: CodeType) -> bool:
    path = code.co_filename
    return path.startswith(PACKAGE) and not path.startswith(_NOT_THE_GUARD)


def name_of(code: CodeType) -> str:
    module = code.co_filename[len(PACKAGE) + 1 :].removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return f"{module}:{code.co_qualname}"


def _is_called_by_us(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.endswith(_TRANSPARENT):
        frame = frame.f_back
    return frame is not None and is_ours(frame.f_code)


# ---- which functions a run reaches ----------------------------------------------------------------------------------


_outermost: Final[set[CodeType]] = set()  # functions that somebody else calls, in any run so far


@contextmanager
def reached() -> Iterator[Counter[CodeType]]:
    """Counts how often RunGuard's own code calls each function of the package, in all threads that begin meanwhile and
    in this one.
    """
    calls: Counter[CodeType] = Counter()

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if (
            event != "call"
            or not is_ours(code)
            or code.co_name in _NOT_FUNCTIONS
            or code.co_code[frame.f_lasti + 1] & 3 != _STARTS
        ):
            return
        if _is_called_by_us(frame.f_back):
            calls[code] += 1
        else:
            _outermost.add(code)

    before = sys.getprofile()
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        threading.setprofile(before)


# ---- breaking one function ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Place:
    """One function of the package, and where its code is found."""

    code: CodeType
    functions: list[FunctionType]
    makers: list[FunctionType]  # functions in whose calls it is made anew
    calls: int = 0

    @property
    def name(self) -> str:
        return name_of(self.code)


def _our_functions() -> list[FunctionType]:
    return [each for each in gc.get_objects() if type(each) is FunctionType and is_ours(each.__code__)]


@functools.cache
def _imported_functions() -> list[FunctionType]:
    """Those that tests/conftest.py keeps from the garbage collector, which does not list them then."""
    gc.unfreeze()
    gc.collect()
    found = _our_functions()
    gc.freeze()
    return found


def places(calls: Counter[CodeType]) -> list[Place]:
    """The functions that a run has reached, by name.

    Not those that a framework calls, nor those that only hold a ``try``: nothing can protect their first line.
    """
    functions: dict[CodeType, list[FunctionType]] = {}
    for each in [*_imported_functions(), *_our_functions()]:
        functions.setdefault(each.__code__, []).append(each)
    makers: dict[CodeType, list[FunctionType]] = {}
    for made_by in (one for same in functions.values() for one in same):
        for inner in _codes_in(made_by.__code__):
            makers.setdefault(inner, []).append(made_by)
    found = [Place(code, functions.get(code, []), makers.get(code, []), count) for code, count in calls.items()]
    return sorted(
        (
            place
            for place in found
            if (place.functions or place.makers) and place.code not in _outermost and place.name not in _SHIELDS
        ),
        key=lambda place: (place.name, place.code.co_firstlineno),
    )


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _codes_in(const)


@dataclass(slots=True)
class Fault:
    """An exception at one place: at the ``first`` call after arming, at the ``second``, or at ``every`` one."""

    place: Place
    when: str
    armed: bool = False
    met: int = 0
    raised: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def arm(self) -> None:
        self.armed = True

    def disarm(self) -> None:
        self.armed = False

    def is_due(self, caller: FrameType | None) -> bool:
        if not self.armed or not _is_called_by_us(caller):
            return False
        with self.lock:
            self.met += 1
            due = self.when == "every" or self.met == {"first": 1, "second": 2}[self.when]
            self.raised += due
        return due


@contextmanager
def broken(place: Place, when: str) -> Iterator[Fault]:
    """The function raises as soon as the fault is armed; until then, and when called from outside, it works."""
    fault = Fault(place, when)
    kept: list[tuple[FunctionType, CodeType]] = []
    anew = _stub(place.code, _from_frame(fault))
    for function in place.functions:
        kept.append((function, function.__code__))
        function.__code__ = _stub(place.code, _from_function(fault, _clone(function)))
    for maker in {id(one): one for one in place.makers if one not in place.functions}.values():
        kept.append((maker, maker.__code__))
        maker.__code__ = _with_inner(maker.__code__, place.code, anew)
    try:
        yield fault
    finally:
        fault.disarm()
        for function, code in kept:
            function.__code__ = code


def _clone(function: FunctionType) -> FunctionType:
    clone = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    clone.__kwdefaults__ = function.__kwdefaults__
    return clone


def _from_function(fault: Fault, works: Callable[..., Any]) -> Callable[..., Any]:
    def hook(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if fault.is_due(sys._getframe(1).f_back):
            raise FaultError(fault.place.name)
        return works(*args, **kwargs)

    return hook


def _from_frame(fault: Fault) -> Callable[..., Any]:
    """For functions that are made anew: what works is made of the broken one's globals and variables."""
    code = fault.place.code

    def hook(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        frame = sys._getframe(1)
        if fault.is_due(frame.f_back):
            raise FaultError(fault.place.name)
        cells = tuple(
            CellType(frame.f_locals[name]) if name in frame.f_locals else CellType() for name in code.co_freevars
        )
        return FunctionType(code, frame.f_globals, code.co_name, None, cells)(*args, **kwargs)

    return hook


def _with_inner(code: CodeType, old: CodeType, new: CodeType) -> CodeType:
    consts = tuple(
        new if const is old else _with_inner(const, old, new) if isinstance(const, CodeType) else const
        for const in code.co_consts
    )
    return code.replace(co_consts=consts)


_PLAIN: Final = "def f(*args, **kwargs):\n  if 0: {free}\n  return 'HOOK'(args, kwargs)"
_COROUTINE: Final = "async def f(*args, **kwargs):\n  if 0: {free}\n  return await 'HOOK'(args, kwargs)"
_GENERATOR: Final = "def f(*args, **kwargs):\n  if 0: {free}\n  return (yield from 'HOOK'(args, kwargs))"
_ASYNC_GENERATOR: Final = """async def f(*args, **kwargs):
  if 0: {free}
  inner = 'HOOK'(args, kwargs)
  try:
    async for each in inner: yield each
  finally:
    await inner.aclose()"""


def _stub(code: CodeType, hook: Callable[..., Any]) -> CodeType:
    """Code of the same kind, with the same free variables, that asks ``hook`` what to do."""
    kinds = ((CO_COROUTINE, _COROUTINE), (CO_ASYNC_GENERATOR, _ASYNC_GENERATOR), (CO_GENERATOR, _GENERATOR))
    template = next((text for flag, text in kinds if code.co_flags & flag), _PLAIN)
    names = [f"free_{number:03}" for number in range(len(code.co_freevars))]
    source = template.format(free=f"({', '.join(names)},)" if names else "None")
    around = f"def around({', '.join(names)}):\n  " + source.replace("\n", "\n  ")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a text is called: it becomes the hook below
        module = compile(around, code.co_filename, "exec")
    (outer,) = (const for const in module.co_consts if isinstance(const, CodeType))
    (stub,) = (const for const in outer.co_consts if isinstance(const, CodeType))
    consts = tuple(hook if const == "HOOK" else const for const in stub.co_consts)
    return stub.replace(
        co_consts=consts,
        co_freevars=code.co_freevars,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_firstlineno=code.co_firstlineno,
    )


def by_name(found: Iterable[Place]) -> dict[str, Place]:
    return {f"{place.name}@{place.code.co_firstlineno}": place for place in found}
