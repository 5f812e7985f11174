"""What every rule looks like."""

from typing import Any, ClassVar, Protocol

from runguard.core.decision import Finding


class Detector(Protocol):
    """``sees`` names the event types that it observes.

    Most events are plain: a model is called, its response calls tools and says nothing, the tools are no agents, and
    their answers are new, count and are no failures. A detector that most of these do not concern also has ``rests``,
    the types of events of which a plain one changes nothing while its ``record`` is empty, and ``record``, always the
    same object. It is not called for such events; ``runguard.conductor.dispatch`` sees to that.
    """

    sees: ClassVar[tuple[type, ...]]

    def observe(self, event: Any, /) -> Finding | None: ...
