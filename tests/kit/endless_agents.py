"""Agents that never finish by themselves."""

from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig

from runguard.testing import ScriptedModel, call
from tests.kit.money import agent
from tests.kit.tools import step


def endless(**options: Any) -> ScriptedModel:
    """Steps for ever, each with a new answer."""
    return ScriptedModel(lambda n, _: call("step", q=n), **options)


def worker(name: str = "a", model: Any = None, **options: Any) -> LlmAgent:
    return agent(name, model or endless(), tools=[step], **options)


def options(**given: Any) -> RunConfig:
    return RunConfig(custom_metadata={"runguard": given})
