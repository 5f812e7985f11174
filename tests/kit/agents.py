"""Agents that several tests use."""

from typing import Any

from google.adk.agents import LlmAgent
from google.adk.models import BaseLlm

from runguard.testing import ScriptedModel
from tests.kit.topologies import step


def stepping(script: Any, *, name: str = "worker", **options: Any) -> LlmAgent:
    """An agent with the tool ``step`` and this script, or this model."""
    model = script if isinstance(script, BaseLlm) else ScriptedModel(script, **options)
    return LlmAgent(name=name, description=name, model=model, tools=[step])


def scripted(agent: LlmAgent) -> ScriptedModel:
    """The scripted model of an agent, with what it counted."""
    assert isinstance(agent.model, ScriptedModel)
    return agent.model
