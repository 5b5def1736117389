"""What a tied table costs: a step of a next-item Transformer, four ways.

The setting of "Phantom Clipping" (Ding et al., ICML 2024, appendix D.2): sequences of 200 items out
of 3,416, as in MovieLens-1M, or out of 50,000; two Transformer blocks of width 64 with one head,
learned positions, and logits by the table that the items were looked up in. Either the last
position alone predicts the next item, as in the paper, or all positions do. All ways use Adam; the
private ones clip to 1 and add noise:

- `stock` is Keras without privacy, as it compiles on a CPU, without XLA;
- `ghost` is ours without the method for tied tables: the table's norms are the ordinary
  ⟨x xᵀ, dz dzᵀ⟩, in which a lookup is a product with a one-hot row of the vocabulary's length;
- `vmap` computes the gradients of all examples, by `tf.vectorized_map`;
- `ours`.

`-` marks what needs more than 1 GiB for one-hot rows or per-example gradients. If all positions
predict, a batch has 8 examples: at 50,000 items one copy of their logits is 305 MiB. Memory is the
peak that one warm step adds, as in `benchmarks.clipping`.
"""

import argparse
import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from benchmarks import clipping, clipping_ways, harness
from dp_sparse.clipping import Tied

LENGTH, WIDTH, BLOCKS = 200, 64, 2
VOCABULARIES = (3_416, 50_000)
BATCHES = {"last": 64, "all": 8}  # by the positions that predict
ROUNDS, QUICK_ROUNDS = 20, 5
MEMORY_LIMIT = 2**30  # bytes


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table: how many items, which positions predict, examples of a batch."""

    items: int
    positions: str
    batch: int

    def model(self) -> keras.Model:
        """From items `[batch, length]` to logits `[batch, items]` or `[batch, length, items]`."""
        items = keras.Input((LENGTH,), dtype="int32")
        table = keras.layers.ReversibleEmbedding(self.items, WIDTH)
        positions = keras.ops.zeros_like(items) + keras.ops.arange(LENGTH)
        values = table(items) + keras.layers.Embedding(LENGTH, WIDTH)(positions)
        for _ in range(BLOCKS):
            values = _block(values)
        return keras.Model(items, table(values[:, -1] if self._last else values, reverse=True))

    def examples(self) -> tuple[np.ndarray, np.ndarray]:
        """Items and those that follow, int32; an item's rank is log-uniform, as by Zipf's law."""
        uniform = np.random.default_rng(0).random((self.batch, LENGTH + 1))
        items = (self.items**uniform).astype(np.int32) - 1
        return items[:, :-1], items[:, -1] if self._last else items[:, 1:]

    @property
    def _last(self) -> bool:
        return self.positions == "last"


def _block(values: keras.KerasTensor) -> keras.KerasTensor:
    """Causal self-attention and two fully connected layers; each is added and normalised.

    The one head is made of Dense: `tf.vectorized_map` of the EinsumDense in MultiHeadAttention
    crashes in oneDNN (TensorFlow 2.21).
    """
    query, key, value = (keras.layers.Dense(WIDTH)(values) for _ in range(3))
    attention = keras.layers.Attention()
    attended = attention([query * WIDTH**-0.5, value, key], use_causal_mask=True)
    values = keras.layers.LayerNormalization()(values + keras.layers.Dense(WIDTH)(attended))
    inner = keras.layers.Dense(4 * WIDTH, activation="relu")(values)
    return keras.layers.LayerNormalization()(values + keras.layers.Dense(WIDTH)(inner))


def stock_step(setting: Setting, steps: int) -> clipping_ways.Step:
    """One call is one step of stock Keras."""
    del steps
    model = setting.model()
    model.compile(keras.optimizers.Adam(), clipping_ways.loss())
    dataset = tf.data.Dataset.from_tensor_slices(setting.examples())
    return clipping_ways.train_steps(model, itertools.cycle(list(dataset.batch(setting.batch))))


def private_step(setting: Setting, steps: int) -> clipping_ways.Step:
    """One call is one step of ours; it can be called `steps` times."""
    model = setting.model()
    sampling = dp_sparse.StreamSampling(setting.batch, setting.batch, passes=steps)
    budget = dp_sparse.PrivacyBudget(epsilon=8.0, delta=1e-5)
    plan = dp_sparse.PrivacyPlan(budget, sampling).calibrate()
    adam = keras.optimizers.Adam()
    model.compile(
        dp_sparse.DPSGDOptimizer(adam, plan, clipping_ways.CLIP_NORM), clipping_ways.loss()
    )
    dataset = tf.data.Dataset.from_tensor_slices(setting.examples())
    return clipping_ways.train_steps(model, iter(list(sampling.batches(dataset))))


def ghost_step(setting: Setting, steps: int) -> clipping_ways.Step:
    """Ours with `ghost_squared_norms`."""
    if 4 * setting.batch * LENGTH * setting.items > MEMORY_LIMIT:
        raise NotImplementedError
    step = private_step(setting, steps)

    def patched() -> object:
        with mock.patch.object(Tied, "squared_norms", ghost_squared_norms):
            return step()

    return patched


def ghost_squared_norms(use: Tied) -> tf.Tensor:
    """⟨x xᵀ, dz dzᵀ⟩ for x = one-hot rows, then logit cotangents; dz = row cotangents, then hidden.

    Exact up to cancellation, float32 `[batch]`.
    """
    one_hot = tf.one_hot(tf.where(use.valid, use.row_ids, -1), use.num_rows)
    as_rows = _products(one_hot, one_hot) * _products(use.row_cotangents, use.row_cotangents)
    logits, hidden = use.logit_cotangents, use.hidden
    as_output = _products(logits, logits) * _products(hidden, hidden)
    crossed = _products(logits, one_hot) * _products(hidden, use.row_cotangents)
    terms = as_rows, as_output, 2 * crossed
    return tf.add_n([tf.reduce_sum(term, axis=[1, 2]) for term in terms])


def _products(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """Of each row with each, `[batch, rows of left, rows of right]`."""
    return tf.matmul(left, right, transpose_b=True)


def vectorised_step(setting: Setting, steps: int) -> clipping_ways.Step:
    """Per-example gradients by `tf.vectorized_map`, clipped and summed."""
    del steps
    model = setting.model()
    if 4 * setting.batch * model.count_params() > MEMORY_LIMIT:
        raise NotImplementedError
    variables = [variable.value for variable in model.trainable_variables]
    examples = tuple(map(tf.constant, setting.examples()))
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def gradients_of(example: tuple[tf.Tensor, tf.Tensor]) -> list[tf.Tensor]:
        x, y = (part[tf.newaxis] for part in example)
        with tf.GradientTape() as tape:
            value = clipping_ways.loss()(y, model(x, training=True))
        return [tf.convert_to_tensor(g) for g in tape.gradient(value, variables)]

    @tf.function
    def step() -> tf.Tensor:
        gradients = tf.vectorized_map(gradients_of, examples)
        squares = [tf.reduce_sum(g**2, axis=list(range(1, g.shape.rank))) for g in gradients]
        norms = tf.sqrt(tf.add_n(squares))
        factors = clipping_ways.CLIP_NORM / tf.maximum(norms, clipping_ways.CLIP_NORM)
        sums = [tf.tensordot(factors, g, 1) for g in gradients]
        deviation = clipping_ways.SIGMA * clipping_ways.CLIP_NORM
        noisy = [total + tf.random.normal(total.shape, 0.0, deviation) for total in sums]
        optimizer.apply([total / setting.batch for total in noisy], model.trainable_variables)
        return optimizer.iterations.value

    return step


WAYS: dict[str, Callable[[Setting, int], clipping_ways.Step]] = {
    "stock": stock_step,
    "ghost": ghost_step,
    "vmap": vectorised_step,
    "ours": private_step,
}
QUICK_WAYS = ("stock", "ours")
Measured = dict[str, tuple[float, int]]  # median seconds and added bytes of each way


def measured(setting: Setting, ways: Sequence[str], rounds: int) -> Measured:
    """Of each way that can run."""
    candidates = {}
    for way in ways:
        with contextlib.suppress(NotImplementedError):
            candidates[way] = WAYS[way](setting, clipping.WARM_UP + rounds + 1)
    seconds = harness.in_turns(candidates, rounds, clipping.WARM_UP)
    found = {way: (seconds[way], clipping.added_memory(step)) for way, step in candidates.items()}
    del candidates
    harness.forget()
    return found


def table(
    vocabularies: Sequence[int], ways: Sequence[str], rounds: int, options: argparse.Namespace
) -> None:
    """A row for each vocabulary and loss, and the metrics of ours beside stock Keras."""
    rows, metrics = [], {}
    for items, positions in itertools.product(vocabularies, BATCHES):
        setting = Setting(items, positions, BATCHES[positions])
        found = measured(setting, ways, rounds)
        times = [1000 * found[way][0] if way in found else "-" for way in WAYS]
        mebibytes = [found[way][1] / 2**20 if way in found else "-" for way in WAYS]
        rows.append((items, positions, setting.batch, *times, *mebibytes))
        prefix = "" if positions == "all" else f"{positions}_"
        for index, name in enumerate(("step", "memory")):
            ratio = found["ours"][index] / found["stock"][index]
            metrics[f"{prefix}{name}_over_nonprivate_{items}"] = ratio
    per_way = (f"{way} {unit}" for unit in ("ms", "MiB") for way in WAYS)
    headers = ("items", "positions", "batch", *per_way)
    harness.report("tied_embedding", headers, rows, metrics, options)


def main() -> None:
    """Prints the table; quickly, only what the metrics of the larger vocabulary need."""
    options = harness.arguments(__doc__ or "")
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "true"  # read when TensorFlow first computes
    if options.quick:
        table(VOCABULARIES[-1:], QUICK_WAYS, QUICK_ROUNDS, options)
    else:
        table(VOCABULARIES, tuple(WAYS), ROUNDS, options)


if __name__ == "__main__":
    main()
