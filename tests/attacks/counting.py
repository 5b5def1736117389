"""A model whose weights count how often each example was used, and how often that was paid for."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import dp_accounting
import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from tests.attacks.measuring import SIGMA, TOLERANCE, Refusal
from tests.attacks.ways import Way, strategy_of, stream_plan
from tests.training_cases import plan_for

EXAMPLES, CLIP = 8, 0.5


def one_hot(size: int = EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Example i has feature i alone."""
    return np.eye(size, dtype=np.float32), np.zeros((size, 1), np.float32)


def source(size: int = EXAMPLES) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(one_hot(size))


def poisson(steps: int = 100, **fields: Any) -> dp_sparse.PrivacyPlan:
    """Every example in every batch."""
    return plan_for(EXAMPLES, steps=steps, noise_multiplier=SIGMA, **fields)


def rare() -> dp_sparse.PrivacyPlan:
    """One example in four is in a batch."""
    return poisson(steps=100, expected_batch_size=2, capacity=EXAMPLES)


def stream(batch_size: int = 2, passes: int = 1, size: int = EXAMPLES) -> dp_sparse.PrivacyPlan:
    return stream_plan(size, batch_size, passes)


@dataclasses.dataclass
class Counter:
    """A model of one weight an example, which each use of that example moves by C.

    Attributes:
        plan: Its plan.
        model: Compiled on a way.
    """

    plan: dp_sparse.PrivacyPlan
    model: keras.Model

    @classmethod
    def on(cls, way: Way, plan: dp_sparse.PrivacyPlan, wrapped: Any = None) -> "Counter":
        """A counter under a way's settings; the plan says which loop fits."""
        with strategy_of(way.replicas).scope():
            inputs = keras.Input((EXAMPLES,))
            head = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
            model = keras.Model(inputs, head(inputs))
            wrapped = keras.optimizers.SGD(1.0) if wrapped is None else wrapped
            optimizer = dp_sparse.DPSGDOptimizer(wrapped, plan, CLIP, **way.optimizer)
            model.compile(optimizer, loss=linear, **way.compiled)
        return cls(plan, model)

    @property
    def terms(self) -> np.ndarray:
        """How often each example was used so far, `[examples]`."""
        moved = -np.ravel(self.model.get_weights()[0]).astype(np.float64)
        return moved * self.plan.sampling.expected_batch_size / CLIP

    def fit(self, batches: Any, **arguments: Any) -> None:
        self.model.fit(batches, verbose=0, **arguments)

    def batches(self, **arguments: Any) -> tf.data.Dataset:
        """The plan's own."""
        stream = isinstance(self.plan.sampling, dp_sparse.StreamSampling)
        return self.plan.sampling.batches(source() if stream else one_hot(), **arguments)

    @property
    def paid(self) -> float:
        """How often the plan lets an example be used by now; with q < 1 there is luck in it."""
        sampling, spent = self.plan.sampling, int(self.model.optimizer.steps_spent.numpy())
        if isinstance(sampling, dp_sparse.StreamSampling):
            return float(sampling.event(dp_accounting.GaussianDpEvent(1.0), spent).count)
        share = sampling.sampling_probability
        return share * spent + 5 * math.sqrt(share * (1 - share) * spent)

    @property
    def sensitivity(self) -> float:
        """The most uses of an example, for each that was paid for."""
        terms = float(np.abs(self.terms).max())
        return terms / self.paid if self.paid else np.inf if terms else 0.0

    @contextlib.contextmanager
    def attacked(self) -> Iterator[None]:
        """Turns an error into a `Refusal`, late if an example got more than was paid for."""
        try:
            yield
        except Exception as error:
            raise Refusal(error, late=self.sensitivity > 1 + TOLERANCE) from error


def linear(y: Any, prediction: Any) -> tf.Tensor:
    """Its gradient is the features, whatever the weights are."""
    return 100.0 * prediction[:, 0]
