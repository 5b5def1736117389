"""How many rows look up each bucket of each categorical feature, counted on the way.

A row counts once in each of the 26 tables. 8 bytes of memory for each bucket.
"""

import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import dp_sparse
from pipelines.criteo.methods import table_names


class LookupCounts:
    """Exact counts: private data.

    Args:
        vocabularies: Hash buckets of each categorical feature.

    Attributes:
        values: Counts of all tables, one table after the other; int64 `[buckets of all]`.
    """

    def __init__(self, vocabularies: Sequence[int]) -> None:
        self._sizes = tuple(vocabularies)
        self._begins = np.concatenate([[0], np.cumsum(self._sizes)])
        self.values = np.zeros(self._begins[-1], np.int64)

    def add(self, categories: npt.NDArray[np.int32]) -> None:
        """Counts rows, `[rows, features]`."""
        places = (categories + self._begins[:-1]).ravel()
        if len(places) * 8 < len(self.values):  # few rows: a whole array of counts would cost more
            np.add.at(self.values, places, 1)
        else:
            self.values += np.bincount(places, minlength=len(self.values))

    def histogram(self, noise_multiplier: float, data: str) -> dp_sparse.NoisyHistogram:
        """The counts with noise, by the names of the model's tables."""
        names = table_names(len(self._sizes))
        bounds = zip(self._begins[:-1], self._begins[1:], strict=True)
        counts = {n: self.values[a:b] for n, (a, b) in zip(names, bounds, strict=True)}
        sizes = dict(zip(names, self._sizes, strict=True))
        return dp_sparse.histogram_of_counts(counts, sizes, noise_multiplier, data=data)


def saved(histogram: dp_sparse.NoisyHistogram) -> bytes:
    """The bytes of its file, for file systems on which it cannot save itself."""
    file = io.BytesIO()
    histogram.write(file)
    return file.getvalue()
