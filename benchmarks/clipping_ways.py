"""Ways to make a training step: without privacy, and with per-example clipping of four kinds.

Each takes a function that makes a model, the batch size and the number of steps, and returns a
function that makes one step. It raises NotImplementedError if it cannot run.
"""

import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from dp_sparse import noise

Step: TypeAlias = Callable[[], object]
Build: TypeAlias = Callable[[], keras.Model]

CLIP_NORM = 1.0
SIGMA = 1.0
JACOBIAN_LIMIT = 2**29  # bytes


def stock_step(build: Build, batch: int, steps: int) -> Step:
    """One call is one step of stock Keras."""
    del steps
    model = build()
    dataset = tf.data.Dataset.from_tensor_slices(examples(model, batch)).batch(batch)
    model.compile(keras.optimizers.Adam(), loss())
    return train_steps(model, itertools.cycle(list(dataset)))


def private_step(build: Build, batch: int, steps: int) -> Step:
    """One call is one step of ours; it can be called `steps` times."""
    model = build()
    sampling = dp_sparse.StreamSampling(num_examples=batch, batch_size=batch, passes=steps)
    budget = dp_sparse.PrivacyBudget(epsilon=8.0, delta=1e-5)
    plan = dp_sparse.PrivacyPlan(budget, sampling).calibrate()
    dataset = tf.data.Dataset.from_tensor_slices(examples(model, batch))
    model.compile(dp_sparse.DPSGDOptimizer(keras.optimizers.Adam(), plan, CLIP_NORM), loss())
    return train_steps(model, iter(list(sampling.batches(dataset))))


def train_steps(model: keras.Model, batches: Iterator[object]) -> Step:
    """One call is one step of a compiled model on the next of `batches`."""
    model.make_train_function()
    return lambda: model.train_function(iter([next(batches)]))


def stock_and_noise_step(build: Build, batch: int, steps: int) -> Step:
    """Stock Keras, then our noise for every trained value: no private step can be faster."""
    step, key = stock_step(build, batch, steps), noise.NoiseKey()
    shapes = [variable.shape for variable in build().trainable_variables]

    @tf.function
    def add_noise() -> list[tf.Tensor]:
        totals = [tf.zeros(shape) for shape in shapes]
        return noise.noisy_means(totals, SIGMA, batch, key.next_draw(), noise.Purpose.DENSE)

    return lambda: (step(), add_noise())


def naive_step(build: Build, batch: int, steps: int) -> Step:
    """nxBP: a loop over a traced gradient of one example."""
    del steps
    model = build()
    x, y = map(tf.constant, examples(model, batch))
    update = _noisy_update(model, batch)

    @tf.function
    def add_one(i: tf.Tensor, sums: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            value = loss()(y[i : i + 1], model(x[i : i + 1], training=True))
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(value, _values(model))]
        clipped, _ = tf.clip_by_global_norm(gradients, CLIP_NORM)
        return [total + g for total, g in zip(sums, clipped, strict=True)]

    zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
    indices = [tf.constant(i) for i in range(batch)]
    return lambda: update(functools.reduce(lambda sums, i: add_one(i, sums), indices, zeros))


def vectorised_step(build: Build, batch: int, steps: int) -> Step:
    """multiLoss: per-example gradients from the Jacobian of the losses."""
    del steps
    model = build()
    if 4 * batch * model.count_params() > JACOBIAN_LIMIT:
        raise NotImplementedError
    x, y = map(tf.constant, examples(model, batch))
    update = _noisy_update(model, batch)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = loss(reduction=None)(y, model(x, training=True))
        gradients = tape.jacobian(losses, _values(model))
        flat = [tf.reshape(g, [batch, -1]) for g in gradients]
        norms = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(g), axis=1) for g in flat]))
        factors = CLIP_NORM / tf.maximum(norms, CLIP_NORM)
        return update([tf.tensordot(factors, g, 1) for g in gradients])

    return step


def _noisy_update(model: keras.Model, batch: int) -> Callable[[list[tf.Tensor]], tf.Tensor]:
    """Adds TensorFlow's own normals, divides and applies."""
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    @tf.function
    def update(sums: list[tf.Tensor]) -> tf.Tensor:
        noisy = [total + tf.random.normal(total.shape, 0.0, SIGMA * CLIP_NORM) for total in sums]
        optimizer.apply([total / batch for total in noisy], model.trainable_variables)
        return optimizer.iterations.value

    return update


def _values(model: keras.Model) -> list[tf.Variable]:
    return [variable.value for variable in model.trainable_variables]


def tensorflow_privacy_step(build: Build, batch: int, steps: int) -> Step:
    """tensorflow-privacy's DPModel with fast clipping; its registry knows Dense and Embedding."""
    del steps
    if importlib.util.find_spec("tensorflow_privacy") is None:
        raise NotImplementedError
    sys.skip_tf_privacy_import = True  # type: ignore[attr-defined]
    import tf_keras
    from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry
    from tensorflow_privacy.privacy.keras_models import dp_keras_model

    model = build()
    inputs, outputs = _in_legacy_keras(model, tf_keras)
    registry = layer_registry.make_default_layer_registry()
    legacy = dp_keras_model.DPModel(
        CLIP_NORM, SIGMA, use_xla=False, layer_registry=registry, inputs=inputs, outputs=outputs
    )
    legacy.compile(
        tf_keras.optimizers.Adam(), tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    batches = iter(tf.data.Dataset.from_tensors(examples(model, batch)).repeat())
    train = legacy.make_train_function()
    return lambda: train(batches)


def _in_legacy_keras(model: keras.Model, tf_keras: Any) -> tuple[Any, Any]:
    """A chain of Flatten and Dense in tf_keras."""
    inputs = values = tf_keras.Input(model.input_shape[1:])
    for layer in model.layers[1:]:
        if not isinstance(layer, keras.layers.Flatten | keras.layers.Dense):
            raise NotImplementedError
        values = getattr(tf_keras.layers, type(layer).__name__).from_config(_shared(layer))(values)
    return inputs, values


def _shared(layer: keras.layers.Layer) -> dict[str, Any]:
    config = layer.get_config()
    return {name: config[name] for name in ("units", "activation") if name in config}


def loss(**fields: Any) -> keras.losses.Loss:
    """Cross entropy of logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **fields)


def examples(model: keras.Model, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Random pixels or token ids of the model's input shape, and labels."""
    rng = np.random.default_rng(0)
    shape = (count, *model.input_shape[1:])
    words = [v.shape[0] for v in model.variables if v.path.endswith("embeddings")]
    x = rng.integers(0, words[0], shape) if words else rng.random(shape)
    x = x.astype(model.inputs[0].dtype)
    return x, rng.integers(0, model.output_shape[-1], count).astype(np.int32)


WAYS: dict[str, Callable[[Build, int, int], Step]] = {
    "stock": stock_step,
    "stock+noise": stock_and_noise_step,
    "nxBP": naive_step,
    "multiLoss": vectorised_step,
    "tensorflow-privacy": tensorflow_privacy_step,
    "ours": private_step,
}
