"""Type checkers know what the adapters return and take. ``make types`` checks this file; the lines also run."""

from typing import Any, assert_type

import pytest
from agents import Agent, Runner

from runguard import MaxIterationsTermination, PolicyError
from runguard.core.decision import Trip
from runguard.langchain import RunGuardMiddleware
from runguard.openai_agents import AgentGuard, GuardedAgent, guarded
from runguard.pydantic_ai import RunGuard
from runguard.testing.conformance import AgentSpec, Reply
from tests.frameworks.openai_harness import ScriptedModel


class Customer:
    """The context of a run."""


def scripted(name: str = "worker") -> Agent[Customer]:
    return Agent[Customer](name=name, model=ScriptedModel(AgentSpec(lambda n, _: Reply("done")), [0]))


async def test_a_guarded_agent_has_a_typed_guard() -> None:
    agent = guarded(scripted(), max_model_calls=1, termination_condition=MaxIterationsTermination(5))
    assert_type(agent, GuardedAgent[Customer])
    assert_type(agent.runguard, AgentGuard)
    assert_type(agent.runguard.trips, list[Trip])
    result = await Runner.run(agent, "go", context=Customer())
    assert (result.final_output, agent.runguard.spend()["calls"]) == ("done", 1)
    assert_type(AgentGuard(max_usd=1).guarded(scripted()), GuardedAgent[Customer])


async def test_a_clone_keeps_the_guard() -> None:
    agent = guarded(scripted(), app="docs")
    helper = scripted("helper")
    clone = agent.clone(name="copy", handoffs=[helper])
    assert_type(clone, GuardedAgent[Customer])
    assert clone.runguard is agent.runguard
    assert clone.handoffs == [agent.runguard.guarded(helper)]
    await Runner.run(clone, "go", context=Customer())
    assert clone.runguard.spend()["calls"] == 1


def test_wrong_settings_are_rejected_by_type_checkers_and_at_run_time() -> None:
    agent: Any = scripted()
    with pytest.raises(PolicyError):
        guarded(agent, max_usdd=1)  # type: ignore[call-arg]
    with pytest.raises(PolicyError):
        guarded(agent, mode="shadows")  # type: ignore[arg-type]
    with pytest.raises(PolicyError):
        RunGuard(mode="shadows")  # type: ignore[arg-type]
    with pytest.raises(PolicyError):
        RunGuardMiddleware(termination_condition="done")  # type: ignore[arg-type]
