"""What a type checker must reject: every line that ends in a comment "wrong"."""

import runguard
from runguard import GuardedLlm
from runguard.adk import RunGuardPlugin


def call_model(prompt: str) -> str:
    return prompt


RunGuardPlugin(max_usdd=0.5)  # type: ignore[call-arg]  # wrong
RunGuardPlugin(mode="shadows")  # type: ignore[arg-type]  # wrong
RunGuardPlugin(max_model_calls="ten")  # type: ignore[arg-type]  # wrong
RunGuardPlugin(rules={"stall": True})  # type: ignore[dict-item]  # wrong
runguard.install(max_usdd=1)  # type: ignore[call-arg]  # wrong
runguard.install(on_outage="opened")  # type: ignore[arg-type]  # wrong
GuardedLlm("gemini-2.5-flash", max_dollars=1)  # type: ignore[call-arg]  # wrong
runguard.guard(call_model, budgett={"max_usd": 2.0})  # type: ignore[call-overload]  # wrong
runguard.guard(call_model, max_tool_calls=3)  # type: ignore[call-overload]  # wrong
runguard.guard_async(call_model, on_stop="never")  # type: ignore[call-overload]  # wrong
number: int = runguard.guard(call_model)("hello")  # type: ignore[assignment]  # wrong
runguard.guard(call_model).spent()  # type: ignore[attr-defined]  # wrong
runguard.guard(call_model).extend(dollars=1)  # type: ignore[call-arg]  # wrong
