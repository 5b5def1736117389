"""Settings of models, optimizers and runs, before a run and in the middle of one."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from tests.attacks.counting import CLIP, Counter, linear, one_hot, poisson
from tests.attacks.entries import MEASURED, REFUSED, REFUSED_OR_MEASURED, Entry
from tests.attacks.measuring import Problem, attacking
from tests.attacks.towers import WIDTH, Made, numbers, tower
from tests.attacks.ways import WAYS, Way, measured

_APART = tuple(way for way in WAYS if way != "graph")
Between = Callable[[Counter], Any]  # done between two fits, or at each step


def dense(**arguments: Any) -> Callable[[], keras.Model]:
    """One layer, whose first weights are long, so that a projection makes them shorter."""

    def model() -> keras.Model:
        inputs = keras.Input((WIDTH,))
        head = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", **arguments)
        return keras.Model(inputs, head(inputs))

    return model


def of(model: Callable[[], keras.Model], **fields: Any) -> Problem:
    return Problem(model, numbers(), removed=(0, 1), **fields)


def between_fits(change: Between) -> Callable[[Way], float]:
    """Two steps, a change, and two steps more: each example was used four times, or fewer."""

    def attack(way: Way) -> float:
        counter = Counter.on(way, poisson())
        counter.fit(counter.batches(), steps_per_epoch=2)
        with counter.attacked():
            change(counter)
            counter.fit(counter.batches(), steps_per_epoch=2)
        return counter.sensitivity

    return attack


def by_a_callback(change: Between) -> Callable[[Way], float]:
    """The same change after each step of one fit."""

    def attack(way: Way) -> float:
        counter = Counter.on(way, poisson())
        step = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: change(counter)
        )
        with counter.attacked():
            counter.fit(counter.batches(), steps_per_epoch=4, callbacks=[step])
        return counter.sensitivity

    return attack


def wrapping(make: Callable[[], Any]) -> Callable[[Way], float]:
    """Four steps under another wrapped optimizer of learning rate 1, or of a smaller one."""

    def attack(way: Way) -> float:
        with attacking():
            counter = Counter.on(way, poisson(), make())
        with counter.attacked():
            counter.fit(counter.batches(), steps_per_epoch=4)
        return counter.sensitivity

    return attack


def set_attribute(name: str, value: Any, inner: bool = False) -> Between:
    """Of the private optimizer, or of the one that it wraps; a refusal to set it is one."""

    def change(counter: Counter) -> None:
        optimizer = counter.model.optimizer
        try:
            setattr(optimizer.optimizer if inner else optimizer, name, value)
        except AttributeError as error:
            raise dp_sparse.PrivacyError(f"a setting is for good: {error}") from error

    return change


def a_step_of_its_own(way: Way) -> float:
    """A model whose `train_step` is its own."""
    stock = keras.Model.train_step
    own = type("Own", (keras.Model,), {"train_step": lambda self, *a, **k: stock(self, *a, **k)})
    inputs = keras.Input((8,))
    model = own(inputs, keras.layers.Dense(1)(inputs))
    with attacking(model):
        optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), poisson(), CLIP)
        model.compile(optimizer, loss=linear)
    return np.inf


def assigned_later(name: str) -> Callable[[Way], float]:
    """A method of the model replaced after compile."""

    def attack(way: Way) -> float:
        counter = Counter.on(way, poisson())
        stock = getattr(keras.Model, name)
        setattr(counter.model, name, lambda *a, **k: stock(counter.model, a[0][:2], *a[1:], **k))
        with counter.attacked():
            counter.fit(counter.batches(), steps_per_epoch=2)
        return counter.sensitivity

    return attack


def gradients_of_a_tape(way: Way) -> float:
    counter = Counter.on(way, poisson())
    counter.model.optimizer.build(counter.model.trainable_variables)
    x, y = one_hot()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(linear(y, counter.model(x)))
    found = tape.gradient(loss, counter.model.trainable_variables)
    with counter.attacked():
        counter.model.optimizer.apply(found, counter.model.trainable_variables)
    return counter.sensitivity


def loss_scaled(way: Way) -> float:
    inputs = keras.Input((8,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    inner = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), poisson(), CLIP)
    with attacking(model):
        model.compile(keras.optimizers.LossScaleOptimizer(inner), loss=linear)
        model.fit(*one_hot(), verbose=0)
    return np.inf


def with_options(options: dict[str, bool]) -> Callable[[Way], float]:
    """Under options of TensorFlow's graph optimizer that are set between two fits."""

    def attack(way: Way) -> float:
        counter = Counter.on(way, poisson())
        counter.fit(counter.batches(), steps_per_epoch=1)
        before = tf.config.optimizer.get_experimental_options()
        tf.config.optimizer.set_experimental_options(options)
        try:
            with counter.attacked():
                counter.fit(counter.batches(), steps_per_epoch=1)
        finally:
            off = dict.fromkeys(options, False)
            tf.config.optimizer.set_experimental_options({**off, **before})
        return counter.sensitivity

    return attack


def trainable(value: bool) -> Between:
    def change(counter: Counter) -> None:
        counter.model.layers[-1].trainable = value

    return change


def compiled_again(
    change: Callable[[keras.layers.Layer], Any], first: bool
) -> Callable[[Way], float]:
    """Of a model with two layers: the same optimizer goes on when one of them has changed.

    Args:
        change: What is done to the layer.
        first: Whether the layer is trained before.
    """

    def attack(way: Way) -> float:
        inputs, plan = keras.Input((WIDTH,)), poisson()
        changed = keras.layers.Dense(4, trainable=first)
        model = keras.Model(inputs, keras.layers.Dense(1)(changed(inputs)))
        optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), plan, CLIP)
        model.compile(optimizer, loss=linear)
        optimizer.build(model.trainable_variables)
        change(changed)
        with attacking(model):
            model.compile(optimizer, loss=linear)
            model.fit(plan.sampling.batches(numbers()()), steps_per_epoch=1, verbose=0)
        return np.inf

    return attack


def unfrozen(way: Way) -> float:
    """A layer that was frozen when the step was traced is trained afterwards."""
    inputs = keras.Input((WIDTH,))
    frozen = keras.layers.Dense(4, trainable=False)
    model = keras.Model(inputs, keras.layers.Dense(1)(frozen(inputs)))
    plan = poisson()
    optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(1.0), plan, CLIP)
    model.compile(optimizer, loss=linear)
    batches = lambda: plan.sampling.batches(numbers()())  # noqa: E731
    model.fit(batches(), steps_per_epoch=1, verbose=0)
    frozen.trainable = True
    with attacking(model):
        model.fit(batches(), steps_per_epoch=1, verbose=0)
    return np.inf


def freeze(layer: keras.layers.Layer) -> None:
    layer.trainable = False


def unfreeze(layer: keras.layers.Layer) -> None:
    layer.trainable = True


def low_rank(counter: Counter) -> None:
    counter.model.layers[-1].enable_lora(1)


SETTINGS = {
    "clip_norm": 100.0,
    "clipping": dp_sparse.AutomaticClipping(),
    "plan": None,
    "noise_multiplier": 0.0,
    "_clip_norm": 100.0,
    "microbatch_size": 1,
}
NEW_OPTIMIZER = REFUSED.matching("new optimizer and a new plan")
HARMFUL = ("clip_norm", "clipping", "plan", "noise_multiplier")

ENTRIES = (
    [
        Entry(
            f"setting {when}: {name}",
            attack(set_attribute(name, SETTINGS[name])),
            REFUSED if name in HARMFUL else REFUSED_OR_MEASURED,
            apart=_APART,
        )
        for when, attack, names in [
            ("between fits", between_fits, tuple(SETTINGS)),
            ("by a callback", by_a_callback, ("clip_norm", "_clip_norm")),
        ]
        for name in names
    ]
    + [
        Entry(f"setting: {name}", attack, expected, apart=_APART)
        for name, attack, expected in [
            (
                "the wrapped optimizer's clipnorm",
                between_fits(set_attribute("clipnorm", 1e-3, True)),
                REFUSED_OR_MEASURED,
            ),
            (
                "a learning rate by a callback",
                by_a_callback(set_attribute("learning_rate", 1.0)),
                MEASURED,
            ),
            ("frozen between fits", between_fits(trainable(False)), REFUSED_OR_MEASURED),
            ("unfrozen between fits", unfrozen, REFUSED),
            ("LoRA between fits", between_fits(low_rank), REFUSED),
            ("frozen, compiled again", compiled_again(freeze, True), NEW_OPTIMIZER),
            ("unfrozen, compiled again", compiled_again(unfreeze, False), NEW_OPTIMIZER),
            (
                "LoRA, compiled again",
                compiled_again(lambda layer: layer.enable_lora(1), True),
                NEW_OPTIMIZER,
            ),
            (
                "wrapped: EMA",
                wrapping(lambda: keras.optimizers.SGD(1.0, use_ema=True)),
                REFUSED_OR_MEASURED,
            ),
            (
                "wrapped: gradient accumulation",
                wrapping(lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)),
                REFUSED_OR_MEASURED,
            ),
            (
                "wrapped: loss scale",
                wrapping(lambda: keras.optimizers.SGD(1.0, loss_scale_factor=64.0)),
                REFUSED_OR_MEASURED,
            ),
            (
                "wrapped: a loss scale optimizer",
                wrapping(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))),
                REFUSED,
            ),
            (
                "wrapped: global_clipnorm",
                wrapping(lambda: keras.optimizers.SGD(1.0, global_clipnorm=1e-3)),
                REFUSED_OR_MEASURED,
            ),
            ("a loss scale optimizer around it", loss_scaled, REFUSED),
            ("gradients of a tape", gradients_of_a_tape, REFUSED),
            ("a train_step of its own", a_step_of_its_own, REFUSED),
            ("a train_step assigned after compile", assigned_later("train_step"), REFUSED),
            (
                "a compute_loss assigned after compile",
                assigned_later("compute_loss"),
                REFUSED_OR_MEASURED,
            ),
            ("a graph without assertions", with_options({"debug_stripper": True}), REFUSED),
            ("a graph of mixed precision", with_options({"auto_mixed_precision": True}), REFUSED),
        ]
    ]
    + [
        Entry(f"setting: {name}", measured(problem), expected)
        for name, problem, expected in [
            ("a unit-norm constraint", of(dense(kernel_constraint="unit_norm")), MEASURED),
            (
                "a max-norm constraint",
                of(dense(kernel_constraint=keras.constraints.MaxNorm(1.0))),
                MEASURED,
            ),
            ("a weight regulariser", of(dense(kernel_regularizer="l2")), MEASURED),
            ("an activity regulariser", of(dense(activity_regularizer="l2")), REFUSED),
            (
                "add_loss",
                of(tower(between=Made(lambda: keras.layers.ActivityRegularization(l2=1.0)))),
                REFUSED,
            ),
            ("steps_per_execution", of(tower(), compiled={"steps_per_execution": 4}), MEASURED),
            ("mixed precision", of(tower(), compiled={"auto_scale_loss": True}), MEASURED),
        ]
    ]
)
