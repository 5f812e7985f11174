"""Real ADK runs under a guard with a durable store, for the page to show."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Self

from google.adk.agents import LlmAgent

from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.testing import Recording, ScriptedModel, call, run, text

PRICES = {"scripted-1": {"input": 2, "output": 8}, "scripted-2": {"input": 10, "output": 40}}


def parse_document(path: str) -> dict[str, Any]:
    """Reads a document."""
    return {"status": "error", "error": f"cannot parse {path}: unexpected end of file"}


def guard(url: str, **options: Any) -> RunGuardPlugin:
    return RunGuardPlugin(
        **{
            "store": url,
            "prices": PRICES,
            "budgets": [Budget(usd=1, per="user", window="1d")],
            "models": {"scripted-*": {"max_output_tokens": 1_000}},
            **options,
        }
    )


def at_once(
    plugin: RunGuardPlugin,
    model: ScriptedModel,
    *,
    agent: str = "researcher",
    tools: Any = (parse_document,),
    **options: Any,
) -> Recording:
    """One whole run, in a thread of its own: a browser's event loop may be on this one. All it told is in the store
    then.
    """
    root = LlmAgent(name=agent, model=model, tools=list(tools))
    done: list[Recording] = []
    thread = threading.Thread(target=lambda: done.append(asyncio.run(run(root, plugins=[plugin], **options))))
    thread.start()
    thread.join(30)
    assert done, "the run did not end"
    assert plugin.flush(10)
    return done[0]


def runaway(plugin: RunGuardPlugin, tool: Callable[..., Any] = parse_document, **options: Any) -> Recording:
    name = str(getattr(tool, "name", None) or getattr(tool, "__name__", ""))
    return at_once(
        plugin,
        ScriptedModel(lambda n, _: call(name, path="report.pdf") if n < 60 else text("done")),
        tools=[tool],
        **options,
    )


def healthy(plugin: RunGuardPlugin, steps: int = 2, *, model: str = "scripted-1", **options: Any) -> Recording:
    return at_once(
        plugin,
        ScriptedModel([*(call("parse_document", path=f"{n}.pdf") for n in range(steps)), text("done")], model=model),
        **options,
    )


class Alive:
    """A run that goes on until it is let go."""

    def __init__(self, plugin: RunGuardPlugin, **options: Any) -> None:
        self._go, self._plugin = threading.Event(), plugin
        root = LlmAgent(
            name="patient", model=ScriptedModel([call("wait_for_it"), text("done")]), tools=[self.wait_for_it]
        )
        self._thread = threading.Thread(target=lambda: asyncio.run(run(root, plugins=[plugin], **options)), daemon=True)

    async def wait_for_it(self) -> dict[str, str]:
        """Waits."""
        await asyncio.to_thread(self._go.wait, 30)
        return {"status": "ok"}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._go.set()
        self._thread.join(30)
        assert self._plugin.flush(10)
