"""Events survive a round trip through JSON, and a name that is no event is refused."""

import json
from typing import Any

import dp_accounting
import pytest

from dp_sparse.accounting.accountant import epsilon_of
from dp_sparse.accounting.events import (
    DeltaDpEvent,
    GumbelTopKDpEvent,
    PureDpEvent,
    checked_event,
    event_config,
    event_from_config,
)
from dp_sparse.accounting.mechanisms import Release

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
    DeltaDpEvent(1e-6),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_round_trip(event: dp_accounting.DpEvent) -> None:
    assert event_from_config(json.loads(json.dumps(event_config(event)))) == event


@pytest.mark.parametrize("name", ["NoSuchDpEvent", "PrivacyAccountant", "__name__"])
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="Expected the name of a dp-accounting event"):
        event_from_config({"event": name, "fields": {}})


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_what_the_accountant_can_take_stays_as_it_is(event: dp_accounting.DpEvent) -> None:
    assert checked_event(event) == event


def test_lists_become_tuples() -> None:
    gaussian = dp_accounting.GaussianDpEvent(1.0)
    listed = dp_accounting.ComposedDpEvent([dp_accounting.ComposedDpEvent([gaussian]), gaussian])
    found = Release("both", listed).event
    assert found == dp_accounting.ComposedDpEvent(
        (dp_accounting.ComposedDpEvent((gaussian,)), gaussian)
    )
    assert epsilon_of(found, 1e-5, 1e-3) > epsilon_of(gaussian, 1e-5, 1e-3)


@pytest.mark.parametrize(
    ("event", "match"),
    [
        ("gaussian", "Expected an event of dp-accounting, .* got 'gaussian'"),
        (
            dp_accounting.ComposedDpEvent(
                [dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(1.0), 0)]
            ),
            "count >= 1, got SelfComposedDpEvent",
        ),
    ],
)
def test_a_release_without_an_event_to_count_is_refused(event: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Release("histogram", event)
