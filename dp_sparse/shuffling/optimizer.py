"""Shuffled DP-SGD, accounted as what it is: DP-SGD and a permutation after each step.

"Shuffled DP-SGD", Algorithm 1: the clipped sum is clipped again to c′, gets noise, and the weights
are permuted where that changes no output.
"""

import math
import warnings
from typing import Any, Unpack

import keras
import tensorflow as tf

from dp_sparse import noise
from dp_sparse.accounting import PrivacyPlan, beside
from dp_sparse.clipping import ClippedSums
from dp_sparse.core import validate
from dp_sparse.optimizers import DPSGDOptimizer, NoisyMeans, Options
from dp_sparse.shuffling.groups import permutation_groups, shuffle
from dp_sparse.shuffling.heuristic import Theorem6Mechanism


@keras.saving.register_keras_serializable(package="dp_sparse")
class ShuffledDPSGDOptimizer(DPSGDOptimizer):
    """DP-SGD that permutes hidden units and attention heads at random after each step.

    The permutation changes neither outputs nor gradients, costs little, and makes nothing more
    private: anyone who has the weights before a step finds it out by matching. The plan's ε is
    DP-SGD's.

    Args:
        optimizer: As `DPSGDOptimizer`. Its slots are permuted along.
        plan: As `DPSGDOptimizer`.
        clip_norm: c.
        batch_clip_norm: c′ >= c, the norm to which the clipped sum is clipped before noise; by
            default it is not.
        heuristic: Whether to take a plan of `theorem6_plan_not_a_guarantee`, whose claimed ε is not
            guaranteed; statements, reports and logs then say so.
        options: `microbatch_size`, `clipping` and `name`, as `DPSGDOptimizer`.

    Raises:
        ValueError: As `DPSGDOptimizer`, `batch_clip_norm < clip_norm`, or a plan that
            is not as `heuristic` says.
        UnsupportedLayerError: When training begins, a model with rotary embeddings.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> model = keras.Sequential([keras.layers.Dense(5, "relu"), keras.layers.Dense(1)])
        >>> optimizer = dp_sparse.ShuffledDPSGDOptimizer("adam", plan, clip_norm=1.0)
        >>> model.compile(optimizer, loss="mse")
        >>> history = model.fit(plan.sampling.batches((np.ones((8, 2)), np.ones(8))), verbose=0)
        >>> int(optimizer.steps_spent)
        2

    ### Formal Guarantees
    That of `DPSGDOptimizer`. Clipping a sum to a ball moves no two sums further apart, so its
    sensitivity stays `clip_norm`. The permutation is drawn from the secret noise key after the
    noise, and is post-processing. `theorem6_sigma_not_a_guarantee` is not used here.
    """

    unproven_mechanisms = (Theorem6Mechanism,)
    replicable = False  # each replica would have to permute its own copies alike

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        plan: PrivacyPlan,
        clip_norm: float,
        batch_clip_norm: float | None = None,
        *,
        heuristic: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(optimizer, plan, clip_norm, **options)
        self.heuristic = heuristic
        self._check_claim(plan)
        if batch_clip_norm is not None:
            batch_clip_norm = validate.clip_norm("batch_clip_norm", batch_clip_norm)
            if batch_clip_norm < self.clip_norm:
                raise ValueError(
                    f"Expected batch_clip_norm >= clip_norm={self.clip_norm:g}, got "
                    f"batch_clip_norm={batch_clip_norm!r}."
                )
        self._batch_clip_norm = batch_clip_norm
        if heuristic:
            self._warn_of_claim()

    def _check_claim(self, plan: PrivacyPlan) -> None:
        claim = plan.mechanism.not_guaranteed
        if claim is not None and not self.heuristic:
            raise ValueError(
                "Expected heuristic=True for a plan of theorem6_plan_not_a_guarantee, got "
                f"heuristic=False. {beside(*claim, plan.budget)}"
            )
        if self.heuristic and claim is None:
            raise ValueError(
                "Expected a plan of theorem6_plan_not_a_guarantee with heuristic=True, got "
                f"plan={plan!r}: use heuristic=False."
            )

    def _warn_of_claim(self) -> None:
        mechanism = self.plan.mechanism
        assert isinstance(mechanism, Theorem6Mechanism)
        wanted = mechanism.batch_clip_ratio * self.clip_norm
        if self.batch_clip_norm is None or not math.isclose(self.batch_clip_norm, wanted):
            raise ValueError(
                f"Expected batch_clip_norm={wanted:g}, for which the plan's noise was computed, "
                f"got batch_clip_norm={self.batch_clip_norm!r}."
            )
        warnings.warn(beside(*mechanism.not_guaranteed, self.plan.budget), stacklevel=3)

    @property
    def batch_clip_norm(self) -> float | None:
        """c′, for good."""
        return self._batch_clip_norm

    def build(self, variables: list[keras.Variable]) -> None:
        """Finds the groups, which must be there before the first step."""
        if self.built:
            return
        model = self._model() if self._model is not None else None
        super().build(variables)
        assert model is not None
        self._slots = _slots_of(self.optimizer)
        trained = {id(variable) for variable in variables}
        self._groups = [
            group
            for group in permutation_groups(model)
            if all(id(m.variable) in trained for part in group.parts for m in part.members)
        ]

    def stays_in_place(self, variable: keras.Variable) -> bool:
        """As `PrivateOptimizer`; not if it is permuted."""
        members = [m for group in self._groups for part in group.parts for m in part.members]
        return all(member.variable is not variable for member in members)

    def release(self, sums: ClippedSums, draw: noise.Draw) -> NoisyMeans:
        """Clips the sums together to c′, then adds noise."""
        if self.batch_clip_norm is not None:
            sums = sums.with_amounts(_clipped(sums, self.batch_clip_norm))
        return super().release(sums, draw)

    def update(self, noisy: NoisyMeans) -> None:
        """Updates every variable, then permutes."""
        super().update(noisy)
        shuffle(self._groups, self._account.noise_key.next_draw(), lambda v: self._slots[id(v)])

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description; never a key."""
        return {
            **super().get_config(),
            "batch_clip_norm": self.batch_clip_norm,
            "heuristic": self.heuristic,
        }


def _slots_of(optimizer: keras.optimizers.Optimizer) -> dict[int, list[keras.Variable]]:
    """By the id of each trained variable, what the optimizer gathers for it, entry by entry.

    Raises:
        ValueError: It gathers something of another shape, which cannot be permuted along.
    """
    trained, own = optimizer._trainable_variables, {id(v) for v in optimizer.variables}
    lists = [v for v in vars(optimizer).values() if isinstance(v, list) and len(v) == len(trained)]
    rows = [
        row
        for row in lists
        if all(id(s) in own and s.shape == v.shape for s, v in zip(row, trained, strict=True))
    ]
    distinct = list({tuple(map(id, row)): row for row in rows}.values())
    found = {id(v): [row[i] for row in distinct] for i, v in enumerate(trained)}
    followed = {id(slot) for slots in found.values() for slot in slots}
    for variable in optimizer.variables:
        if variable.shape.rank and id(variable) not in followed:
            raise ValueError(
                f"Expected an optimizer whose slots have the shapes of their variables, got "
                f"{optimizer.name} with {variable.path} of shape {tuple(variable.shape)}: wrap "
                "keras.optimizers.Adam(), or use DPSGDOptimizer."
            )
    return found


def _clipped(sums: ClippedSums, norm: float) -> Any:
    """The amounts times min(1, c′/‖sum‖), in float64."""
    parts = [*sums.amounts.dense, *sums.amounts.rows]
    squared = tf.add_n([tf.reduce_sum(tf.square(tf.cast(p, tf.float64))) for p in parts])
    factor = tf.minimum(tf.constant(1.0, tf.float64), norm * tf.math.rsqrt(squared))
    amounts = sums.amounts

    def scaled(each: list[tf.Tensor]) -> list[tf.Tensor]:
        return [tf.cast(tf.cast(part, tf.float64) * factor, part.dtype) for part in each]

    return amounts._replace(dense=scaled(amounts.dense), rows=scaled(amounts.rows))
