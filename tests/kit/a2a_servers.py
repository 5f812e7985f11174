"""Real A2A servers on loopback: ``to_a2a`` of ADK, served by uvicorn in a thread."""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from google.adk.a2a.utils.agent_to_a2a import to_a2a
from google.adk.agents import BaseAgent
from google.adk.agents.remote_a2a_agent import RemoteA2aAgent
from google.adk.apps import App
from google.adk.runners import InMemoryRunner
from starlette.middleware.authentication import AuthenticationMiddleware


@contextmanager
def a2a_server(agent: BaseAgent, plugin: Any = None, port: int = 0) -> Iterator[str]:
    """Serve an agent, with or without a guard. Yields the address of its card."""
    with serving(agent, plugin, port) as (card, _):
        yield card


@contextmanager
def serving(
    agent: BaseAgent, plugin: Any = None, port: int = 0, users: Any = None
) -> Iterator[tuple[str, uvicorn.Server]]:
    """As ``a2a_server``, with the server. ``users``: the backend that authenticates requests."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", port))
    port = listening.getsockname()[1]
    logging.getLogger("a2a").setLevel(logging.ERROR)
    plugins = [plugin] if plugin is not None else []
    runner = InMemoryRunner(app=App(name=agent.name, root_agent=agent, plugins=plugins))
    app = to_a2a(agent, host="127.0.0.1", port=port, runner=runner)
    if users is not None:
        app.add_middleware(AuthenticationMiddleware, backend=users)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    assert server.started, "the A2A server did not start"
    try:
        yield f"http://127.0.0.1:{port}/.well-known/agent-card.json", server
    finally:
        server.should_exit = True
        thread.join(10)
        listening.close()


def remote(card: str, name: str = "remote", **options: Any) -> RemoteA2aAgent:
    """The agent behind a card."""
    return RemoteA2aAgent(name=name, description="works elsewhere", agent_card=card, **options)
