"""Whatever lets one example reach another's loss is found before a single update."""

import dataclasses
import secrets
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import clipping
from dp_sparse.core.errors import PrivacyError
from dp_sparse.guards import isolation
from dp_sparse.guards.sketches import Sketch
from tests.training_cases import checks_of, marked_dataset, plan_for, weights_of

N = 64
MIXES = "of one example depends on another"


def private_model(
    mixing: Callable[[Any], Any] | None = None,
    loss: Any = "mse",
    *,
    between: Callable[[Any], Any] = lambda x: x,
    dropout: float = 0.3,
    head: str = "glorot_uniform",
    **compiled: Any,
) -> keras.Model:
    inputs = keras.Input((3,))
    values = inputs if mixing is None else keras.layers.Lambda(mixing, output_shape=(3,))(inputs)
    hidden = keras.layers.Dense(4, activation="tanh")(values)
    hidden = keras.layers.Lambda(between, output_shape=(4,))(hidden)
    outputs = keras.layers.Dense(1, kernel_initializer=head)(keras.layers.Dropout(dropout)(hidden))
    model = keras.Model(inputs, outputs)
    sampling = dp_sparse.PoissonSampling(num_examples=N, expected_batch_size=32, steps=6)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-3), sampling)
    plan = dataclasses.replace(plan, noise_multiplier=1.0, plan_id=secrets.token_hex(16))
    model.compile(optimizer=dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss=loss, **compiled)
    return model


def fit(model: keras.Model) -> None:
    rng = np.random.default_rng(0)
    data = rng.normal(size=(N, 3)).astype(np.float32), rng.normal(size=(N, 1)).astype(np.float32)
    batches = model.optimizer.plan.sampling.batches(data)
    model.fit(batches, verbose=0, steps_per_epoch=2)


MIXING = {
    "mean": lambda x: x - tf.reduce_mean(x, axis=0),
    "stopped mean": lambda x: x - tf.stop_gradient(tf.reduce_mean(x, axis=0)),
    "cumulative sum": lambda x: tf.cumsum(x, axis=0),
    "causal from behind": lambda x: tf.cumsum(x, axis=0, reverse=True),
    "roll": lambda x: tf.roll(x, 1, axis=0),
    "maximum": lambda x: x / (1 + tf.reduce_max(tf.abs(x))),
    "neighbours": lambda x: (
        x + tf.roll(x, 1, axis=0) * tf.cast(tf.range(tf.shape(x)[0]) % 2 == 1, tf.float32)[:, None]
    ),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("mixing", MIXING)
def test_mixing_is_refused(mixing: str) -> None:
    model = private_model(MIXING[mixing])
    before = [weight.numpy() for weight in model.weights]
    with pytest.raises(PrivacyError, match=MIXES):
        fit(model)
    after = [weight.numpy() for weight in model.weights if "seed" not in weight.path]
    unchanged = [b for b, w in zip(before, model.weights, strict=True) if "seed" not in w.path]
    assert all(np.array_equal(a, b) for a, b in zip(after, unchanged, strict=True))


def test_dropout_and_honest_models_pass() -> None:
    model = private_model()
    fit(model)
    assert int(model.optimizer.steps_spent) == checks_of(model) == 2


def test_batches_of_an_earlier_process_are_refused() -> None:
    """Their nonce is a time before this process began."""
    model = private_model()
    rng = np.random.default_rng(0)
    data = rng.normal(size=(N, 3)).astype(np.float32), rng.normal(size=(N, 1)).astype(np.float32)

    def older(x: Any, y: Any, weights: Any) -> Any:
        marker = weights["marker"] - tf.constant([0, 10**18, 0, 0], tf.int64)
        return x, y, dict(weights, marker=marker)

    batches = model.optimizer.plan.sampling.batches(data).map(older)
    with pytest.raises(PrivacyError, match="Expected each batch once"):
        model.fit(batches, verbose=0)


# ------------------------------------------------------------------- what losses alone do not show


@tf.custom_gradient
def clipped_over_the_batch(x: tf.Tensor) -> Any:
    return tf.identity(x), lambda dy: tf.clip_by_norm(dy, 0.01)


@tf.custom_gradient
def swapped_on_the_way_back(x: tf.Tensor) -> Any:
    return tf.identity(x), lambda dy: tf.reverse(dy, [0])


def over_the_batch_size(y: tf.Tensor, prediction: tf.Tensor) -> tf.Tensor:
    return tf.square(prediction - y) / tf.cast(tf.shape(y)[0], tf.float32)


def by_class_ratio(y: tf.Tensor, prediction: tf.Tensor) -> tf.Tensor:
    """Positives weigh what makes both classes weigh the same in the batch."""
    positive = tf.cast(y > 0.8, tf.float32)  # one in five, so that hardly a batch has none
    ratio = tf.math.divide_no_nan(tf.reduce_sum(1 - positive), tf.reduce_sum(positive))
    return tf.square(prediction - y) * (positive * ratio + 1 - positive)


def standardised(x: tf.Tensor) -> tf.Tensor:
    return (x - tf.reduce_mean(x, 0)) / (1e-6 + tf.math.reduce_std(x, 0))


def tiny(y: tf.Tensor, prediction: tf.Tensor) -> tf.Tensor:
    return 1e-5 * tf.square(prediction - y)


COUPLED: dict[str, dict[str, Any]] = {
    "clipped gradient": {"between": clipped_over_the_batch},
    "swapped gradient": {"between": swapped_on_the_way_back},
    "loss over the batch size": {"loss": over_the_batch_size},
    "loss over the batch size, no masks": {"loss": over_the_batch_size, "dropout": 0.0},
    "weights by the class ratio": {"loss": by_class_ratio},
    "mean before a head of zeros": {
        "mixing": lambda x: x - tf.reduce_mean(x, axis=0),
        "head": "zeros",
    },
    "standardised, losses of 1e-5": {"mixing": standardised, "loss": tiny},
    "the first example for all": {"mixing": lambda x: x + x[:1]},
    "the first label for all": {
        "loss": lambda y, prediction: tf.square(y - prediction * (1 + y[:1]))
    },
    "a place": {
        "mixing": lambda x: (
            x * (1 + tf.one_hot(tf.zeros_like(tf.shape(x)[:1]), tf.shape(x)[0])[0][:, None])
        ),
        "dropout": 0.0,
    },
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", COUPLED)
def test_what_is_released_is_compared(case: str) -> None:
    """Before the first update, whatever hides it from the losses."""
    model = private_model(**COUPLED[case])
    before = weights_of(model)
    with pytest.raises(PrivacyError, match=MIXES):
        fit(model)
    for old, new in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(old, new)
    assert int(model.optimizer.iterations) == 0


def test_ids_of_others_are_found_where_they_train_nothing() -> None:
    """The contribution map counts a lookup whatever its gradient is."""
    ids = keras.Input((2,), dtype="int32")
    neighbours = keras.layers.Lambda(lambda ids: tf.roll(ids, 1, 0), output_shape=(2,))(ids)
    looked_up = keras.layers.Flatten()(keras.layers.Embedding(N, 2)(neighbours))
    values = keras.layers.Embedding(N, 2, name="own")(ids)
    both = keras.layers.Flatten()(values) + 0.0 * looked_up
    model, plan = keras.Model(ids, keras.layers.Dense(1)(both)), plan_for(N)
    model.compile(dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0), loss="mse")
    x = np.arange(2 * N, dtype=np.int32).reshape(N, 2) % N
    with pytest.raises(PrivacyError, match=f"{MIXES}.*seen at the ids that it looks up"):
        model.fit(marked_dataset(plan, x, np.ones((N, 1), np.float32)), verbose=0)


def test_an_outlier_hides_no_coupling() -> None:
    """Sizes are not measured against the largest example of the batch."""
    ranking = lambda y, p: tf.square(p - y) + 4 * tf.nn.softplus(-8 * (p - tf.transpose(p)))  # noqa: E731
    model, plan = private_model(loss=ranking, dropout=0.0), plan_for(N)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss=ranking)
    x = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
    y = np.zeros((N, 1), np.float32)
    y[1] = 1e8
    with pytest.raises(PrivacyError, match=MIXES):
        model.fit(marked_dataset(plan, x, y), verbose=0)


def test_coupling_under_xla() -> None:
    model = private_model(between=clipped_over_the_batch, jit_compile=True)
    with pytest.raises(PrivacyError, match=MIXES):
        fit(model)


def mixes_marked_examples(x: tf.Tensor) -> tf.Tensor:
    """Each example that is marked by its first value gets the mean of its batch."""
    return tf.where(x[:, :1] > 5, tf.reduce_mean(x, axis=0, keepdims=True), x)


@pytest.mark.slow
@pytest.mark.parametrize("marked", [0, 4, 9])
def test_the_first_check_takes_all_micro_batches(marked: int) -> None:
    """The first, one in the middle and the last, which is not full."""
    model, plan = private_model(mixes_marked_examples, dropout=0.0), plan_for(10)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0, microbatch_size=4), loss="mse")
    x, y = np.arange(30, dtype=np.float32).reshape(10, 3) / 30, np.ones((10, 1), np.float32)
    x[marked, 0] = 9
    before = weights_of(model)
    with pytest.raises(PrivacyError, match=MIXES):
        model.fit(marked_dataset(plan, x, y), verbose=0)
    for left, right in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(left, right)


class Spied:
    """In place of a traced pass: keeps the batches it is given, and finds nothing."""

    random = half_precision = False
    alterable = takes_nan = True
    names = ("the loss", "the ids that it looks up")

    def __init__(self) -> None:
        self.batches: list[np.ndarray] = []
        self.filled: list[bool] = []

    def sketch(self, batch: np.ndarray, fill: bool, seed: int, replica: int) -> Sketch:
        self.batches.append(batch)
        self.filled.append(fill)
        norms = np.ones([len(batch), 1], np.float32)
        return Sketch(norms[..., None].repeat(2, 2), norms, norms, np.zeros(len(batch), np.int64))


def spied(monkeypatch: pytest.MonkeyPatch, at_once: int | None = None) -> tuple[Any, Spied]:
    spy = Spied()
    found = isolation.Isolation(None, lambda _: None, lambda _: True, at_once=at_once)  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(found, "_sketcher", lambda *_, **__: spy)
    return found, spy


def test_a_later_check_takes_one_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one is drawn anew; a part of padding alone proves nothing."""
    checks, spy = spied(monkeypatch, at_once=3)
    batch, present = np.arange(10.0), np.asarray([1.0] * 9 + [0.0])
    parts = [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}]
    checks.coupled(batch, present, seed=0, whole=True)
    assert [part for part in parts if any(part == set(own) for own in spy.batches)] == parts
    assert not any(9 in own for own in spy.batches)
    taken = []
    for seed in range(30):
        spy.batches.clear()
        checks.coupled(batch, present, seed=seed, whole=False)
        taken.append(set(spy.batches[0]))
    assert all(part in taken for part in parts) and all(own in parts for own in taken)


def test_what_a_zero_hides_is_found_before_the_first_step() -> None:
    """A head of zeros hides a coupled gradient until it has moved."""

    @tf.custom_gradient
    def coupled(x: tf.Tensor) -> Any:
        finite = lambda dy: tf.where(tf.math.is_finite(dy), dy, 0.0)  # noqa: E731
        return tf.identity(x), lambda dy: dy + tf.reduce_mean(finite(dy), 0)

    model = private_model(between=coupled, head="zeros", dropout=0.0)
    with pytest.raises(PrivacyError, match=MIXES):
        fit(model)
    assert int(model.optimizer.steps_spent) == 0
    np.testing.assert_array_equal(model.layers[-1].kernel, np.zeros((4, 1)))


def test_what_a_table_of_zeros_hides_is_found_before_the_first_step() -> None:
    """Its rows are filled where they are looked up, and stay 0 in the table."""
    ids = keras.Input((2,), dtype="int32")
    rows = keras.layers.Flatten()(
        keras.layers.Embedding(N, 2, embeddings_initializer="zeros", name="table")(ids)
    )
    scaled = keras.layers.Lambda(lambda x: x / (1e-3 + tf.reduce_max(tf.abs(x))))(rows)
    model, plan = keras.Model(ids, keras.layers.Dense(1)(scaled)), plan_for(N)
    model.compile(dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0), loss="mse")
    x = np.arange(2 * N, dtype=np.int32).reshape(N, 2) % N
    with pytest.raises(PrivacyError, match=MIXES):
        model.fit(marked_dataset(plan, x, np.ones((N, 1), np.float32)), verbose=0)
    assert not np.any(model.get_layer("table").embeddings)


@pytest.mark.parametrize(
    ("whole", "size", "compared"),
    [
        (True, 1000, 1000),
        (True, 100, 100),
        (True, 2000, 1024),
        (False, 1000, 255),
        (False, 100, 64),
    ],
)
def test_a_whole_check_takes_the_batch_and_another_one_a_share(
    whole: bool, size: int, compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the examples that are there, which padding does not count among."""
    checks, spy = spied(monkeypatch)
    padding = 20
    batch = np.arange(size + padding, dtype=np.float32)
    present = (batch < size).astype(np.float32)
    assert checks.coupled(batch, present, seed=1, whole=whole) is None
    sizes = [len(own) for own in spy.batches]
    if not whole:
        assert sizes == [compared, compared, 33, 1] and not any(spy.filled)
        assert np.all(spy.batches[0] < size)
        return
    some = min(size + padding, 128)
    most, filled = min(size + padding, 1024), min(size + padding, 256)
    once, again = ([n] * 3 + [33, 1] + [some] * 6 + [32, 32] for n in (most, filled))
    assert sizes == once + again
    assert len({*spy.batches[0]}) == most and np.all(np.diff(spy.batches[0]) > 0)
    assert most == size + padding or np.all(spy.batches[0] < size)
    assert spy.filled == [False] * len(once) + [True] * len(once)


class Dropped(keras.layers.Layer):
    """Leaves the branch that mixes out for a whole batch, in nearly all of the first draws."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = keras.random.SeedGenerator(1)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        kept = keras.random.uniform((), seed=self.seed) > 0.15
        return tf.where(kept, inputs - tf.reduce_mean(inputs, 0), inputs)


@pytest.mark.parametrize("compiled", [{}, {"jit_compile": True}])
def test_what_a_draw_for_the_whole_batch_switches_on_is_found(compiled: dict[str, bool]) -> None:
    """Each trial draws something else."""
    model, plan = (
        keras.Sequential([keras.Input((3,)), Dropped(), keras.layers.Dense(1)]),
        plan_for(8),
    )
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse", **compiled)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    with pytest.raises(PrivacyError, match=MIXES):
        model.fit(marked_dataset(plan, x, np.ones((8, 1), np.float32), steps=3), verbose=0)
    assert int(model.optimizer.steps_spent) == 0


def test_a_model_that_asserts_something_of_a_weight_is_no_false_alarm() -> None:
    """Filled weights are not negative; where the model fails with them, they stay 0."""

    class Asserts(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(3,), initializer="zeros")

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            checks = [tf.debugging.assert_less(self.scale, 1e-6)]
            with tf.control_dependencies(checks):
                return inputs * (1.0 + tf.sqrt(1e-4 + self.scale))

    layers = [keras.Input((3,)), Asserts(), keras.layers.Dense(1)]
    model, plan = keras.Sequential(layers), plan_for(8)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    model.fit(marked_dataset(plan, x, np.ones((8, 1), np.float32)), verbose=0)
    assert int(model.optimizer.steps_spent) == 1


class MixesWhereKnown(keras.layers.Layer):
    """Where Python sees the size of the batch, one more layer that does not show in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.own = keras.layers.Dense(2)
        self.more = keras.layers.Dense(2, kernel_initializer="zeros", use_bias=False, name="more")

    def build(self, shape: Any) -> None:
        self.own.build(shape)
        self.more.build(shape)

    def call(self, inputs: Any) -> Any:
        hidden = self.own(inputs)
        known = inputs.shape[0] is not None
        return hidden + self.more(inputs - tf.reduce_mean(inputs, 0)) if known else hidden


def test_what_only_a_known_size_shows_is_found() -> None:
    model, plan = keras.Sequential([keras.Input((3,)), MixesWhereKnown()]), plan_for(8)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse", jit_compile=True)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 3)).astype(np.float32), np.ones((8, 2), np.float32)
    with pytest.raises(PrivacyError, match="seen at .*more/kernel"):
        model.fit(marked_dataset(plan, x, y), verbose=0)
    assert "more/kernel" in str(dp_sparse.check_model(model, (x, y)))


# ---------------------------------------------------------- values that no example of the batch has


def limited(limit: float) -> Callable[[Any], Any]:
    @tf.custom_gradient
    def identity(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda dy: tf.clip_by_norm(dy, limit)

    return identity


SWITCHED_ON: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a limit": (limited(1e6), "once other examples hold NaN"),
    "a branch on a large value": (
        lambda x: tf.cond(tf.reduce_any(x > 100), lambda: x - tf.reduce_mean(x, 0), lambda: x),
        "once others are 10,000 times as large",
    ),
    "filled holes": (
        lambda x: tf.where(
            tf.math.is_nan(x), tf.reduce_mean(tf.where(tf.math.is_nan(x), 0.0, x), 0), x
        ),
        "once values are missing",
    ),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", SWITCHED_ON)
def test_what_one_example_would_switch_on_is_found_before_it_comes(case: str) -> None:
    mixing, seen = SWITCHED_ON[case]
    part = {"between": mixing} if case == "a limit" else {"mixing": mixing}
    model = private_model(**part)  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match=f"{MIXES}.*seen at .*{seen}"):
        fit(model)
    assert int(model.optimizer.iterations) == 0
    x, y = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32), np.ones((N, 1))
    [problem] = dp_sparse.check_model(model, (x, y)).problems
    assert seen in problem


def test_what_needs_its_values_as_they_are_keeps_them() -> None:
    """Ids that come as floats, labels of a range, and what the model asserts something of."""
    positive = lambda x: [tf.debugging.assert_positive(x), x][1]  # noqa: E731
    inputs = {"id": keras.Input((1,)), "price": keras.Input((2,)), "age": keras.Input((1,))}
    rows = keras.layers.Flatten()(keras.layers.Embedding(9, 2)(inputs["id"]))
    price = keras.layers.Lambda(positive, output_shape=(2,))(inputs["price"])
    joined = keras.layers.Concatenate()([rows, price, inputs["age"]])
    model, plan = keras.Model(inputs, keras.layers.Dense(1)(joined)), plan_for(4)
    model.compile(dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0), loss="binary_crossentropy")
    x = {"id": np.arange(4.0)[:, None], "price": np.ones((4, 2)), "age": np.ones((4, 1))}
    x, y = {name: value.astype(np.float32) for name, value in x.items()}, np.eye(4, 1)
    model.fit(marked_dataset(plan, x, y.astype(np.float32)), verbose=0)
    assert dp_sparse.check_model(model, (x, y)).ok
    assert int(model.optimizer.steps_spent) == 1


def test_nan_under_bfloat16_never_reaches_other_examples() -> None:
    """oneDNN's products of an odd width read one number of the next example, times 0."""
    inputs = keras.Input((33,))
    model = keras.Model(inputs, keras.layers.Dense(1, dtype="mixed_bfloat16")(inputs))
    x, y = np.random.default_rng(0).normal(size=(16, 33)).astype(np.float32), np.ones((16, 1))
    x[5, 3] = np.nan
    plan = plan_for(16)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    assert dp_sparse.check_model(model, (x[:5], y[:5])).ok
    before, batches = weights_of(model), marked_dataset(plan, x, y.astype(np.float32))
    if clipping.lets_nan_through(model):
        with pytest.raises(dp_sparse.BadExampleError, match="NaN or infinity in 1 examples"):
            model.fit(batches, verbose=0)
        for old, new in zip(before, weights_of(model), strict=True):
            np.testing.assert_array_equal(old, new)
    else:
        model.fit(batches, verbose=0)
        assert int(model.optimizer.diagnostics.not_finite) == 1


def test_nan_is_told_where_products_let_it_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under oneDNN's bfloat16 on some processors, whichever this one is."""
    monkeypatch.setattr(clipping, "lets_nan_through", lambda model: True)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    x, y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)
    x[5, 2] = np.nan
    plan = plan_for(8)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    before = weights_of(model)
    with pytest.raises(dp_sparse.BadExampleError, match="NaN or infinity in 1 examples"):
        model.fit(marked_dataset(plan, x, y), verbose=0)
    for old, new in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(old, new)


# ------------------------------------------------------------------------- a batch of one example


def folded(rows: Callable[[Any], Any], width: int, dtype: str = "float32") -> keras.Model:
    """Positions folded into the batch axis in front of a layer, and out of it behind."""
    length = 8
    inputs = keras.Input((length, width) if width else (length,), dtype=dtype)
    fold = keras.layers.Lambda(lambda x: tf.reshape(x, [-1, *x.shape[2:]]))
    back = keras.layers.Lambda(lambda x: tf.reshape(x, [-1, length, x.shape[-1]]))
    return keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(back(rows(fold(inputs)))))


FOLDED = {
    "dense": lambda: folded(keras.layers.Dense(1), 3),
    "embedding": lambda: folded(keras.layers.Embedding(9, 1), 0, "int32"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", ["graph", "xla", "microbatches", "eager"])
@pytest.mark.parametrize("kind", FOLDED)
def test_records_must_lead_with_the_batch_of_one_example(kind: str, way: str) -> None:
    model, plan = FOLDED[kind](), plan_for(1 if way != "microbatches" else 3)
    options = {"microbatch_size": 1} if way == "microbatches" else {}
    optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0, **options)
    compiled = {"xla": {"jit_compile": True}, "eager": {"run_eagerly": True}}.get(way, {})
    model.compile(optimizer, loss="mse", **compiled)
    size = plan.sampling.num_examples
    x = np.ones((size, *model.input_shape[1:]), model.inputs[0].dtype)
    before = weights_of(model)
    with pytest.raises(PrivacyError, match="to be the first axis of what"):
        model.fit(marked_dataset(plan, x, np.ones((size, 1), np.float32)), verbose=0)
    for old, new in zip(before, weights_of(model), strict=True):
        np.testing.assert_array_equal(old, new)


def test_losses_must_lead_with_the_batch() -> None:
    """Each position has a loss of its own: with one example they would be clipped one by one."""
    inputs = keras.Input((8, 3))
    positions = keras.layers.Lambda(lambda x: tf.reshape(x, [-1, 3]))(keras.layers.Dense(3)(inputs))
    model, plan = keras.Model(inputs, positions), plan_for(1)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    batch = np.ones((1, 8, 3), np.float32), np.ones((1, 3), np.float32)
    with pytest.raises(PrivacyError, match="the loss records"):
        model.fit(marked_dataset(plan, *batch), verbose=0)


def test_one_example_is_checked_beside_a_copy() -> None:
    """A batch of one tells nothing by itself."""
    model, plan = private_model(loss=over_the_batch_size), plan_for(1)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss=over_the_batch_size)
    batch = np.ones((1, 3), np.float32), np.zeros((1, 1), np.float32)
    with pytest.raises(PrivacyError, match=MIXES):
        model.fit(marked_dataset(plan, *batch), verbose=0)


def test_examples_that_are_not_finite_are_no_coupling() -> None:
    model, plan = private_model(), plan_for(8)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    x[2], x[5] = np.nan, np.inf
    model.fit(marked_dataset(plan, x, np.ones((8, 1), np.float32), steps=3), verbose=0)
    assert checks_of(model) == 3
    assert int(model.optimizer.diagnostics.not_finite) == 6


def test_an_example_that_is_not_finite_and_reaches_others_is() -> None:
    model = private_model(lambda x: x + 1e-9 * tf.reduce_mean(x, axis=0), dropout=0.0)
    plan = plan_for(8)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), loss="mse")
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    x[2] = np.nan
    with pytest.raises(PrivacyError, match=MIXES):
        model.fit(marked_dataset(plan, x, np.ones((8, 1), np.float32)), verbose=0)
