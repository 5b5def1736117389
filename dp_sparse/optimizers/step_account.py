"""One optimizer's side of the accounting: its noise key, its count of steps, and its plan's ledger.

A step begins here: its batch is checked, its step spent, its random streams drawn, alike on all
replicas.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.accounting import PrivacyPlan
from dp_sparse.core import PrivacyError, replicas
from dp_sparse.optimizers import replica_checks
from dp_sparse.optimizers.ledger import SavedCount, StepLedger, refuse_unfit


class StepAccount:
    """The steps that one optimizer takes under its plan.

    No trackable object: a copy of its optimizer gets a key and an account of its own.

    Args:
        plan: The plan.
        steps: The optimizer's variables, int64 scalars, as `SavedCount` names them.
        seal: Likewise.
        own_order: Likewise.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        steps: keras.Variable,
        seal: keras.Variable,
        own_order: keras.Variable,
    ) -> None:
        self._plan = plan
        self._saved = SavedCount(steps, seal, own_order)
        self._saved.write(plan, 0, 0)
        self._ledger = StepLedger(plan)
        self.noise_key = noise.NoiseKey(plan.sampling.not_private_seed)

    def begin(
        self,
        marker: tf.Tensor,
        clip_norm: float | tf.Tensor,
        settings: int,
        state_of_choice: Callable[[], tf.Tensor],
    ) -> tuple[noise.Draw, tf.Tensor]:
        """Spends a step on the batch with this marker; the update must wait for the count.

        Args:
            marker: Of the batch, or of this replica's part of it.
            clip_norm: C of the step.
            settings: A fingerprint of the optimizer's settings.
            state_of_choice: Gives a fingerprint of what earlier steps left for the choice of rows.
        """
        if replicas.count() == 1:
            return self._spend(marker)
        deciding = replica_checks.what_decides(
            key=self.noise_key.words(),
            plan=tf.constant(self._plan.fingerprint, tf.int64),
            spent=self._saved.words(),
            clip_norm=tf.bitcast(tf.cast(clip_norm, tf.float64), tf.int64),
            settings=tf.constant(settings, tf.int64),
            choice=state_of_choice(),
        )
        return replicas.merged(self._begin_alike, marker, deciding)

    def _begin_alike(self, marker: Any, deciding: Any) -> tuple[noise.Draw, tf.Tensor]:
        with tf.control_dependencies(replica_checks.checks(replicas.gathered(deciding))):
            whole = tf.identity(replicas.gathered(marker))
        return self._spend(whole)

    def _spend(self, marker: tf.Tensor) -> tuple[noise.Draw, tf.Tensor]:
        return self.noise_key.next_draw(), self._ledger.spend(marker, self._saved)

    def steps_left(self) -> int:
        """Steps that the plan still has."""
        return self._ledger.steps_left(self._saved)

    def counts(self) -> tuple[int, int]:
        """Steps left and the optimizer's own count: a step changes both before it moves weights."""
        return self.steps_left(), self._saved.values()[0]

    def before_loading(self) -> tuple[int, int]:
        """What is spent so far, for `loaded`; nothing where it fits no plan."""
        return self._saved.values() if self._saved.fits(self._plan) else (0, 0)

    def refuse_unfit(self, name: str, variables: list[keras.Variable], store: Any) -> None:
        """Raises PrivacyError unless `store` has the optimizer's variables after a run of the plan.

        After that no step follows until all was restored: Keras may have loaded weights before,
        and go on.
        """
        try:
            refuse_unfit(self._plan, name, variables, store)
        except PrivacyError:
            self._saved.void()
            raise

    def loaded(self, before: tuple[int, int]) -> None:
        """The variables were restored: the larger count holds, and noise gets a new key."""
        after = self._saved.values()
        self._saved.write(self._plan, *(before if before[0] > after[0] else after))
        self.noise_key.refresh(max(before[0], after[0]))

    def count_spent(self, steps: int) -> None:
        """The larger of this count and the optimizer's own holds, and noise gets a new key."""
        own, order = self._saved.values()
        self._saved.write(self._plan, max(own, steps), order)
        self.noise_key.refresh(max(own, steps))
