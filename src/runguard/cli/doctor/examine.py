"""Run every check of ``runguard doctor``, with a live test that stops agents on this machine's ADK."""

import asyncio

from runguard.cli.commands.policies import policy_here
from runguard.cli.doctor.application import Application, load_application, loader_of
from runguard.cli.doctor.environment import (
    CheckResult,
    adk_line,
    framework_lines,
    has_adk,
    list_line,
    name_line,
    policy_line,
    price_lines,
    python_line,
    store_line,
)
from runguard.core.errors import PolicyError
from runguard.demo import AdkMissingError, load
from runguard.ledger.memory import check_store
from runguard.policy.settings import Policy

_UNSTOPPED = 30  # a model that was called this often was not stopped


def examine(target: str | None, models: tuple[str, ...], store: str | None) -> list[CheckResult]:
    """Run all checks; ``target`` is the app to load.

    The live test runs first, before code of the app can change anything, and is reported last.
    """
    load = loader_of(target) if target is not None else None
    adk = adk_line()
    live = self_test() if adk.state == "ok" and has_adk() else None
    app = load_application(target, load) if target is not None and load is not None else Application([])
    lines = [python_line(), name_line(), adk, *framework_lines(), *app.lines]
    try:
        policy = policy_here(store) if app.policy is None else _with_store(app.policy, store)
    except PolicyError as error:
        lines.append(CheckResult("policy", "problem", str(error), "correct it, then run `runguard check`"))
    else:
        lines += [
            policy_line(policy, of_app=app.policy is not None),
            store_line(policy),
            list_line(policy),
            *price_lines(policy, (*models, *app.models)),
        ]
    return [*lines, live] if live is not None else lines


def _with_store(policy: Policy, store: str | None) -> Policy:
    if store is None:
        return policy
    check_store(store)
    return policy.model_copy(update={"store": store})


def self_test() -> CheckResult:
    try:
        play = load()
    except AdkMissingError as error:
        return CheckResult("self-test", "problem", str(error), "pip install -U 'runguard-agents[adk]'")
    try:
        with play.defaults(), play.quiet():
            found = asyncio.run(_stops())
    except Exception as error:  # an error here would also break the first guarded run
        return CheckResult(
            "self-test",
            "problem",
            f"a stop does not work here: {type(error).__name__}: {error}",
            "report it with the versions above",
        )
    return CheckResult("self-test", "ok", found)


async def _stops() -> str:
    from google.adk.agents import LlmAgent
    from google.adk.sessions import InMemorySessionService

    from runguard.adk.plugin import RunGuardPlugin
    from runguard.testing import ScriptedModel, assert_calls_answered, assert_stopped, call, run, text

    def look(at: str) -> dict[str, int]:
        """Always return the same answer."""
        return {"seen": 1}

    def endless() -> tuple[LlmAgent, ScriptedModel]:
        model = ScriptedModel(lambda n, _: call("look", at="it") if n < _UNSTOPPED else text("not stopped"))
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
    _need(model.calls == 1, "no call runs after resume")
    loop = f"a loop was stopped by {rule} after {loop_calls}"
    return (
        f"on real ADK a limit of 3 model calls stopped after 3, {loop}, the kill switch before the first; all "
        "calls answered"
    )


def _need(held: bool, otherwise: str) -> None:
    if not held:
        raise AssertionError(otherwise)
