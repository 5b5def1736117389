"""The interface of every sampler: an event, a neighbouring relation and fixed-shape batches.

`gathered_batches` makes a dataset of batches from indices, O(batch) a batch.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

from dp_sparse.core import PrivacyError, Registered, fingerprint, marked
from dp_sparse.sampling import data_source, held_out, input_guard, row_check
from dp_sparse.sampling.batch import (
    Marker,
    checked_weights,
    padded,
    presence,
    sampled_batch,
    tf_dtype,
)

Draws = Callable[[], Iterator[tuple[np.ndarray, Marker]]]
_NOBODY = Marker(0, 0, 0)


@dataclasses.dataclass(frozen=True)
class BatchPart:
    """One worker's part of the batches that all workers draw alike.

    Attributes:
        begin: The first place of each batch that is this worker's.
        end: The place after its last one.
        key: Of the draws of all workers, 128 bits, secret.
        nonce: The name of the pass, from `new_nonce`.
    """

    begin: int
    end: int
    key: int = dataclasses.field(repr=False)
    nonce: int


class Sampling(Registered, abc.ABC):
    """How the batches of a training run are drawn.

    Fields are public; datasets and seeds are call arguments. A subclass is a frozen dataclass.

    Attributes:
        num_examples: N, public.
        steps: How many batches a whole run has.
        expected_batch_size: What a sum over a batch is divided by. It is public, and never the
            realised size.
    """

    num_examples: int
    steps: int
    expected_batch_size: float

    def _set(self, name: str, validator: Callable[[str, Any], Any]) -> None:
        """Validates a field of the frozen dataclass, and keeps it as a plain number."""
        object.__setattr__(self, name, validator(name, getattr(self, name)))

    @property
    @abc.abstractmethod
    def batch_capacity(self) -> int:
        """The leading dimension of every batch, padding included."""

    @property
    @abc.abstractmethod
    def neighbouring(self) -> str:
        """The neighbouring relation, in the words of the statement."""

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """Sentences for the statement, one or two a line."""

    @property
    def steps_per_pass(self) -> int | None:
        """Batches of a pass, if batch t belongs to step t alone; None if batches are drawn."""
        return None

    @property
    def steps_per_round(self) -> int:
        """How many steps, from a multiple of that number on, have an example in one batch at most.

        1 where an example may join every batch.
        """
        return 1

    @property
    def steps_per_epoch(self) -> float | None:
        """Steps of an epoch, of a run that was planned in epochs; None of one planned in steps."""
        return self.steps_per_pass

    @property
    def not_private_seed(self) -> int | None:
        """What the keys of a run follow from, if they are no secret, for debugging; else None."""
        return None

    @property
    def composes(self) -> bool:
        """Whether the run draws its batches apart from every other run, so that their costs add."""
        return True

    def for_plan(self, fingerprint: int | None) -> "Sampling":
        """The sampler of the calibrated plan with this fingerprint, or of none yet."""
        del fingerprint
        return self

    def for_debugging(self) -> "Sampling":
        """The sampler of a run without privacy, which takes nothing from one that has it."""
        return self

    def resumed_at(self, source: Any, spent: int) -> int:
        """The step at which a run on the data source `source` continues after `spent` steps.

        Raises:
            PrivacyError: The plan pays for no step after these.
        """
        del source
        return spent

    @abc.abstractmethod
    def event(self, mechanism: dp_accounting.DpEvent, steps: int) -> dp_accounting.DpEvent:
        """The cost of running `mechanism` on each of `steps` batches."""

    @abc.abstractmethod
    def participations(self, steps: int) -> float:
        """The expected number of `steps` batches that one example joins."""

    def overflow_delta(self, epsilon: float, steps: int) -> float:
        """What the probability of a batch beyond its capacity adds to δ."""
        del epsilon, steps
        return 0.0

    @abc.abstractmethod
    def batches(self, source: Any) -> tf.data.Dataset:
        """The run's batches, of fixed shape, each with its marker."""

    @abc.abstractmethod
    def batches_of(
        self,
        source: Any,
        part: BatchPart,
        *,
        first_step: int,
        class_weight: dict[int, float] | None = None,
    ) -> tf.data.Dataset:
        """One worker's part of the run's batches from `first_step` on.

        `part.key` must be secret and new: it tells which examples are in a batch.
        """

    @property
    def drawn_by(self) -> dict[str, Any]:
        """The configuration without `epochs`, which no batch depends on."""
        return _without_epochs(self.get_config())

    @property
    def fingerprint(self) -> int:
        """The name of this configuration in every batch that it makes."""
        return fingerprint(self.drawn_by)


def _without_epochs(config: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _without_epochs(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name != "epochs"
    }


def gathered_batches(
    source: data_source.DataSource,
    draws: Draws,
    part: tuple[int, int],
    steps: int,
    class_weight: dict[int, float] | None = None,
) -> tf.data.Dataset:
    """`steps` batches; each time they are read, `draws` gives new indices and markers.

    Args:
        source: Where the examples come from.
        draws: For each batch the indices of its examples, int64 `[n]`, and its marker.
        part: Which places of a batch are made: the first, and the one after the last.
        steps: How many batches `draws` gives.
        class_weight: A factor for the sample weight of each label.
    """
    make = functools.partial(_gathered_batch, source, part, class_weight)

    def generate() -> Iterator[Any]:
        with marked():
            for index, (indices, mark) in enumerate(draws()):
                yield make(indices, mark, compared=row_check.due(index))

    signature = tf.nest.map_structure(
        lambda leaf: tf.TensorSpec(leaf.shape, tf_dtype(leaf)),
        make(np.zeros(0, np.int64), _NOBODY),
    )
    batches = tf.data.Dataset.from_generator(generate, output_signature=signature)
    batches = batches.apply(tf.data.experimental.assert_cardinality(steps)).prefetch(2)
    held_out.remember(batches, getattr(source, "examples", None))
    return input_guard.own(batches)


def _gathered_batch(
    source: data_source.DataSource,
    part: tuple[int, int],
    class_weight: dict[int, float] | None,
    indices: np.ndarray,
    mark: Marker,
    compared: bool = False,
) -> Any:
    if len(np.unique(indices)) != len(indices):
        raise PrivacyError(
            "Expected each example at most once in a batch, got one twice in batch "
            f"{mark.position} of the sampler: it would count more than clipping allows."
        )
    begin, end = part
    own = indices[begin:end]

    def gather(places: np.ndarray) -> tuple[Any, Any, Any]:
        return data_source.unpacked(source.gather(places))

    x, y, weights = gather(own)
    data_source.refuse_other_lengths({"x": x, "y": y, "sample_weight": weights}, len(own))
    if compared and not getattr(source, "in_order", False):
        what = f"gather of {type(source).__name__}"
        row_check.refuse_other_rows(gather, own, (x, y, weights), what)
    weights = checked_weights(weights, len(own), class_weight, y)
    x, y, weights = padded((x, y, weights), end - begin)
    present = presence(len(own), end - begin)
    return sampled_batch(x, y, weights, present, mark, begin)
