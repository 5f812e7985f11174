"""An installed guard whose policy is replaced while the process runs: one plugin per policy.

Runners keep the plugin that they got, and runs in flight finish on the plugin that they started with. So every hook
looks up the plugin of its run. Without a replacement there is no lookup.
"""

from typing import TYPE_CHECKING, Any

from runguard.adk.context import HERE, enclosing_tool

if TYPE_CHECKING:
    from runguard.adk.plugin import RunGuardPlugin


class Generations:
    """The newest plugin, and the older ones that still have runs."""

    __slots__ = ("_plugins",)

    def __init__(self, first: "RunGuardPlugin") -> None:
        # newest first; replaced as a whole, so that other threads see all of it
        self._plugins: tuple[RunGuardPlugin, ...] = (first,)
        first.invocations.owner = first

    @property
    def newest(self) -> "RunGuardPlugin":
        return self._plugins[0]

    def add(self, plugin: "RunGuardPlugin") -> None:
        """``plugin`` gets new runs from now on. Older plugins without runs are dropped."""
        plugin.generations = self
        plugin.invocations.owner = plugin
        self._plugins = (plugin, *(older for older in self._plugins if older.invocations.known))

    def of(self, invocation_id: str) -> "RunGuardPlugin":
        """The plugin of a known invocation, else that of the tool call or the runner around it, else the newest."""
        plugins = self._plugins
        for plugin in plugins:
            if plugin.invocations.find(invocation_id) is not None:
                return plugin
        stream = HERE.get().stream
        owner: RunGuardPlugin | None = (
            stream.registry.owner if stream is not None and stream.registry is not None else None
        )
        if owner is not None and owner.generations is self:
            return owner
        return self.here()

    def here(self) -> "RunGuardPlugin":
        """The plugin of a run that starts here: that of the tool call around it, else the newest."""
        for plugin in self._plugins:
            if enclosing_tool(plugin.guard) is not None:
                return plugin
        return self.newest

    def put_in(self, plugins: list[Any], listed: "RunGuardPlugin") -> None:
        """Replace an older plugin in a Runner's list, unless it has runs: ADK calls their hooks through the list."""
        if listed is not self.newest and not listed.invocations.known:
            plugins[plugins.index(listed)] = self.newest


def invocation_of(given: dict[str, Any]) -> str:
    """The invocation that a hook is called for, from its keyword arguments."""
    context = given.get("callback_context") or given.get("tool_context") or given.get("invocation_context")
    return getattr(context, "invocation_id", "") or ""
