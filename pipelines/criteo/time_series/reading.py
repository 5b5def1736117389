"""Makes a period's examples ready: memory-mapped records, or batches drawn before training.

Both give its N, a Poisson sampler and a data source, and a noisy histogram of its lookups where
one is wanted, for the caller to keep. Records are read at random; drawn batches in the order of
their steps, as terabytes need it (`docs/streams.md`).
"""

import abc
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
import tensorflow as tf

import dp_sparse
from pipelines.criteo.histograms import LookupCounts
from pipelines.criteo.parse import parse_lines
from pipelines.criteo.prepare.job import HISTOGRAM, new_job
from pipelines.criteo.records import PrepareError, Tally, prepared_in
from pipelines.criteo.schema import RECORD_DTYPE, examples_from_fields, examples_from_records
from pipelines.criteo.shards import blocks_of
from pipelines.criteo.time_series.days import Period
from pipelines.files import state_file


class JoinedRecords:
    """The examples of several record files, one after the other, by their index."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [np.memmap(path, RECORD_DTYPE, mode="r") for path in paths]
        self._begins = np.cumsum([0, *map(len, self._files)])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def gather(self, indices: np.ndarray) -> tuple[Any, ...]:
        """The examples at `indices`, int64 `[n]`."""
        found = np.empty(len(indices), RECORD_DTYPE)
        of_file = np.searchsorted(self._begins, indices, side="right") - 1
        for number, records in enumerate(self._files):
            own = of_file == number
            found[own] = records[indices[own] - self._begins[number]]
        return examples_from_records(found)

    def counts(self, vocabularies: Sequence[int]) -> LookupCounts:
        """How many examples look up each row."""
        counts = LookupCounts(vocabularies)
        for records in self._files:
            for start in range(0, len(records), 2**16):
                counts.add(np.asarray(records["categories"][start : start + 2**16]))
        return counts


class Reader(abc.ABC):
    """How a run reads its periods.

    Args:
        config: Of the run.
        folder: Of the run.
    """

    def __init__(self, config: ml_collections.ConfigDict, folder: Path) -> None:
        self.config, self.folder = config, folder

    def folder_of(self, period: Period) -> Path:
        """Where a period keeps what belongs to it."""
        return self.folder / f"period-{period.number:03d}"

    def steps(self, num_examples: int) -> dict[str, float]:
        """Batch size and epochs, for a sampler of so many examples."""
        settings = self.config.training
        batch = min(settings.batch_size, num_examples)
        return {"expected_batch_size": batch, "epochs": max(settings.epochs, batch / num_examples)}

    @abc.abstractmethod
    def count(self, period: Period) -> int:
        """N of a period: its well-formed rows."""

    @abc.abstractmethod
    def digests(self, period: Period) -> list[str]:
        """A digest of the rows of each of its files, once it is prepared."""

    @abc.abstractmethod
    def prepare(self, period: Period, histogram_noise: float | None, counted: int | None) -> None:
        """Makes the period ready, with what a histogram of this noise needs, if there is one."""

    @abc.abstractmethod
    def histogram(
        self, period: Period, noise: float, counted: int | None
    ) -> dp_sparse.NoisyHistogram:
        """That of a prepared period: of its first `counted` files, or of all."""

    @abc.abstractmethod
    def sampling(self, period: Period) -> dp_sparse.PoissonSampling:
        """How batches of a prepared period are drawn."""

    @abc.abstractmethod
    def batches(
        self, period: Period, plan: dp_sparse.PrivacyPlan, first_step: int
    ) -> tf.data.Dataset:
        """The batches of a prepared period from a step on."""

    def claim(self, period: Period) -> str | None:
        """Which process's run the batches serve, once they are asked for; None if each draws."""
        return None

    def begin_anew(self, period: Period, claim: str) -> None:
        """Takes away this claim, of a process of which nobody has seen anything."""
        raise AssertionError(f"{period.name} has no claim to take away: {claim}")


class RecordReader(Reader):
    """Each day as a file of records, read at random."""

    def count(self, period: Period) -> int:
        """Prepares its records."""
        return sum(self._prepared(path).num_records for path in period.files)

    def digests(self, period: Period) -> list[str]:
        """Of the records."""
        found = []
        for path in period.files:
            with self._prepared(path).path.open("rb") as file:
                found.append(hashlib.file_digest(file, "sha256").hexdigest())
        return found

    def prepare(self, period: Period, histogram_noise: float | None, counted: int | None) -> None:
        """Prepares its records."""
        self.count(period)

    def histogram(
        self, period: Period, noise: float, counted: int | None
    ) -> dp_sparse.NoisyHistogram:
        """Counts lookups and draws noise, at each call."""
        first = list(period.files)[:counted]
        joined = JoinedRecords([self._prepared(path).path for path in first])
        counts = joined.counts(self.config.data.vocabularies)
        return counts.histogram(noise, _counted(period, counted))

    def sampling(self, period: Period) -> dp_sparse.PoissonSampling:
        """Of all its records."""
        count = self.count(period)
        return dp_sparse.PoissonSampling(count, **self.steps(count))

    def source(self, period: Period) -> JoinedRecords:
        """All its records."""
        return JoinedRecords([self._prepared(path).path for path in period.files])

    def batches(
        self, period: Period, plan: dp_sparse.PrivacyPlan, first_step: int
    ) -> tf.data.Dataset:
        """Drawn anew, whatever was drawn before."""
        del first_step
        return plan.sampling.batches(self.source(period))

    def _prepared(self, path: Path) -> Any:
        return prepared_in(self.folder / "records", path, self.config.data.vocabularies)


class DrawnReader(Reader):
    """Each period as batches that a preparation on Apache Beam draws."""

    def count(self, period: Period) -> int:
        """Reads the rows once, unless they were counted."""
        return sum(self._tallies(period))

    def digests(self, period: Period) -> list[str]:
        """Of the decompressed lines, from the manifest."""
        return list(self._source(period).manifest.about["digests"])

    def prepare(self, period: Period, histogram_noise: float | None, counted: int | None) -> None:
        """Runs the preparation, or the rest of it."""
        from pipelines.criteo.prepare.run import prepare  # needs apache-beam

        count = self.count(period)
        steps = self.steps(count)
        job = new_job(
            [str(path) for path in period.files],
            str(self._batches(period)),
            num_examples=count,
            batch_size=steps["expected_batch_size"],
            epochs=steps["epochs"],
            vocabularies=self.config.data.vocabularies,
            histogram_noise=histogram_noise,
            counted=counted,
        )
        prepare(job, list(self.config.data.beam))

    def histogram(
        self, period: Period, noise: float, counted: int | None
    ) -> dp_sparse.NoisyHistogram:
        """The one that the preparation drew."""
        drawn = dp_sparse.NoisyHistogram.load(self._batches(period) / HISTOGRAM)
        return dataclasses.replace(drawn, data=_counted(period, counted))

    def sampling(self, period: Period) -> dp_sparse.PoissonSampling:
        """That of the draw."""
        return dp_sparse.offline_sampling(self._source(period))

    def batches(
        self, period: Period, plan: dp_sparse.PrivacyPlan, first_step: int
    ) -> tf.data.Dataset:
        """Read in the order of the steps."""
        sampling: Any = plan.sampling
        return sampling.batches(self._source(period), first_step=first_step)

    def claim(self, period: Period) -> str | None:
        """What the folder of the batches says."""
        return self._claim(period).read_text()

    def begin_anew(self, period: Period, claim: str) -> None:
        """Others stay: anyone who has them may have trained on the batches."""
        path = self._claim(period)
        if path.exists() and path.read_text() == claim:
            path.unlink()

    def _claim(self, period: Period) -> Path:
        return self._batches(period) / "plan.json"

    def _batches(self, period: Period) -> Path:
        return self.folder_of(period) / "batches"

    def _source(self, period: Period) -> dp_sparse.OfflineBatches:
        return dp_sparse.OfflineBatches(str(self._batches(period)), examples_from_fields)

    def _tallies(self, period: Period) -> list[int]:
        """Well-formed rows of each file, kept beside the period."""
        kept = state_file(self.folder_of(period) / "counts.json")
        if not kept.exists():
            sizes = self.config.data.vocabularies
            kept.write([_well_formed(path, sizes) for path in period.files])
        return kept.read(list)


READERS: Mapping[str, Callable[[ml_collections.ConfigDict, Path], Reader]] = {
    "records": RecordReader,
    "drawn": DrawnReader,
}


def refuse_repeated(digests: Mapping[str, Sequence[str]], period: Period) -> None:
    """Raises PrepareError if a file of `period` has the rows of another one of these.

    Args:
        digests: Of the files of each period so far, by its name, with those of `period`.
        period: The one that was read last.
    """
    own = list(digests[period.name])
    twice = [path for path, digest in zip(period.files, own, strict=True) if own.count(digest) > 1]
    if twice:
        raise PrepareError(
            f"Expected rows of its own in each file, got the same ones in {twice[0]} and "
            f"{twice[1]}: leave one out."
        )
    for name, others in digests.items():
        for path, digest in zip(period.files, own, strict=True):
            if name != period.name and digest in others:
                raise PrepareError(
                    f"Expected rows of its own in each period, got in {path} those of a file of "
                    f"{name}: an example in two periods would pay in both. Leave one out."
                )


def _counted(period: Period, counted: int | None) -> str:
    return period.name if counted is None else f"day {period.days[0]}"


def _well_formed(path: Path, vocabularies: Sequence[int]) -> int:
    tally = Tally()
    for block in blocks_of(str(path)):
        tally.add(parse_lines(block, vocabularies).reasons)
    if not tally.records:
        raise PrepareError(
            f"Expected rows in {path}, got {tally.lines} lines and none that is well-formed: get "
            "the file again, or leave the day out of data.days with those behind it."
        )
    return tally.records
