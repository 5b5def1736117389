"""Every attack of the catalogue is refused in time, or measured to have a sensitivity of 1."""

import pytest

from tests.attacks.catalogue import CATALOGUE
from tests.attacks.entries import Entry, outcome

_OWN = [(entry, way) for entry in CATALOGUE for way in entry.ways]
_OTHERS = [(entry, way) for entry in CATALOGUE for way in entry.others()]


def _named(pairs: list[tuple[Entry, str]]) -> list[str]:
    return [f"{entry.name}: {way}" for entry, way in pairs]


def _check(entry: Entry, way: str, request: pytest.FixtureRequest) -> None:
    if not entry.noisy:
        request.getfixturevalue("no_noise")
    found = entry.expected_on(way).problem(outcome(entry, way))
    assert found is None, found


@pytest.mark.cases(45)
@pytest.mark.parametrize(("entry", "way"), _OWN, ids=_named(_OWN))
def test_on_its_own_ways(entry: Entry, way: str, request: pytest.FixtureRequest) -> None:
    _check(entry, way, request)


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "way"), _OTHERS, ids=_named(_OTHERS))
def test_on_every_other_way(entry: Entry, way: str, request: pytest.FixtureRequest) -> None:
    _check(entry, way, request)
