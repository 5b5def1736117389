"""A private step of a language model against a non-private one, at two sizes of the word table.

A RoBERTa of MiniLM's size (6 layers, width 384) with random weights, LoRA of rank 16, a head, and a
word table of 50,265 rows (RoBERTa's) or 250,002 (XLM-R's); 64 sequences of 64 tokens, whose ranks
are log-uniform, as by Zipf's law. Dense weights are trained by Adam, the table by SGD. Three steps:

- `private` is DP-AdaFEST with its default of expected false rows;
- `non-private` is the leanest that we know: rows are gathered from the variable, and what is
  scattered back is their gradient alone;
- `stock` is Keras' `fit` with SGD, which reads the table whole.

The table's share is measured on a model of a table alone, with the same lookups: DP-AdaFEST, and
DP-SGD, which noises every row.
"""

from collections.abc import Callable, Iterator, Mapping

import keras
import numpy as np
import tensorflow as tf

import dp_sparse
from benchmarks import harness
from models.pretrained import random_backbone
from models.roberta_lora import TextClassifier, text_classifier, word_table

BATCH, LENGTH = 64, 64
SIZES = {"layers": 6, "heads": 12, "width": 384, "inner_width": 1536}
VOCABULARIES = {"50k": 50_265, "250k": 250_002}
ROUNDS, QUICK_ROUNDS = 8, 2
WARM_UP = 4  # the first three private steps also check that examples do not mix
RATE = 0.01
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

Step = Callable[[], object]


def classifier(vocabulary: int) -> TextClassifier:
    """Of two classes."""
    backbone = random_backbone("roberta", vocabulary=vocabulary, max_length=LENGTH, **SIZES)
    return text_classifier(backbone, classes=2)


def examples(vocabulary: int, count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Sequences without padding, and labels."""
    rng = np.random.default_rng(0)
    ids = (vocabulary ** rng.random((count, LENGTH))).astype(np.int32) - 1
    x = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    return x, rng.integers(0, 2, count).astype(np.int32)


def private_step(vocabulary: int, batches: int) -> Step:
    """One call is one step of DP-AdaFEST on a fresh batch."""
    plan = _plan(batches)
    optimizer = dp_sparse.DPAdaFESTOptimizer(
        keras.optimizers.Adam(RATE), plan, clip_norm=1.0, table_optimizer=_sgd()
    )
    model = classifier(vocabulary)
    model.compile(optimizer=optimizer, loss=LOSS)
    return _keras_step(model, plan, examples(vocabulary, BATCH * batches))


def non_private_step(vocabulary: int) -> Step:
    """One call is one step without privacy, of the same optimizers, always on one batch."""
    model = classifier(vocabulary)
    table = word_table(model)._embeddings
    dense = [variable for variable in model.trainable_variables if variable is not table]
    word_table(model).call = lambda ids: tf.gather(table.value, ids)  # not the table as a whole
    optimizer = keras.optimizers.Adam(RATE)
    optimizer.build(dense)
    x, y = tf.nest.map_structure(tf.constant, examples(vocabulary, BATCH))

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        wanted = [variable.value for variable in (*dense, table)]
        *gradients, rows = tape.gradient(loss, wanted)
        optimizer.apply(gradients, dense)
        table.value.scatter_sub(tf.IndexedSlices(RATE * rows.values, rows.indices))
        return loss

    return step


def stock_step(vocabulary: int) -> Step:
    """One call is one step of stock Keras, SGD for all weights, always on one batch."""
    model = classifier(vocabulary)
    model.compile(optimizer=_sgd(), loss=LOSS)
    model.make_train_function()
    x, y = tf.nest.map_structure(tf.constant, examples(vocabulary, BATCH))
    return lambda: model.train_function(iter([(x, y)]))


def table_steps(vocabulary: int, batches: int) -> dict[str, Step]:
    """Steps of a table alone, whose looked-up rows are summed."""
    makers: Mapping[str, Callable[..., keras.optimizers.Optimizer]] = {
        "DP-AdaFEST": dp_sparse.DPAdaFESTOptimizer,
        "DP-SGD": dp_sparse.DPSGDOptimizer,
    }
    found = {}
    for name, make in makers.items():
        ids, plan = keras.Input((LENGTH,), dtype="int32"), _plan(batches)
        rows = keras.layers.Embedding(vocabulary, SIZES["width"])(ids)
        model = keras.Model(ids, keras.ops.sum(rows, axis=(1, 2), keepdims=True)[:, 0])
        model.compile(optimizer=make(_sgd(), plan, clip_norm=1.0), loss="mse")
        x, y = examples(vocabulary, BATCH * batches)
        found[name] = _keras_step(model, plan, (x["token_ids"], y))
    return found


def _keras_step(model: keras.Model, plan: dp_sparse.PrivacyPlan, data: object) -> Step:
    model.make_train_function()
    batches = list(plan.sampling.batches(tf.data.Dataset.from_tensor_slices(data)))
    remaining: Iterator[object] = iter(batches)
    return lambda: model.train_function(iter([next(remaining)]))


def _plan(batches: int) -> dp_sparse.PrivacyPlan:
    sampling = dp_sparse.StreamSampling(num_examples=BATCH * batches, batch_size=BATCH)
    return dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-6), sampling).calibrate()


def _sgd() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(RATE)


def main() -> None:
    """Prints ms per step, and the ratios."""
    options = harness.arguments(__doc__ or "")
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    rows, metrics = [], {}
    for name, vocabulary in VOCABULARIES.items():
        candidates = {
            "private": private_step(vocabulary, rounds + WARM_UP),
            "non-private": non_private_step(vocabulary),
            "stock": stock_step(vocabulary),
        }
        seconds = harness.in_turns(candidates, rounds, WARM_UP)
        candidates.clear()
        harness.forget()
        seconds |= harness.in_turns(table_steps(vocabulary, rounds + WARM_UP), rounds, WARM_UP)
        harness.forget()
        step = seconds["private"] / seconds["non-private"]
        share = seconds["DP-SGD"] / seconds["DP-AdaFEST"]
        metrics |= {
            f"step_over_nonprivate_{name}": step,
            f"dpsgd_table_over_adafest_table_{name}": share,
        }
        ms = [1000 * value for value in seconds.values()]
        rows.append((vocabulary, *ms[:3], step, *ms[3:], share))
    headers = (
        *("word table", "private ms", "non-private ms", "stock ms", "private / non-private"),
        *("its table ms", "DP-SGD's table ms", "DP-SGD / DP-AdaFEST"),
    )
    harness.report("language_step", headers, rows, metrics, options)


if __name__ == "__main__":
    main()
