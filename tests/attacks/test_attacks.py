"""Every attack of the catalogue is refused in time, or measured to have a sensitivity of 1."""

import pytest

from tests.attacks.catalogue import CATALOGUE
from tests.attacks.entries import Entry, outcome

_OWN = [(entry, road) for entry in CATALOGUE for road in entry.roads]
_OTHERS = [(entry, road) for entry in CATALOGUE for road in entry.others()]


def _named(pairs: list[tuple[Entry, str]]) -> list[str]:
    return [f"{entry.name}: {road}" for entry, road in pairs]


def _check(entry: Entry, road: str, request: pytest.FixtureRequest) -> None:
    if not entry.noisy:
        request.getfixturevalue("no_noise")
    found = entry.expected_on(road).problem(outcome(entry, road))
    assert found is None, found


@pytest.mark.parametrize(("entry", "road"), _OWN, ids=_named(_OWN))
def test_on_its_own_roads(entry: Entry, road: str, request: pytest.FixtureRequest) -> None:
    _check(entry, road, request)


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "road"), _OTHERS, ids=_named(_OTHERS))
def test_on_every_other_road(entry: Entry, road: str, request: pytest.FixtureRequest) -> None:
    _check(entry, road, request)
