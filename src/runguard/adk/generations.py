"""An installed guard whose policy is replaced while the process runs: one plugin per policy, one of them in charge.

Runners keep the plugin that was put into them, and runs in flight finish on the plugin they began with. So every hook
asks which plugin a call belongs to. Without a replacement nothing is asked.
"""

from typing import TYPE_CHECKING, Any

from runguard.adk.invocations import STREAM, enclosing_frame

if TYPE_CHECKING:
    from runguard.adk.plugin import RunGuardPlugin


class Generations:
    """The newest plugin, and the older ones that still have runs."""

    __slots__ = ("_plugins",)

    def __init__(self, first: "RunGuardPlugin") -> None:
        # newest first; replaced as a whole, so that other threads see all of it
        self._plugins: tuple[RunGuardPlugin, ...] = (first,)

    @property
    def newest(self) -> "RunGuardPlugin":
        return self._plugins[0]

    def add(self, plugin: "RunGuardPlugin") -> None:
        """``plugin`` is in charge from now on. Older ones without runs are forgotten."""
        plugin.generations = self
        self._plugins = (plugin, *(older for older in self._plugins if older.has_runs()))

    def of(self, invocation_id: str) -> "RunGuardPlugin":
        """The plugin of a known invocation, else that of the tool call or the runner around it, else the newest."""
        plugins = self._plugins
        for plugin in plugins:
            if plugin.find_invocation(invocation_id) is not None:
                return plugin
        stream = STREAM.get()
        if stream is not None and stream.plugin is not None and stream.plugin.generations is self:
            return stream.plugin
        return self.here()

    def here(self) -> "RunGuardPlugin":
        """The plugin of a run that begins here: that of the tool call around it, else the newest."""
        for plugin in self._plugins:
            if enclosing_frame(plugin.guard) is not None:
                return plugin
        return self.newest

    def put_in(self, plugins: list[Any], listed: "RunGuardPlugin") -> None:
        """Replace an older plugin in a Runner's list, unless it still has runs: their hooks are called through the
        list.
        """
        if listed is not self.newest and not listed.has_runs():
            plugins[plugins.index(listed)] = self.newest


def invocation_of(given: dict[str, Any]) -> str:
    """The invocation that a hook is called for, from its keyword arguments."""
    context = given.get("callback_context") or given.get("tool_context") or given.get("invocation_context")
    return getattr(context, "invocation_id", "") or ""
