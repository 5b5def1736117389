"""Every attack of the catalogue is refused in time, or measured to have a sensitivity of 1."""

from collections.abc import Iterator

import pytest
import tensorflow as tf

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


@pytest.fixture
def unoptimised_graphs() -> Iterator[None]:
    """Graphs run as they were traced: TensorFlow's optimisers take a quarter of an entry's time."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


@pytest.mark.usefixtures("unoptimised_graphs")
@pytest.mark.parametrize(("entry", "way"), _OWN, ids=_named(_OWN))
def test_on_its_own_ways(entry: Entry, way: str, request: pytest.FixtureRequest) -> None:
    _check(entry, way, request)


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "way"), _OWN + _OTHERS, ids=_named(_OWN + _OTHERS))
def test_on_every_way_as_users_run_it(
    entry: Entry, way: str, request: pytest.FixtureRequest
) -> None:
    _check(entry, way, request)
