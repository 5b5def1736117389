"""Whether a batch is the one whose turn it is.

Of drawn batches each comes once and none is left out. Batch t of a stream is for step t; within a
pass over a dataset, whose order may change with each reading, it must come from the iterator of the
batch before. A new iterator begins a pass: what is left of the last one is given up, as if spent.
"""

from typing import NamedTuple

import tensorflow as tf

from dp_sparse.core import PrivacyError, require
from dp_sparse.sampling import OWN_ORDER, SEEDED, Marker


class Progress(NamedTuple):
    """How far a run has come.

    Attributes:
        spent: Steps, int64 scalar.
        last_nonce: Of the last batch that this process has seen, int64 scalar.
        last_position: Of the same.
        own_order: Whether the last step's examples followed from its position, boolean scalar.
    """

    spent: tf.Tensor
    last_nonce: tf.Tensor
    last_position: tf.Tensor
    own_order: tf.Tensor

    def continues(self, marker: Marker) -> tf.Tensor:
        """Whether the batch follows the last one in the same iterator."""
        same = tf.equal(marker.nonce, self.last_nonce)
        return same & tf.equal(marker.position, self.last_position + 1)


def drawn_in_order(marker: Marker, progress: Progress) -> list[tf.Operation]:
    """Checks of a batch that was drawn: the first of a new pass, or the next of the last one."""
    first = (marker.nonce > progress.last_nonce) & tf.equal(marker.position, 0)
    return [
        require(
            first | progress.continues(marker) | tf.equal(marker.nonce, SEEDED),
            PrivacyError,
            "Expected each batch once, got batch {} again or out of turn: do not cache, "
            "filter, skip, repeat or reorder the sampler's batches.",
            marker.position,
        )
    ]


def stream_in_order(
    marker: Marker, progress: Progress, steps_per_pass: int, steps: int
) -> list[tf.Operation]:
    """Checks of a batch of a stream: the next one, or the first of the next pass."""
    spent = progress.spent
    next_pass = -(-spent // steps_per_pass) * steps_per_pass
    another = tf.not_equal(marker.nonce, progress.last_nonce)
    begins = tf.equal(marker.position, next_pass) & (tf.equal(spent, next_pass) | another)
    follows = tf.equal(marker.position, spent)
    known = progress.continues(marker) | (tf.equal(marker.nonce, OWN_ORDER) & progress.own_order)
    over = spent >= steps  # which is refused for itself
    why = (
        "Expected batch {} from the iterator of the batch before it, got it from a new one: a "
        "tf.data.Dataset that is read again may come in another order, and would use examples "
        "twice in a pass that is paid once. "
    )
    return [
        require(
            follows | begins | over,
            PrivacyError,
            "Expected batch {} of the stream, got batch {}: go on with batches(dataset, "
            "first_step={}).",
            spent,
            marker.position,
            spent,
        ),
        require(
            begins | known | over | tf.not_equal(next_pass, steps),
            PrivacyError,
            f"{why}After {{}} of {steps} steps no pass is left; arrays and a dp_sparse.RecordFile "
            "go on within a pass that began with them.",
            spent,
            spent,
        ),
        require(
            begins | known | over,
            PrivacyError,
            f"{why}Go on with batches(dataset, first_step={{}}): the rest of this pass counts as "
            "spent. Arrays and a dp_sparse.RecordFile go on within a pass that began with them.",
            spent,
            next_pass,
        ),
    ]
