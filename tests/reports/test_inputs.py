"""What users feed a model: frames of many columns, text, ids of every dtype, odd sources."""

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse

N = 40


def frame() -> dict[str, np.ndarray]:
    """Columns as `dict(frame)` gives them, one of which no model below takes."""
    rows = np.arange(N)
    return {"user": rows % 30, "item": rows % 7, "age": 90 + rows % 9, "name": np.full(N, "Ann")}


def labels() -> np.ndarray:
    return (np.arange(N) % 2).astype(np.float32)


def plan_of(steps: int = 2) -> dp_sparse.PrivacyPlan:
    budget = dp_sparse.PrivacyBudget(3.0, 1e-3)
    return dp_sparse.PrivacyPlan(budget, dp_sparse.PoissonSampling(N, 20, steps)).with_noise(2.0)


def compiled(model: keras.Model, **options: Any) -> keras.Model:
    optimizer = dp_sparse.DPSGDOptimizer(keras.optimizers.SGD(0.1), plan_of(), 1.0)
    model.compile(optimizer, "binary_crossentropy", **options)
    return model


def click_model(form: Any = dict) -> keras.Model:
    """Tables of 7 items and 30 users: a column of another name is out of range."""
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in ("item", "user")}
    rows = [
        keras.layers.Embedding(size, 2, name=f"{name}s")(inputs[name])
        for name, size in (("item", 7), ("user", 30))
    ]
    output = keras.layers.Dense(1, "sigmoid")(keras.layers.Concatenate()(rows))
    return keras.Model(form(inputs), output)


def backwards(inputs: dict[str, Any]) -> list[Any]:
    return [inputs["user"], inputs["item"]]


def test_a_frame_with_text_that_no_input_takes_trains_under_xla() -> None:
    model = compiled(click_model(), jit_compile=True)
    batches = model.optimizer.plan.sampling.batches((frame(), labels()))
    with pytest.warns(UserWarning, match=r"no input for x\['age'\], x\['name'\]: left out") as told:
        model.fit(batches, verbose=0)
    assert int(model.optimizer.steps_spent) == 2
    assert sum("left out" in str(each.message) for each in told) == 1


@pytest.mark.parametrize("form", [dict, backwards], ids=["dict", "list"])
@pytest.mark.filterwarnings("ignore:.*left out")
def test_the_columns_of_a_frame_reach_the_same_inputs_everywhere(form: Any) -> None:
    model, x = compiled(click_model(form)), frame()
    del x["name"]
    own = {name: x[name] for name in ("user", "item")}
    assert dp_sparse.check_model(model, (x, labels())).ok
    assert str(dp_sparse.recommend(model, plan_of(), (x, labels())))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The structure of `inputs`")
        np.testing.assert_array_equal(model.predict(x, verbose=0), model.predict(own, verbose=0))
        np.testing.assert_array_equal(model(x), model(own))
        assert model.evaluate(x, labels(), verbose=0) == model.evaluate(own, labels(), verbose=0)
    if form is dict:
        batches = model.optimizer.plan.sampling.batches((x, labels()))
        model.fit(batches, validation_data=(x, labels()), verbose=0)


def test_a_missing_column_is_named_beside_those_that_are_there() -> None:
    model, x = compiled(click_model()), frame()
    del x["user"]
    with pytest.raises(ValueError, match=r"\['item', 'user'\].*'age'.*without \['user'\]"):
        dp_sparse.check_model(model, (x, labels()))
    with pytest.raises(ValueError, match=r"without \['user'\]"):
        model.fit(model.optimizer.plan.sampling.batches((x, labels())), verbose=0)
    assert int(model.optimizer.steps_spent) == 0


class Towers(keras.Model):
    """The two functional towers of a retrieval model, each of which gets the whole frame."""

    def __init__(self) -> None:
        super().__init__()
        self.both = [
            keras.Model({name: given}, keras.layers.Embedding(size, 2)(given))
            for name, size in (("item", 7), ("user", 30))
            for given in [keras.Input((), dtype="int32", name=name)]
        ]

    def call(self, features: dict[str, Any]) -> Any:
        return keras.ops.sigmoid(
            keras.ops.sum(self.both[0](features) * self.both[1](features), -1, keepdims=True)
        )


def test_functional_towers_take_their_own_columns_of_a_frame() -> None:
    model, x = compiled(Towers()), frame()
    del x["name"]
    assert dp_sparse.check_model(model, (x, labels())).ok
    model.fit(model.optimizer.plan.sampling.batches((x, labels())), verbose=0)
    item, user = model.both[0]({"item": x["item"]}), model.both[1]({"user": x["user"]})
    expected = tf.sigmoid(tf.reduce_sum(item * user, 1))
    np.testing.assert_allclose(model.predict(x, verbose=0)[:, 0], expected, rtol=1e-5)


def test_rows_are_counted_by_the_names_that_train() -> None:
    tables = {"item": 7, "user": 30}
    rows = dp_sparse.select_top_k(
        (frame(), labels()), tables, k=37, source=dp_sparse.PublicRows(), progress=False
    )
    assert [len(rows.row_ids[name]) for name in tables] == [7, 30]


def test_ids_that_bfloat16_rounds_are_refused_before_a_step() -> None:
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        layers = [keras.layers.Embedding(2000, 2), keras.layers.Dense(1, "sigmoid")]
        model = compiled(keras.Sequential(layers))
        examples = np.arange(N) * 40, labels()
        found = dp_sparse.check_model(model, examples)
        assert "dtype='int32'" in found.problems[0]
        with pytest.raises(dp_sparse.UnsupportedLayerError, match="up to 256 only"):
            model.fit(model.optimizer.plan.sampling.batches(examples), verbose=0)
        assert int(model.optimizer.steps_spent) == 0
    finally:
        keras.config.set_dtype_policy(policy)


def text_model(words: np.ndarray) -> keras.Model:
    given = keras.Input(words.shape[1:], dtype="string", name="words")
    rows = keras.layers.Embedding(64, 2)(keras.layers.Hashing(64)(given))
    rows = keras.layers.Flatten()(rows) if words.ndim > 1 else rows
    return keras.Model({"words": given}, keras.layers.Dense(1, "sigmoid")(rows))


class Series:
    """What pandas gives as a column."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.dtype, self.shape = values, values.dtype, values.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.values

    def __len__(self) -> int:
        return len(self.values)


WORDS = np.array([f"é{i % 9}" for i in range(N)])
PAIRS = np.stack([WORDS, WORDS], 1)
TEXTS = {
    "str": WORDS,
    "str pairs": PAIRS,
    "bytes": np.char.encode(WORDS, "utf-8"),
    "objects": WORDS.astype(object),
    "object pairs": PAIRS.astype(object),
    "objects of bytes": np.char.encode(PAIRS, "utf-8").astype(object),
    "NumPy's strings": WORDS.astype(np.dtypes.StringDType()),
    "a column of pandas": Series(WORDS.astype(object)),
}


@pytest.mark.parametrize("words", TEXTS.values(), ids=TEXTS.keys())
def test_text_of_every_kind_is_judged_as_it_trained(words: Any) -> None:
    plain = np.asarray(words)
    model, x = compiled(text_model(plain)), {"words": words}
    expected = model({"words": tf.constant(plain.astype(object))})
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-6)
    assert np.isfinite(model.evaluate(x, labels(), verbose=0))
    assert dp_sparse.check_model(model, (x, labels())).ok


def test_text_that_a_record_file_or_validation_data_gives_trains() -> None:
    model, x = compiled(text_model(WORDS)), {"words": WORDS}

    class Source:
        def __len__(self) -> int:
            return N

        def gather(self, indices: np.ndarray) -> Any:
            return {"words": WORDS[indices]}, labels()[indices]

    batches = model.optimizer.plan.sampling.batches(Source())
    history = model.fit(batches, validation_data=(x, labels()), verbose=0)
    assert len(history.history["val_loss"]) == 1


def test_missing_text_is_named_where_it_is_judged() -> None:
    words = WORDS.astype(object)
    words[3] = None
    with pytest.raises(ValueError, match="Expected text in x, got None in row 3"):
        compiled(text_model(WORDS)).predict({"words": words}, verbose=0)


def batches_of(model: keras.Model) -> tf.data.Dataset:
    own = {name: frame()[name] for name in ("item", "user")}
    return model.optimizer.plan.sampling.batches((own, labels()))


def test_a_first_fit_says_nothing_of_shuffling() -> None:
    model = compiled(click_model())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(batches_of(model), verbose=0)


@pytest.mark.parametrize(
    ("argument", "way_out"),
    [
        ({"batch_size": 8}, "expected_batch_size"),
        ({"validation_split": 0.2}, "validation_data"),
        ({"class_weight": {0: 1.0, 1: 2.0}}, r"batches\(dataset, class_weight"),
    ],
)
def test_what_keras_would_ignore_beside_batches_is_refused(argument: Any, way_out: str) -> None:
    model = compiled(click_model())
    with pytest.raises(ValueError, match=f"Expected no {next(iter(argument))}.*{way_out}"):
        model.fit(batches_of(model), verbose=0, **argument)
    assert int(model.optimizer.steps_spent) == 0


class WithOwnMethods(keras.Model):
    """Hands on whatever it gets, as models do that log or time their training."""

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        return super().fit(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return super().predict(*args, **kwargs)


def test_a_model_with_a_fit_of_its_own_trains() -> None:
    stock = click_model()
    model = compiled(WithOwnMethods(stock.input, stock.output))
    own = {name: frame()[name] for name in ("item", "user")}
    with pytest.raises(dp_sparse.PrivacyError, match="Expected a batch made by this plan's"):
        model.fit(own, labels(), verbose=0)
    model.fit(batches_of(model), verbose=0)
    assert int(model.optimizer.steps_spent) == 2
    assert model.predict(own, verbose=0).shape == (N, 1)


def generator() -> Any:
    yield frame(), labels()


class Own(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return {name: frame()[name] for name in ("item", "user")}, labels()


@pytest.mark.parametrize(("source", "name"), [(generator(), "generator"), (Own(), "Own")])
def test_generators_and_pydatasets_are_refused_by_name(source: Any, name: str) -> None:
    model = compiled(click_model())
    with pytest.raises(ValueError, match=f"RecordFile.*got {name}"):
        model.optimizer.plan.sampling.batches(source)
    with pytest.raises(dp_sparse.PrivacyError, match=f"got {name}.*sampling.batches"):
        model.fit(source, verbose=0)
    assert int(model.optimizer.steps_spent) == 0


@pytest.mark.parametrize(
    ("class_weight", "match"),
    [
        ({"0": 1.0, "1": 2.0}, r"got the text '0'.*int\(label\)"),
        ({"clicked": {0: 1.0, 1: 2.0}}, "of one output, got .*sample_weight"),
    ],
)
def test_class_weights_with_other_keys_than_labels_name_the_way_out(
    class_weight: Any, match: str
) -> None:
    sampling = dp_sparse.PoissonSampling(N, 20, 2)
    with pytest.raises(ValueError, match=match):
        sampling.batches((np.zeros(N), labels()), class_weight=class_weight)


def test_batches_that_are_often_empty_train() -> None:
    """An expected batch of half an example: most batches have none, and still pay their step."""
    budget, sampling = dp_sparse.PrivacyBudget(3.0, 1e-3), dp_sparse.PoissonSampling(N, 0.5, 12)
    plan = dp_sparse.PrivacyPlan(budget, sampling).with_noise(2.0)
    model = click_model()
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), "binary_crossentropy")
    examples = {name: frame()[name] for name in ("item", "user")}, labels()
    history = model.fit(plan.sampling.batches(examples), verbose=0)
    assert int(model.optimizer.steps_spent) == 12 and len(history.history["loss"]) == 1
    assert all(np.isfinite(weights).all() for weights in model.get_weights())


def preprocessed() -> tuple[keras.Model, dict[str, np.ndarray]]:
    """Every preprocessing layer of tabular data, with a state that is public."""
    layers, rows = keras.layers, np.arange(N)
    words, numbers = np.array(["a", "b", "c"])[rows % 3], rows.astype(np.float32)
    inputs = {
        "word": keras.Input((), dtype="string", name="word"),
        "code": keras.Input((), dtype="int64", name="code"),
        "price": keras.Input((1,), name="price"),
        "text": keras.Input((), dtype="string", name="text"),
    }
    known = layers.StringLookup(vocabulary=["a", "b"])(inputs["word"])
    codes = layers.IntegerLookup(vocabulary=[3, 5, 7])(inputs["code"])
    hashed = layers.Hashing(8)(inputs["word"])
    crossed = layers.HashedCrossing(16)((inputs["word"], inputs["code"]))
    bins = layers.Discretization([10.0, 20.0])(inputs["price"])[:, 0]
    tokens = layers.TextVectorization(
        vocabulary=["x", "y"], output_sequence_length=3, standardize=None
    )(inputs["text"])
    tables = [(known, 4), (codes, 5), (hashed, 8), (crossed, 16), (bins, 3)]
    features = [layers.Embedding(size, 2)(ids) for ids, size in tables]
    features += [
        layers.GlobalAveragePooling1D()(layers.Embedding(5, 2)(tokens)),
        layers.CategoryEncoding(num_tokens=4)(keras.ops.reshape(known, (-1, 1))),
        layers.Normalization(mean=20.0, variance=9.0)(inputs["price"]),
        layers.Rescaling(0.1)(inputs["price"]),
    ]
    output = layers.Dense(1, "sigmoid")(layers.Concatenate()(features))
    x = {"word": words, "code": rows % 9, "price": numbers[:, None], "text": np.full(N, "x y z")}
    return keras.Model(inputs, output), x


def test_all_preprocessing_layers_train_in_one_model() -> None:
    model, x = preprocessed()
    compiled(model)
    model.fit(
        model.optimizer.plan.sampling.batches((x, labels())),
        validation_data=(x, labels()),
        verbose=0,
    )
    assert int(model.optimizer.steps_spent) == 2
    assert model.predict(x, verbose=0).shape == (N, 1)


@pytest.mark.parametrize(
    ("ids", "dtype"),
    [
        (2**32 + np.arange(N), "int32"),
        (256 + np.arange(N), "uint8"),
        (np.arange(N).astype(np.uint64) + np.uint64(2**32), "int32"),
    ],
)
def test_ids_that_an_input_is_too_narrow_for_train_no_other_rows(ids: Any, dtype: str) -> None:
    inputs = keras.Input((), dtype=dtype, name="item")
    rows = keras.layers.Embedding(2 * N, 2)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(rows))
    compiled(model)
    for check in (
        lambda: dp_sparse.check_model(model, (ids, labels())),
        lambda: model.fit(model.optimizer.plan.sampling.batches((ids, labels())), verbose=0),
    ):
        wanted = f"integers of x within its Input's {dtype}, got"
        with pytest.raises(dp_sparse.BadExampleError, match=wanted):
            check()
    small = np.arange(N, dtype=ids.dtype)
    assert dp_sparse.check_model(model, (small, labels())).ok


def test_an_id_that_an_input_is_too_narrow_for_is_found_in_a_late_batch() -> None:
    """Behind the batches that are looked at before the step."""
    ids = np.arange(16)
    ids[-1] += 2**32
    inputs = keras.Input((), dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Embedding(16, 2)(inputs)))
    plan = dp_sparse.PrivacyPlan(
        dp_sparse.PrivacyBudget(3.0, 1e-3), dp_sparse.StreamSampling(num_examples=16, batch_size=2)
    ).calibrate()
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
    with pytest.raises(dp_sparse.BadExampleError, match="integers of x within its Input's int32"):
        model.fit(plan.sampling.batches((ids, np.ones(16))), verbose=0)
    assert int(model.optimizer.steps_spent) >= 7
