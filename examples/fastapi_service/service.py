"""A service in which each user may spend so much a day, over all workers that share a store.

    python examples/fastapi_service

    curl -X POST localhost:8000/ask -H 'Content-Type: application/json' -d '{"user": "alice", "question": "How far
    is the moon?"}' curl localhost:8000/users/alice/budget

Two workers share a SQLite file, guard.db. For many machines name a server instead: RUNGUARD_STORE=redis://localhost:6379/0.
DAILY_USD is a user's day (0.05), PORT and WORKERS are what they say. With GOOGLE_API_KEY set it is Gemini that answers,
else a script.
"""

import asyncio
import os
import uuid
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from google.adk.agents import LlmAgent
from google.adk.apps import App
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types
from pydantic import BaseModel, Field

import runguard
from runguard import Budget
from runguard.adk import RunGuardPlugin
from runguard.testing import ScriptedModel, text

APP = "service"
DAILY_USD = os.environ.get("DAILY_USD", "0.05")

guard = RunGuardPlugin(
    store="sqlite:///guard.db",  # RUNGUARD_STORE, where it is set, wins
    budgets=[Budget(usd=DAILY_USD, per="user", window="1d")],
    max_usd="0.02",  # and no single question may cost more
    min_output_tokens=200,  # an answer may be cut down to this before a question is refused
)
agent = LlmAgent(
    name="astronomer",
    model="gemini-2.5-flash"
    if os.environ.get("GOOGLE_API_KEY")
    else ScriptedModel([text("384,400 km.")], model="gemini-2.5-flash"),
    instruction="Answer in one sentence.",
    # With a limit to each answer, the most that a call can cost is known before it is made.
    generate_content_config=types.GenerateContentConfig(max_output_tokens=250),
)
runner = Runner(app=App(name=APP, root_agent=agent, plugins=[guard]), session_service=InMemorySessionService())
api = FastAPI(title="Guarded")


class Question(BaseModel):
    user: str = Field(pattern=r"^[\w.-]{1,64}$")  # in earnest: from your authentication, never from the body
    question: str = Field(min_length=1, max_length=2_000)


@api.post("/ask")
async def ask(asked: Question) -> JSONResponse:
    session = await runner.session_service.create_session(app_name=APP, user_id=asked.user, session_id=uuid.uuid4().hex)
    answer, stopped = "", None
    async for event in runner.run_async(
        user_id=asked.user, session_id=session.id, new_message=types.UserContent(asked.question)
    ):
        stopped = runguard.trip(event) or stopped
        if stopped is None and event.is_final_response() and event.content and event.content.parts:
            answer = "".join(part.text or "" for part in event.content.parts)
    if stopped is None:
        return JSONResponse({"answer": answer})
    if stopped.rule != "budget":
        return JSONResponse({"stopped": stopped.to_dict()}, status_code=503)
    statuses = await asyncio.to_thread(guard.budgets, stopped.scope_id)  # on a thread: a store is asked
    ends = next((status.ends for status in statuses if status.ends), None)
    wait = {"Retry-After": str(max(1, round(ends - stopped.at)))} if ends else {}
    return JSONResponse({"stopped": stopped.to_dict()}, status_code=402, headers=wait)


@api.get("/users/{user}/budget")
def budget(user: str) -> dict[str, Any]:
    """Return what is left of the user's day, whichever worker is asked.

    It is a plain function: the store is asked on a thread.
    """
    guard.flush()  # what this worker has settled has reached the store
    for status in guard.budgets(f"user:{APP}/{user}"):
        return {
            "spent": str(status.spent),
            "reserved": str(status.reserved),
            "limit": str(status.limit),
            "remaining": str(status.remaining),
        }
    return {"spent": "0", "reserved": "0", "limit": DAILY_USD, "remaining": DAILY_USD}
