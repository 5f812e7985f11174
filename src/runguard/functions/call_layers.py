"""Opens a guarded call at every layer that limits it: the runs around it, the outermost first, then the callable.

There are two ways to wait: ``open_layers`` blocks the thread, ``open_layers_async`` awaits.
"""

import asyncio
import inspect
from contextlib import suppress
from functools import partial
from typing import Any

from runguard.engine.charges import OWNERS, Charge
from runguard.functions.booking import never_left
from runguard.functions.call_queue import Admission, may_start
from runguard.functions.caller import Caller, GuardedCall, open_ones
from runguard.functions.opening import open_call, open_now
from runguard.functions.run_context import SURROUNDINGS
from runguard.functions.sync import drive
from runguard.providers.messages import Request


def is_inner_call(caller: Caller) -> bool:
    """Whether this is the call that the guard around makes. Another attempt of a retry between them is one more
    call.
    """
    inner = SURROUNDINGS.get().inner
    return inner is not None and caller in inner and inner.pop() is caller


def _layers(caller: Caller) -> tuple[Caller, ...]:
    """The runs with limits around a call, the outermost first, then the callable itself."""
    layers = [caller]
    context = SURROUNDINGS.get().run
    while context is not None:
        if context.caller is not None and not context.ended and not context.caller.is_off:
            layers.append(context.caller)
        context = context.outer
    return tuple(reversed(layers))


# Both functions below keep each call in a list before anything else can fail, so that an error takes all of them back.


def open_layers(
    caller: Caller, stacked: bool, is_inner: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[GuardedCall], tuple[Charge, ...]]:
    """Permission for one call from every layer, and the charges of all of them.

    ``stacked``: the callable is itself guarded. ``is_inner``: the guard around has already asked the runs.
    """
    owners = open_ones(OWNERS.get())
    layers = (caller,) if is_inner or SURROUNDINGS.get().run is None else _layers(caller)
    calls: list[GuardedCall] = []
    token = OWNERS.set(owners) if len(layers) > 1 else None
    try:
        for layer in layers:
            request = layer.request(args, kwargs)
            if layer.settings.tokens is not None:
                request = layer.counted(request, _count(layer, args, kwargs))
            call = open_now(layer, request) or _open_waiting(layer, request)
            calls.append(call)
            if stacked:
                call.stacked = True
            if call.charge is not None:
                owners = (*owners, call.charge)
            if token is not None:
                OWNERS.set(owners)
    except BaseException:
        take_back(calls)
        raise
    finally:
        if token is not None:
            OWNERS.reset(token)
    return calls, owners


async def open_layers_async(
    caller: Caller, stacked: bool, is_inner: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[GuardedCall], tuple[Charge, ...]]:
    owners = open_ones(OWNERS.get())
    layers = (caller,) if is_inner or SURROUNDINGS.get().run is None else _layers(caller)
    calls: list[GuardedCall] = []
    token = OWNERS.set(owners) if len(layers) > 1 else None
    try:
        for layer in layers:
            request = layer.request(args, kwargs)
            if layer.settings.tokens is not None:
                counted = _count(layer, args, kwargs)
                request = layer.counted(request, await _result_of(counted) if inspect.isawaitable(counted) else counted)
            call = open_now(layer, request) or await _open_awaiting(layer, request)
            calls.append(call)
            if stacked:
                call.stacked = True
            if call.charge is not None:
                owners = (*owners, call.charge)
            if token is not None:
                OWNERS.set(owners)
    except BaseException:
        take_back(calls)
        raise
    finally:
        if token is not None:
            with suppress(ValueError):  # a coroutine that is thrown away ends in another context
                OWNERS.reset(token)
    return calls, owners


def take_back(calls: list[GuardedCall]) -> None:
    """The call is not made after all."""
    for call in calls:
        never_left(call)


def _open_waiting(layer: Caller, request: Request) -> GuardedCall:
    on_loop = asyncio._get_running_loop() is not None  # a sync call on an event loop blocks everything on it
    admission, ticket = layer.admission(request, True)
    try:
        if admission is Admission.QUEUED and ticket is not None:
            try:
                ticket.result(0.0 if on_loop else layer.settings.policy.hold_seconds)
            except TimeoutError:  # the ledger knows what the others have reserved
                layer.give_back(ticket)
                admission, ticket = Admission.ALONGSIDE if on_loop else Admission.NOW, None
        make = partial(open_call, layer, request, admission, ticket, True, on_loop)
        return drive(make, layer.guard.shares_store, never_left)
    except BaseException:
        layer.give_back(ticket)
        raise


async def _open_awaiting(layer: Caller, request: Request) -> GuardedCall:
    admission, ticket = layer.admission(request, False)
    try:
        seconds = layer.settings.policy.hold_seconds
        if admission is Admission.QUEUED and ticket is not None and not await may_start(ticket, seconds):
            layer.give_back(ticket)
            admission, ticket = Admission.NOW, None
        return await open_call(layer, request, admission, ticket, False)
    except BaseException:
        layer.give_back(ticket)
        raise


def _count(layer: Caller, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``tokens`` gives, or the exception that it raises."""
    assert layer.settings.tokens is not None
    try:
        return layer.settings.tokens(*args, **kwargs)
    except Exception as error:
        return error


async def _result_of(counted: Any) -> Any:
    try:
        return await counted
    except Exception as error:
        return error
