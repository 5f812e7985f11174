"""The live test: agents on this machine's ADK that would never end, and must be stopped. No network, no key."""

import asyncio

from runguard.cli.doctor.line import Line
from runguard.demo import AdkMissingError, load

_SPIN = 30  # a model that was asked so often was not stopped


def self_test() -> Line:
    try:
        play = load()
    except AdkMissingError as error:
        return Line("self-test", "problem", str(error), "pip install -U 'runguard-agents[adk]'")
    try:
        with play.defaults(), play.quiet():
            found = asyncio.run(_stops())
    except Exception as error:  # whatever goes wrong here would go wrong in the first guarded run
        return Line(
            "self-test",
            "problem",
            f"a stop does not stop here: {type(error).__name__}: {error}",
            "report it with the versions above",
        )
    return Line("self-test", "ok", found)


async def _stops() -> str:
    from google.adk.agents import LlmAgent
    from google.adk.sessions import InMemorySessionService

    from runguard.adk.plugin import RunGuardPlugin
    from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, run, text

    def look(at: str) -> dict[str, int]:
        """Always the same."""
        return {"seen": 1}

    def endless() -> tuple[LlmAgent, ScriptedModel]:
        model = ScriptedModel(lambda n, _: call("look", at="it") if n < _SPIN else text("nobody stopped me"))
        return LlmAgent(name="self_test", model=model, tools=[look]), model

    agent, model = endless()
    limited = await run(agent, plugins=[RunGuardPlugin(max_model_calls=3)])
    assert_stopped(limited, "model_calls")
    assert_calls_answered(limited.session)
    _need(model.calls == 3, f"3 model calls were allowed, {model.calls} were made")

    agent, model = endless()
    looping = await run(agent, plugins=[RunGuardPlugin()])
    rule, loop_calls = assert_stopped(looping).rule, model.calls
    assert_calls_answered(looping.session)

    agent, model = endless()
    plugin, sessions = RunGuardPlugin(max_model_calls=1), InMemorySessionService()
    plugin.stop("all", actor="doctor", reason="self-test")
    switched = await run(agent, plugins=[plugin], session_service=sessions)
    assert_stopped(switched, "kill_switch")
    _need(model.calls == 0, f"the kill switch let {model.calls} model calls through")
    plugin.resume("all")
    await run(agent, plugins=[plugin], session_service=sessions, session_id="s2")
    _need(model.calls == 1, "after resume nothing runs")
    loop = f"a loop was stopped by {rule} after {loop_calls}"
    return (
        f"on real ADK a limit of 3 model calls stopped after 3, {loop}, the kill switch before the first; all "
        "calls answered"
    )


def _need(held: bool, otherwise: str) -> None:
    if not held:
        raise AssertionError(otherwise)
