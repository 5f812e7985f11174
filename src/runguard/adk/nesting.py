"""Agents of other frameworks that a tool of an ADK agent starts: they join the run of the ADK agent."""

from runguard.adk.context import HERE
from runguard.calls.model_calls import Layer, Place, register


def _place() -> Place | None:
    """The ADK tool calls around the running code, from the outermost guard to the innermost."""
    tool = innermost = HERE.get().tool
    if innermost is None:
        return None
    layers: list[Layer] = []
    while tool is not None:
        if all(layer.guard is not tool.guard for layer in layers):
            layers.insert(0, Layer(tool.guard, tool.invocation.run, tool.lane))
        tool = tool.outer
    return Place(tuple(layers), f"{innermost.name}@{innermost.call_id}", innermost.depth + 1)


register(_place)
