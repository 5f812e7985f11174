"""What a type checker must reject: every line that ends in a comment "wrong"."""

import runguard
from runguard import GuardedLlm
from runguard.adk import RunGuardPlugin


def call_model(prompt: str) -> str:
    return prompt


RunGuardPlugin(max_usdd=0.5)  # wrong
RunGuardPlugin(mode="shadows")  # wrong
RunGuardPlugin(max_model_calls="ten")  # wrong
RunGuardPlugin(rules={"stall": True})  # wrong
runguard.install(max_usdd=1)  # wrong
runguard.install(on_outage="opened")  # wrong
GuardedLlm("gemini-2.5-flash", max_dollars=1)  # wrong
runguard.guard(call_model, budgett={"max_usd": 2.0})  # wrong
runguard.guard(call_model, max_tool_calls=3)  # wrong
runguard.guard_async(call_model, on_stop="never")  # wrong
number: int = runguard.guard(call_model)("hello")  # wrong
runguard.guard(call_model).spent()  # wrong
runguard.guard(call_model).extend(dollars=1)  # wrong
