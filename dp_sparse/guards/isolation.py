"""Checks on real batches that what is measured of one example is its own.

Clipping bounds what one example adds to a sum; it bounds nothing if the example also changes what
is recorded of others. So what clipping reads (recorded inputs, cotangents, ids, losses) is compared
between the batch itself and other batches of its examples:

- half of the examples at their places, the others replaced by copies (in a whole check also the
  other way round): what is recorded of those that stayed must be the same to 2⁻¹⁶ of its size,
  since kernels of one shape round alike;
- up to 32 examples and one of them again, in another order, without the rest: neither the size of
  the batch nor the place in it may matter. Other shapes round in another way, which may switch a
  unit on or off, so it takes two examples that differ by more than a sixty-fourth;
- one example alone;
- in a whole check, both halves again in batches of training's own size, if the step is traced for a
  size that Python knows (XLA, embedding layers of TPUs);
- in a whole check, all of this again with random numbers for weights that are 0, which may hide
  all that is behind them;
- in a whole check, also both ways, up to 128 examples in such batches as the data need not have.
  Half of the examples stay at their places beside others whose numbers are all NaN, 10,000 times
  as large with either sign, 0 or infinite, and up to 32 examples have NaN in a third of their
  floats. One such example may switch on what mixes: a limit that no batch reached, the mean that
  fills a hole. Ids, class labels and numbers of which the model asserts something stay as they are
  (`restricted_arguments`), and NaN and infinity are left out where products of this machine let
  them through (`clipping.lets_nan_through`).

A whole check takes all parts of `at_once` examples, and all examples of a part up to 1,024, drawn
at random (up to 256 of them where weights that are 0 are replaced); another one a quarter of those
of one part, but 64 at least.
"""

import secrets
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dp_sparse.guards import rebatching, sketches
from dp_sparse.guards.rebatching import Rebatching
from dp_sparse.guards.sketches import RecordedPass, Sketcher

COUPLED = (
    "What training measures of one example depends on another example of its batch, on its place "
    "in it, or on the batch's size (seen at {}), so clipping would not bound its influence.\n"
    "Remove what mixes examples (batch statistics, contrastive or in-batch losses, a compute_loss "
    "that divides by the batch's own tokens: take ops.mean(losses * weights)), knows their "
    "order or number, or draws random numbers other than by keras.random with a seed generator.\n"
    "dp_sparse.check_model(model, (x, y)) makes the same check before training."
)
_HALF_PRECISION = 4.0  # times the tolerances of another shape in bfloat16 or float16
_SHARE, _LEAST = 4, 64  # a check that is not whole takes one in so many examples, at least so many
_MOST, _MOST_FILLED = 1024, 256  # examples of a part in a whole check
_SOME = 128  # examples among which some hold other values


class Isolation:
    """The checks of one pass, traced once for each signature of a batch.

    Args:
        model: What the pass runs.
        recorded: The pass, which draws random numbers by the seeds that it is given alone.
        of_data: Given its argument, of each leaf whether it holds inputs or labels.
        own_size: Whether the step is traced for a size of the batch that Python knows.
        at_once: The most examples of one pass; by default all.
    """

    def __init__(
        self,
        model: keras.Model,
        recorded: RecordedPass,
        of_data: Callable[[Any], Any],
        own_size: bool = False,
        at_once: int | None = None,
    ) -> None:
        self._model, self._recorded, self._of_data = model, recorded, of_data
        self._own_size, self._at_once = own_size, at_once
        self._sketchers: dict[Any, Sketcher] = {}

    def coupled(
        self, batch: Any, present: np.ndarray, seed: int, whole: bool, replica: int = 0
    ) -> str | None:
        """Where examples are seen to depend on one another, or None.

        Args:
            batch: The argument of the pass, nested arrays `[batch, ...]`.
            present: float32 `[batch]`, 0 for padding; a batch without examples proves nothing.
            seed: Which examples stay.
            whole: Whether to take all examples, and to try values that the batch does not hold.
            replica: The replica whose part of a batch it is.
        """
        size = self._at_once or len(present)
        parts = [slice(begin, begin + size) for begin in range(0, len(present), size)]
        parts = [part for part in parts if np.any(present[part] > 0)]
        if not whole:
            parts = [parts[np.random.default_rng([seed, 1]).integers(len(parts))]] if parts else []
        for part in parts:
            own = tf.nest.map_structure(lambda leaf, part=part: leaf[part], batch)
            found = self._of_part(own, present[part], _Setting(seed, replica), whole)
            if found is not None:
                return found
        return None

    def _of_part(
        self, batch: Any, present: np.ndarray, setting: "_Setting", whole: bool
    ) -> str | None:
        places = rebatching.order(present, setting.seed)
        if not whole:
            share = places[: max(len(present) // _SHARE, _LEAST)]
            trial = self._trial(*_some(batch, present, share), setting)
            return trial.coupled(trial.of_the_data((setting.seed % 2 > 0,)))
        some = _some(batch, present, np.sort(places[:_SOME]))
        for fill in (False, True):
            most = _some(batch, present, np.sort(places[: _MOST_FILLED if fill else _MOST]))
            own = setting._replace(fill=fill)
            found = self._whole(batch, present, most, own)
            found = found or self._of_other_values(*some, own)
            if found is not None:
                return found
        return None

    def _whole(
        self,
        batch: Any,
        present: np.ndarray,
        most: tuple[Any, np.ndarray],
        setting: "_Setting",
    ) -> str | None:
        """With the batch's own values; a model may also compute by a size that Python sees."""
        trial = self._trial(*most, setting)
        found = trial.coupled(trial.of_the_data((False, True)))
        if found is not None or not self._own_size:
            return found
        trial = self._trial(batch, present, setting, own_size=True)
        places = trial.places
        halves = [rebatching.half_replaced(places, present, first) for first in (False, True)]
        return trial.coupled(iter(halves))

    def _of_other_values(self, batch: Any, present: np.ndarray, setting: "_Setting") -> str | None:
        if not any(tf.nest.flatten(self._sketcher(batch).alterable)):
            return None
        trial = self._trial(batch, present, setting)
        found = trial.coupled(trial.of_other_values())
        return found or (self._of_holes(trial, setting) if trial.sketcher.takes_nan else None)

    def _of_holes(self, trial: "_Trial", setting: "_Setting") -> str | None:
        """Tries few examples with NaN in some of their floats, and copies of a half."""
        batch, present = _some(trial.batch, trial.present, trial.places[: rebatching.FEW])
        holed = rebatching.with_holes(batch, trial.sketcher.alterable)
        few = self._trial(holed, present, setting._replace(seed=0, fill=trial.fill))
        half = rebatching.half_replaced(few.places, present, True)
        found = few.coupled(iter([half]))
        return None if found is None else f"{found}, once values are missing"

    def _trial(
        self, batch: Any, present: np.ndarray, setting: "_Setting", own_size: bool = False
    ) -> "_Trial":
        return _Trial(self._sketcher(batch, own_size), batch, present, setting)

    def _sketcher(self, batch: Any, own_size: bool = False) -> Sketcher:
        """The pass for batches of this signature, of any size or of this one."""
        signature = tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(
                leaf.shape if own_size else [None, *leaf.shape[1:]], tf.as_dtype(leaf.dtype)
            ),
            batch,
        )
        key = tuple(tf.nest.flatten(signature))
        if key not in self._sketchers:
            of_data = self._of_data(batch)
            self._sketchers[key] = Sketcher(self._model, self._recorded, signature, of_data)
        return self._sketchers[key]


class _Setting(NamedTuple):
    """How the batches of a trial are run.

    Attributes:
        seed: Which examples stay.
        replica: In whose context.
        fill: Whether weights of 0 are replaced.
    """

    seed: int
    replica: int
    fill: bool = False


class _Trial:
    """A batch, and how what is recorded of it differs in others that are made from it.

    Random layers draw the same in all of them, and something else in each trial: what they switch
    on in some draws alone is then seen sooner or later.

    Attributes:
        fill: Whether weights of 0 are replaced; not where the model fails or is not finite then.
    """

    def __init__(
        self,
        sketcher: Sketcher,
        batch: Any,
        present: np.ndarray,
        setting: _Setting,
    ) -> None:
        self.sketcher, self.batch, self.present = sketcher, batch, present
        self.places = rebatching.order(present, setting.seed)
        self._drawn, self._replica = secrets.randbelow(2**31), setting.replica
        self.fill = setting.fill
        if self.fill:
            self._fall_back()
        else:
            self._reference = self._sketch(batch)

    def _sketch(self, batch: Any) -> sketches.Sketch:
        return self.sketcher.sketch(batch, self.fill, self._drawn, self._replica)

    def _fall_back(self) -> None:
        """A model may assert something of its weights, or take their root."""
        try:
            self._reference = self._sketch(self.batch)
        except tf.errors.InvalidArgumentError:
            self.fill = False
            self._reference = self._sketch(self.batch)
            return
        if np.all(np.isfinite(self._reference.norms)):
            return
        filled, self.fill = self._reference, False
        own = self._sketch(self.batch)
        if np.any(np.isfinite(own.norms) & ~np.isfinite(filled.norms)):
            self._reference = own
        else:
            self._reference, self.fill = filled, True

    def of_the_data(self, halves: tuple[bool, ...]) -> Iterator[Rebatching]:
        """Batches whose examples hold their own numbers."""
        looser = _HALF_PRECISION if self.sketcher.half_precision else 1.0
        random = self.sketcher.random
        return rebatching.of_the_data(self.places, self.present, random, looser, halves)

    def of_other_values(self) -> Iterator[Rebatching]:
        """Batches in which some examples hold what the data need not hold."""
        takes_nan = self.sketcher.takes_nan
        return rebatching.of_other_values(self.places, self.present, takes_nan)

    def coupled(self, others: Iterator[Rebatching]) -> str | None:
        """The first difference found, or None."""
        for other in others:
            batch = rebatching.taken(self.batch, self.sketcher.alterable, other)
            number = sketches.worst(self._reference, self._sketch(batch), other)
            if number is not None:
                return ", ".join(filter(None, (self.sketcher.names[number], other.seen)))
        return None


def _some(batch: Any, present: np.ndarray, places: np.ndarray) -> tuple[Any, np.ndarray]:
    return tf.nest.map_structure(lambda leaf: leaf[places], batch), present[places]
