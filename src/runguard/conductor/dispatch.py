"""Which detectors of a lane are called for an event."""

from collections.abc import Callable, Iterator, Sequence, Sized
from operator import itemgetter
from typing import Any, Final, NamedTuple

from runguard.core.decision import Finding
from runguard.core.rules.repetition import Detector

Observe = Callable[[Any], Finding | None]
_Pick = Callable[[Sequence[Any]], Sequence[Any]]


class Observers(NamedTuple):
    """The detectors that see one kind of event, in their order."""

    every: Sequence[Observe] = ()
    # For a plain event: those that do not rest, and the records of the others. While these are empty, they rest.
    awake: Sequence[Observe] = ()
    records: Sequence[Sized] = ()


NO_OBSERVERS: Final = Observers()
_PLANS_KEPT: Final = 256
_plans: Final[dict[tuple[type, ...], list[tuple[type, _Pick, _Pick, _Pick]]]] = {}  # policies are few


def dispatch(detectors: Sequence[Detector]) -> dict[type, Observers]:
    """By kind of event, the detectors that see it."""
    kinds = tuple([type(detector) for detector in detectors])
    plan = _plans.get(kinds)
    if plan is None:
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
        plan = _plans[kinds] = [*_planned(kinds)]
    observes = [detector.observe for detector in detectors]
    records = [getattr(detector, "record", ()) for detector in detectors]
    return {event: Observers(every(observes), awake(observes), kept(records)) for event, every, awake, kept in plan}


def _planned(kinds: Sequence[type[Detector]]) -> Iterator[tuple[type, _Pick, _Pick, _Pick]]:
    places: dict[type, list[int]] = {}
    for place, kind in enumerate(kinds):
        for event in kind.sees:
            places.setdefault(event, []).append(place)
    for event, every in places.items():
        resting = [place for place in every if event in getattr(kinds[place], "rests", ())]
        # a record that belongs to the class is always empty
        kept = [place for place in resting if getattr(kinds[place], "record", None) != ()]
        yield event, _pick(every), _pick([place for place in every if place not in resting]), _pick(kept)


def _pick(places: list[int]) -> _Pick:
    # of fewer than two places ``itemgetter`` would not give a sequence
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1) if places else slice(0, 0))
