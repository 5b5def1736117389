"""Events that dp-accounting does not have, and all events as JSON-ready dictionaries.

A saved plan contains the releases that it pays for.
"""

from typing import Any

import attr
import dp_accounting


@attr.s(frozen=True, slots=True, auto_attribs=True)
class PureDpEvent(dp_accounting.DpEvent):
    """Any mechanism that is (ε, 0)-differentially private.

    ### Formal Guarantees
    Neighbouring datasets differ by one example added or removed. Any such mechanism is a
    post-processing of randomised response with the same ε (Kairouz, Oh and Viswanath, 2015), which
    is what the accountant composes.

    Attributes:
        epsilon: ε > 0.
    """

    epsilon: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class DeltaDpEvent(dp_accounting.DpEvent):
    """Any mechanism that is (0, δ)-differentially private.

    ### Formal Guarantees
    Neighbouring datasets differ by one example added or removed. Any such mechanism is a
    post-processing of one that tells the two apart with probability δ and is the same on both
    otherwise (Kairouz, Oh and Viswanath, 2015), which is what the accountant composes.

    Attributes:
        delta: δ in (0, 1).
    """

    delta: float


@attr.s(frozen=True, slots=True, auto_attribs=True)
class GumbelTopKDpEvent(dp_accounting.DpEvent):
    """The rows with the largest counts plus independent Gumbel(scale) noise, of all tables.

    ### Formal Guarantees
    Neighbouring datasets differ by one example added, removed or zeroed out; it adds 1 to at most
    `lookups` counts, and of all tables together `selected` rows are released, in any order.

    Attributes:
        scale: b > 0 of the noise, in counts.
        lookups: m, the most counts that one example takes part in.
        selected: k, rows released over all tables.
    """

    scale: float
    lookups: int
    selected: int


_OWN = {event.__name__: event for event in (DeltaDpEvent, GumbelTopKDpEvent, PureDpEvent)}


def checked_event(event: Any) -> dp_accounting.DpEvent:
    """The event with tuples for lists, as the accountant needs it.

    Raises:
        ValueError: It is no event, or repeats another one less than once.
    """
    if not isinstance(event, dp_accounting.DpEvent):
        raise ValueError(
            f"Expected an event of dp-accounting, such as GaussianDpEvent(100.0), got {event!r}."
        )
    if isinstance(event, dp_accounting.SelfComposedDpEvent) and event.count < 1:
        raise ValueError(f"Expected SelfComposedDpEvent with count >= 1, got {event!r}.")
    fields = {field.name: getattr(event, field.name) for field in attr.fields(type(event))}
    return attr.evolve(event, **{name: _checked_field(value) for name, value in fields.items()})


def _checked_field(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_checked_field, value))
    return checked_event(value) if isinstance(value, dp_accounting.DpEvent) else value


def event_config(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """A description from which `event_from_config` makes an equal event."""
    fields = {
        field.name: _encoded(getattr(event, field.name)) for field in attr.fields(type(event))
    }
    return {"event": type(event).__name__, "fields": fields}


def event_from_config(config: dict[str, Any]) -> dp_accounting.DpEvent:
    """The event that `event_config` described.

    Raises:
        ValueError: Neither dp-accounting nor this package has an event of that name.
    """
    kind = _OWN.get(config["event"]) or getattr(dp_accounting, config["event"], None)
    if not (isinstance(kind, type) and issubclass(kind, dp_accounting.DpEvent)):
        raise ValueError(f"Expected the name of a dp-accounting event, got {config['event']!r}.")
    return kind(**{name: _decoded(value) for name, value in config["fields"].items()})


def _encoded(value: Any) -> Any:
    if isinstance(value, dp_accounting.DpEvent):
        return event_config(value)
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return event_from_config(value)
    return tuple(_decoded(item) for item in value) if isinstance(value, list) else value
