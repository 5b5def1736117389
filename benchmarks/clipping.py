"""What per-example clipping costs: a training step of five small classifiers, five ways.

Lee and Kifer (arXiv 2009.03106, section 6) compare, on one batch of MNIST's shape: a step without
privacy (stock Keras as it compiles on a CPU, without XLA), "nxBP" (a loop over the examples, one
gradient each), "multiLoss" (the Jacobian of the vector of losses), and exact clipping at the cost
of about one batch gradient: tensorflow-privacy's, where that package is installed and knows all
layers, and ours. All use Adam; the private ones clip to 1 and add noise. The Transformer reads 64
tokens of 5,000 words, so that a step of it takes less than a second. `-` marks what cannot run, or
needs more than 512 MiB for per-example gradients.

Memory is what one warm step adds at its peak to the tensors that were alive before it, as counted
by TensorFlow's BFC allocator, which all candidates use here: resident memory tells nothing, since
the default allocator keeps what it once had. Scratch inside kernels of XLA and oneDNN is not
counted.

`--sweep` gives the paper's other figures: `depth` (7), `batch_size` (6), `image_size` (9: a
ResNet-18, batch 32), `max_batch` (section 6.7: the largest batch of a ResNet-18 on 64 x 64 whose
process stays within 2 GiB).
"""

import argparse
import concurrent.futures
import functools
import importlib.util
import itertools
import multiprocessing
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from benchmarks import harness
from models import classifiers, vision

Step = Callable[[], object]
Build = Callable[[], keras.Model]

MODELS: dict[str, Build] = {
    "mlp": classifiers.mlp,
    "cnn": classifiers.cnn,
    "rnn": classifiers.rnn,
    "lstm": classifiers.lstm,
    "transformer": functools.partial(classifiers.transformer, 64, vocabulary=5_000),
}
BATCHES = (16, 32, 64, 128)
NAIVE_OVER_OURS = ("mlp", "cnn")
ROUNDS, QUICK_ROUNDS = 20, 3
CLIP_NORM = 1.0
SIGMA = 1.0
WARM_UP = 4  # the first three private steps also check that examples do not mix
JACOBIAN_LIMIT = 2**29  # bytes
MEMORY_LIMIT = 2**31


def stock_step(build: Build, batch: int, steps: int) -> Step:
    """One call is one step of stock Keras."""
    del steps
    model = build()
    dataset = tf.data.Dataset.from_tensor_slices(examples(model, batch)).batch(batch)
    model.compile(keras.optimizers.Adam(), loss())
    return _fit(model, itertools.cycle(list(dataset)))


def private_step(build: Build, batch: int, steps: int) -> Step:
    """One call is one step of ours; it can be called `steps` times."""
    model = build()
    sampling = dp_sparse.StreamSampling(num_examples=batch, batch_size=batch, passes=steps)
    budget = dp_sparse.PrivacyBudget(epsilon=8.0, delta=1e-5)
    plan = dp_sparse.PrivacyPlan(budget, sampling).calibrate()
    dataset = tf.data.Dataset.from_tensor_slices(examples(model, batch))
    model.compile(dp_sparse.DPSGDOptimizer(keras.optimizers.Adam(), plan, CLIP_NORM), loss())
    return _fit(model, iter(list(sampling.batches(dataset))))


def _fit(model: keras.Model, batches: Iterator[object]) -> Step:
    model.make_train_function()
    return lambda: model.train_function(iter([next(batches)]))


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
    "nxBP": naive_step,
    "multiLoss": vectorised_step,
    "tensorflow-privacy": tensorflow_privacy_step,
    "ours": private_step,
}
CANNOT = (NotImplementedError, dp_sparse.UnsupportedLayerError, tf.errors.ResourceExhaustedError)
Setting = tuple[str, Build, int]  # name, model, batch


def measured(
    build: Build, batch: int, rounds: int, ways: Sequence[str] = tuple(WAYS)
) -> tuple[dict[str, float], dict[str, int]]:
    """Median seconds and added bytes of each way that can run."""
    candidates = {}
    for way in ways:
        try:
            candidates[way] = WAYS[way](build, batch, WARM_UP + rounds + 2)
            harness.finish(candidates[way]())
        except CANNOT:
            candidates.pop(way, None)
    seconds = harness.in_turns(candidates, rounds, WARM_UP)
    added = {way: added_memory(candidates[way]) for way in ("stock", "ours") if way in candidates}
    del candidates
    harness.forget()
    return seconds, added


def added_memory(step: Step) -> int:
    """Bytes of tensors that one call of a warm `step` adds at its peak."""
    tf.config.experimental.reset_memory_stats("CPU:0")
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    harness.finish(step())
    return tf.config.experimental.get_memory_info("CPU:0")["peak"] - before


def peak_memory(way: str, build: Build, batch: int) -> int:
    """This process's peak of resident bytes after two steps."""
    step = WAYS[way](build, batch, 2)
    for _ in range(2):
        harness.finish(step())
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def largest_batch(way: str, build: Build) -> int:
    """The largest batch whose process stays within the limit, to an eighth of itself."""

    def fits(batch: int) -> bool:
        spawn = multiprocessing.get_context("spawn")
        try:
            with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as process:
                return process.submit(peak_memory, way, build, batch).result() <= MEMORY_LIMIT
        except (*CANNOT, concurrent.futures.process.BrokenProcessPool):
            return False

    low, high = 0, 8
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _resnet(size: int) -> Build:
    return functools.partial(vision.resnet18, (size, size, 3), num_classes=10)


def _deep(layers: int) -> Build:
    return functools.partial(classifiers.mlp, hidden=(128, 256) * (layers // 2))


SWEEPS: dict[str, list[Setting]] = {
    "depth": [(f"mlp_{layers}_layers", _deep(layers), 128) for layers in (2, 4, 6, 8)],
    "batch_size": [(m, MODELS[m], batch) for m in ("mlp", "cnn", "rnn") for batch in BATCHES],
    "image_size": [(f"resnet18_{size}px", _resnet(size), 32) for size in (32, 64, 128, 256)],
}


def table(name: str, settings: Sequence[Setting], rounds: int, quick: bool = False) -> None:
    """A row for each setting, and the metrics; `quick` leaves out what the metrics do not need."""
    rows: list[tuple[object, ...]] = []
    metrics: dict[str, float] = {}
    memory: list[float] = []
    for label, build, batch in settings:
        naive = ("nxBP",) if label in NAIVE_OVER_OURS else ()
        ways = ("stock", *naive, "tensorflow-privacy", "ours") if quick else tuple(WAYS)
        seconds, added = measured(build, batch, rounds, ways)
        times = [1000 * seconds[way] if way in seconds else "-" for way in WAYS]
        mebibytes = [added[way] / 2**20 if way in added else "-" for way in ("stock", "ours")]
        rows.append((label, batch, *times, *mebibytes))
        if "ours" in seconds:
            metrics[f"{label}_over_nonprivate_{batch}"] = seconds["ours"] / seconds["stock"]
            memory.append(added["ours"] / added["stock"])
        if naive and "ours" in seconds:
            metrics[f"{label}_naive_over_ours_{batch}"] = seconds["nxBP"] / seconds["ours"]
    metrics["memory_over_nonprivate_max"] = max(memory)
    headers = ("model", "batch", *WAYS, "stock MiB", "ours MiB")
    harness.report(name, headers, rows, metrics)


def batches_table() -> None:
    """The largest batch of each way."""
    largest = {way: largest_batch(way, _resnet(64)) for way in ("stock", "multiLoss", "ours")}
    harness.report("clipping_max_batch", ("way", "largest batch"), list(largest.items()), largest)


def main() -> None:
    """Prints the table and the metrics, or those of a sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, the same keys")
    parser.add_argument("--sweep", choices=[*SWEEPS, "max_batch"], help="one of the paper's others")
    arguments = parser.parse_args()
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"  # read when TensorFlow first computes
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    if arguments.sweep == "max_batch":
        batches_table()
    elif arguments.sweep is not None:
        table(f"clipping_{arguments.sweep}", SWEEPS[arguments.sweep], rounds, arguments.quick)
    else:
        batches = BATCHES[-1:] if arguments.quick else BATCHES
        settings = [(name, MODELS[name], batch) for name in MODELS for batch in batches]
        table("clipping", settings, rounds, arguments.quick)


if __name__ == "__main__":
    main()
