"""Sources whose rows depend on who else is asked for, and those whose rows do not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.core import PrivacyError, translated
from dp_sparse.sampling import offline_sampling, row_check
from tests.sampling import offline_folders

SIZE = 6
RECORD = np.dtype([("x", "<f4", (20,)), ("y", "<i4")])
WEIGHTS = np.random.default_rng(2).normal(size=(20, 3)).astype(np.float32)

Unpack = Callable[[np.ndarray], Any]
MIXING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "np.random": lambda x: x * np.random.default_rng().normal(size=(len(x), 1)),
    "the same numbers each time": lambda x: x * np.random.default_rng(3).normal(size=(len(x), 1)),
    "one for all": lambda x: np.repeat(x[:1], len(x), 0),
    "MixUp": lambda x: (x + x[::-1]) / 2,
    "pairs": lambda x: x + x[np.minimum(np.arange(len(x)) ^ 1, len(x) - 1)],
    "the largest": lambda x: x / x.max(),
    "the order": lambda x: x + np.arange(len(x))[:, None],
    "seldom": lambda x: x + (np.random.default_rng().random((len(x), 20)) < 0.05),
}
HONEST: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "scaled": np.log1p,
    "a product": lambda x: x @ WEIGHTS,
    "missing": lambda x: np.where(x > 0.5, np.nan, x),
    "text": lambda x: np.char.mod("%.3f", x).astype(object),
}


@pytest.fixture
def records(tmp_path: Path) -> Callable[[Any], dp_sparse.RecordFile]:
    """A file, read by a function of x."""
    held = np.zeros(SIZE, RECORD)
    held["x"] = np.random.default_rng(1).random((SIZE, 20))
    held.tofile(tmp_path / "records")
    return lambda change: dp_sparse.RecordFile(
        tmp_path / "records", RECORD, lambda r: (change(r["x"]) if len(r) else r["x"], r["y"])
    )


def read(source: Any, steps: int = 4) -> list[Any]:
    with translated():
        return list(dp_sparse.PoissonSampling(SIZE, SIZE, steps=steps).batches(source))


@pytest.mark.parametrize("name", MIXING)
def test_refused(records: Any, name: str) -> None:
    with pytest.raises(PrivacyError, match="to keep its row.*\n.*augment=f"):
        read(records(MIXING[name]))


@pytest.mark.parametrize("name", HONEST)
def test_allowed(tmp_path: Path, name: str) -> None:
    x = np.random.default_rng(1).random((SIZE, 20), np.float32)

    class Source:
        def __len__(self) -> int:
            return SIZE

        def gather(self, indices: np.ndarray) -> Any:
            return HONEST[name](x[indices]), np.zeros(len(indices))

    assert len(read(Source())) == 4


def test_a_source_that_reads_forwards_is_not_asked_again() -> None:
    asked: list[int] = []

    class Forwards:
        in_order = True

        def __len__(self) -> int:
            return SIZE

        def gather(self, indices: np.ndarray) -> Any:
            asked.extend(indices)
            return np.zeros((len(indices), 1)), np.zeros(len(indices))

    list(dp_sparse.StreamSampling(SIZE, 2).batches(Forwards()))
    assert asked == list(range(SIZE))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 64])
def test_pairs_are_parted(count: int) -> None:
    """Halves of neighbours would leave pairs together, and halves drawn by chance do at times."""
    drawn = [row_check._halves(count) for _ in range(40)]
    for one, other in drawn:
        assert sorted([*one, *other]) == list(range(count))
        assert any((place in one) != (place + 1 in one) for place in range(0, count - 1, 2))
        assert any((place in one) != (count - 1 - place in one) for place in range(count))
    assert count == 3 or len({tuple(one) for one, _ in drawn}) > 1


class TestOffline:
    """`unpack` of batches that were drawn before training."""

    MIXING: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "tf.random": lambda y: y + tf.random.normal([40], seed=3),
        "the same numbers each time": lambda y: y * np.arange(40),
        "pairs": lambda y: tf.reshape(tf.reverse(tf.reshape(y, [-1, 2]), [1]), [-1]),
        "the mean": lambda y: y - tf.reduce_mean(y),
        "Python": lambda y: tf.ensure_shape(tf.numpy_function(np.copy, [y], tf.float32), [40]),
    }

    @pytest.mark.parametrize("name", MIXING)
    def test_refused(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(PrivacyError, match="unpack of OfflineBatches.*\n.*augment=f"):
            self.read(tmp_path, self.MIXING[name])

    def test_allowed(self, tmp_path: Path) -> None:
        assert len(self.read(tmp_path, lambda y: 2 * y)) == 7

    def read(self, folder: Path, change: Callable[[Any], Any]) -> list[Any]:
        offline_folders.prepared(folder)
        source = dp_sparse.OfflineBatches(str(folder), lambda r: (r["x"], change(r["y"])))
        with translated():
            return list(offline_sampling(source, shared=True).batches(source))
