"""A model call from its permission to its bill, on every guard around it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from runguard.adapters.layers import Layer
from runguard.adapters.tool_calls import ToolUse
from runguard.core.decision import Trip
from runguard.core.events import ModelCall, ModelResult
from runguard.core.fingerprint import words_name
from runguard.pricing.rates import Usage
from runguard.providers.sizes import LIKELY, UPPER, measure, tokens_in
from runguard.providers.unbilled import was_unbilled

if TYPE_CHECKING:
    from runguard.adapters.agent_run import AgentRun

_T = TypeVar("_T")


@dataclass(slots=True)
class ModelRequest:
    """What is known of a model call before it is made."""

    model: str = ""
    input_tokens: int = 0  # an upper estimate, for what is reserved
    likely_tokens: int = 0  # the likely size, for the context window
    max_output_tokens: int | None = None  # None: as much as the model can
    audio_tokens: int = 0

    @classmethod
    def of(cls, model: str, prompt: Any, max_output_tokens: int | None = None) -> "ModelRequest":
        """``prompt``: messages, instructions and tool declarations, as plain data or objects."""
        size, audio = measure(prompt)
        return cls(model, -(-size // UPPER), -(-size // LIKELY), max_output_tokens, audio)


class Permission:
    """Permission for one model call. One of ``settle``, ``fail`` and ``release`` ends it; a second one is ignored."""

    __slots__ = ("_charged", "_is_over", "_run", "_task", "interrupted", "notice")

    def __init__(self, run: "AgentRun", task: "asyncio.Task[Any] | None") -> None:
        self._run, self._task = run, task
        self._charged: list[tuple[Layer, ModelCall]] = []
        self._is_over = False
        self.notice = ""  # for the model, to be added to this request
        self.interrupted: Trip | None = None  # the stop that has ended the call in flight

    def add(self, layer: Layer, event: ModelCall) -> None:
        """The guard of ``layer`` lets the call through."""
        self._charged.append((layer, event))

    @property
    def max_output_tokens(self) -> int | None:
        """The output limit that the request must carry, because a budget cannot pay for more. None: no change."""
        limits = [e.charge.max_output for _, e in self._charged if e.charge is not None and e.charge.lowered]
        return min(limits, default=None)

    @property
    def stopped(self) -> Trip | None:
        """A stop since the call began, such as the kill switch: end the stream."""
        return self._run.stopped

    async def during(self, call: Awaitable[_T]) -> _T:
        """Await the model call. The kill switch ends it: then ``interrupted`` holds the trip."""
        task = asyncio.ensure_future(call)
        loop = asyncio.get_running_loop()

        def end() -> None:
            loop.call_soon_threadsafe(task.cancel)

        for layer, _ in self._charged:
            layer.run.in_flight.add(end)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is None or not current.cancelling():
                self.interrupted = self._run.stopped
            raise
        finally:
            for layer, _ in self._charged:
                layer.run.in_flight.discard(end)
            if not task.done():
                task.cancel()

    def read(self, settle: Callable[["Permission", Any], None], response: Any) -> None:
        """Let the adapter read the answer and settle. A fault there books an estimate, and the answer is kept."""
        try:
            settle(self, response)
        except Exception as error:
            layer = self._run.layers[-1]
            layer.guard.fault("adapter", error, layer.run.info.run, self._run.agent)
            self.fail(None)

    def settle(
        self, usage: Usage | None, *, model: str = "", calls: Sequence[ToolUse] = (), text: str = "", size: int = 0
    ) -> None:
        """The model answered. ``usage`` None: not reported, so ``size`` bytes of answer are booked as an estimate."""
        if self._close():
            return
        reported = usage is not None and bool(usage.input or usage.output)
        for layer, event in self._charged:
            guard, run, lane = layer
            booked = usage if reported and usage is not None else Usage(event.input_tokens, tokens_in(size))
            if event.charge is not None:
                guard.settle(event.charge, booked, model or event.model, estimated=not reported)
            result = ModelResult(run.info.run, lane, event.agent, guard.clock(), model=model or event.model)
            if reported:
                result.prompt_tokens, result.output_tokens = booked.input, booked.output
            result.text_id = 0 if calls or not text else words_name(text)
            guard.faults.attempt("adapter", guard.after, result)
        self._run.asked_for(calls)

    def fail(self, error: BaseException | None, streamed: int = 0, *, streaming: bool = False) -> None:
        """The call raised, was cancelled, or its stream was cut after ``streamed`` bytes: booked as an estimate."""
        if self._close():
            return
        for layer, event in self._charged:
            if event.charge is not None:
                layer.guard.abandon(event.charge, tokens_in(streamed), streaming=streaming, refused=was_unbilled(error))

    def release(self) -> None:
        """The call was not made."""
        if self._close():
            return
        for layer, event in self._charged:
            if event.charge is not None and not event.charge.over:
                layer.guard.release(event.charge)
                layer.guard.faults.attempt("adapter", layer.guard.unspent, event.run, event)

    def _close(self) -> bool:
        over, self._is_over = self._is_over, True
        if not over and self._task is not None:
            for layer, _ in self._charged:
                layer.guard.faults.attempt("adapter", layer.run.slots.give_back, self._task)
        return over
