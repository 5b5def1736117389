"""Events survive a round trip through JSON, and a name that is no event is refused."""

import json

import dp_accounting
import pytest

from dp_sparse.accounting.events import (
    GumbelTopKDpEvent,
    PureDpEvent,
    event_config,
    event_from_config,
)

EVENTS = [
    dp_accounting.GaussianDpEvent(1.5),
    dp_accounting.LaplaceDpEvent(2.0),
    dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0)), 7
    ),
    dp_accounting.ComposedDpEvent(
        (dp_accounting.GaussianDpEvent(1.0), dp_accounting.LaplaceDpEvent(3.0))
    ),
    GumbelTopKDpEvent(scale=20.0, lookups=26, selected=100),
    PureDpEvent(0.25),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_round_trip(event: dp_accounting.DpEvent) -> None:
    assert event_from_config(json.loads(json.dumps(event_config(event)))) == event


@pytest.mark.parametrize("name", ["NoSuchDpEvent", "PrivacyAccountant", "__name__"])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="Expected the name of a dp-accounting event"):
        event_from_config({"event": name, "fields": {}})
