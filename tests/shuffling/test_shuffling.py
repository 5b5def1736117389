"""Permutations are uniform and change no training; and what may be permuted is found."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import noise, shuffling
from dp_sparse.core import UnsupportedLayerError
from dp_sparse.shuffling import optimizer as optimizer_module
from dp_sparse.shuffling.groups import permutations
from models import lora
from tests.shuffling.permuted_models import data_for, mlp
from tests.training_cases import plan_for

CLIP = 0.5


def shuffled(model: keras.Model, followers: Any = lambda variable: ()) -> list[Any]:
    groups = shuffling.permutation_groups(model)
    shuffling.shuffle(groups, noise.NoiseKey().next_draw(), followers)
    return groups


def chi_square(drawn: np.ndarray) -> float:
    """Of rows that are permutations of four, against all 24 being alike."""
    assert (np.sort(drawn, axis=1) == np.arange(4)).all()
    counts = np.bincount(np.unique(drawn @ [64, 16, 4, 1], return_inverse=True)[1], minlength=24)
    return float(((counts - len(drawn) / 24) ** 2).sum() / (len(drawn) / 24))


def test_permutations_are_uniform() -> None:
    """All 24 of four units, by chi-square of 4,800 draws; of heads, and within heads of two."""
    drawn = []
    group = shuffling.Group("", (shuffling.Part(4, ()), shuffling.Part(4, ())), 4)
    key = noise.NoiseKey()
    draws = tf.function(lambda: permutations(group, key.next_draw(), 0), autograph=False)
    for _ in range(1200):
        drawn.append([places.numpy().reshape(4, 4) for places in draws()])
    heads = np.stack([one[:, 0] // 4 for one, _ in drawn])
    assert all((one // 4 == other // 4).all() for one, other in drawn)
    assert chi_square(heads) < 60
    within = [np.concatenate([each[part] % 4 for each in drawn]) for part in (0, 1)]
    assert all(chi_square(each) < 60 for each in within)
    assert not np.array_equal(*within)
    skewed = np.concatenate([within[0][:2400], within[0][:2400][:, [0, 1, 3, 2]][:1200]])
    skewed[:600] = np.arange(4)
    assert chi_square(skewed) > 60


def losses(optimizer: Any, steps: int = 8) -> list[float]:
    keras.utils.set_random_seed(5)
    model = mlp()
    x = data_for(model, 16)
    plan = plan_for(16, steps=steps, noise_multiplier=1.0, capacity=16)
    made = optimizer(plan)
    model.compile(made, loss="mse")
    made.use_noise_key(tf.constant([1, 2], tf.int64))
    history = []
    for batch in plan.sampling.batches((x, x[:, :1])):
        model.train_on_batch(*batch)
        history.append(float(np.mean((model(x).numpy() - x[:, :1]) ** 2)))
    return history


@pytest.mark.parametrize("wrapped", [lambda: keras.optimizers.Adam(0.05)])
@pytest.mark.parametrize("shared", [0.0, 0.02])
def test_training_gives_the_same_losses(
    wrapped: Any, shared: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Adam's moments moving along, and noise that is the same at every place."""

    def means(totals: Any, deviation: Any, divisor: float, *_: Any) -> Any:
        return [tf.cast(t / divisor, tf.float32) + shared for t in totals]

    monkeypatch.setattr(noise, "noisy_means", means)
    monkeypatch.setattr(keras.layers.Dropout, "call", lambda self, x, training=False: x)
    plain = losses(lambda plan: dp_sparse.DPSGDOptimizer(wrapped(), plan, CLIP))
    other = losses(lambda plan: dp_sparse.ShuffledDPSGDOptimizer(wrapped(), plan, CLIP))
    np.testing.assert_allclose(other, plain, rtol=2e-5)
    assert plain[-1] != plain[0]


def test_the_sum_is_clipped_to_the_batch_norm(no_noise: None) -> None:
    """Eight examples that agree have a sum of norm 8·C; at c′ = 2·C the step is a quarter."""
    moved = []
    for batch_clip in (None, 2 * CLIP):
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)]
        )
        plan = plan_for(8, steps=1, capacity=8)
        optimizer = dp_sparse.ShuffledDPSGDOptimizer(
            keras.optimizers.SGD(1.0), plan, CLIP, batch_clip
        )
        model.compile(optimizer, loss=lambda y, p: 100.0 * p[:, 0])
        model.fit(plan.sampling.batches((np.ones((8, 3)), np.ones(8))), verbose=0)
        moved.append(np.linalg.norm(model.get_weights()[0]))
    np.testing.assert_allclose(moved, [CLIP, 2 * CLIP / 8], rtol=1e-5)


def test_it_is_saved_with_its_settings() -> None:
    plan = plan_for(8)
    optimizer = dp_sparse.ShuffledDPSGDOptimizer("adam", plan, CLIP, 2.0)
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.batch_clip_norm == 2.0 and again.plan == plan
    with pytest.raises(ValueError, match="Expected batch_clip_norm >= clip_norm=0.5, got"):
        dp_sparse.ShuffledDPSGDOptimizer("adam", plan, CLIP, 0.1)


def test_rotary_embeddings_are_refused_by_name() -> None:
    hub = pytest.importorskip("keras_hub")
    inputs = keras.Input((4, 8))
    model = keras.Model(inputs, hub.layers.RotaryEmbedding(name="rope")(inputs))
    with pytest.raises(UnsupportedLayerError, match="without rotary embeddings, got rope"):
        shuffling.permutation_groups(model)


def test_softmax_units_and_units_used_twice_stay() -> None:
    inputs = keras.Input((4,))
    soft = keras.layers.Dense(5, "softmax")(inputs)
    twice = keras.layers.Dense(5, "relu")(soft)
    outputs = keras.layers.Dense(2)(twice) + keras.layers.Dense(2)(twice)
    assert shuffling.permutation_groups(keras.Model(inputs, outputs)) == []


def test_units_that_leave_a_model_stay() -> None:
    """An output shows their order, also that of a model within the model."""
    inputs = keras.Input((4,))
    for seen in (False, True):
        hidden = keras.layers.Dense(5, "relu")(inputs)
        output = keras.layers.Dense(2)(hidden)
        model = keras.Model(inputs, [hidden, output] if seen else output)
        assert len(shuffling.permutation_groups(model)) == (0 if seen else 1)
    inner = keras.Model(inputs, keras.layers.Dense(3, "relu")(inputs))
    other = keras.Input((4,))
    outer = keras.Model(other, keras.layers.Dense(2)(inner(other)))
    assert shuffling.permutation_groups(outer) == []


@pytest.mark.parametrize(
    ("name", "arguments", "count"),
    [
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9, "use_ema": True}, 2),
        ("Adagrad", {}, 1),
        ("Adam", {"amsgrad": True}, 3),
        ("Lamb", {}, 2),
        ("Nadam", {"use_ema": True}, 3),
    ],
)
def test_all_slots_of_an_optimizer_follow(name: str, arguments: Any, count: int) -> None:
    """Also if there are as many variables as the optimizer has numbers, such as its rate."""
    variables = [keras.Variable(np.ones((3, 4))), keras.Variable(np.ones(4))]
    optimizer = getattr(keras.optimizers, name)(**arguments)
    optimizer.build(variables)
    slots = optimizer_module._slots_of(optimizer)
    assert [len(slots[id(v)]) for v in variables] == [count, count]
    assert all(slot.shape == v.shape for v in variables for slot in slots[id(v)])


def test_slots_of_other_shapes_are_refused() -> None:
    plan, model = plan_for(8), mlp()
    model.compile(dp_sparse.ShuffledDPSGDOptimizer(keras.optimizers.Adafactor(), plan, CLIP), "mse")
    with pytest.raises(ValueError, match="slots have the shapes of their variables, got adafactor"):
        model.optimizer.build(model.trainable_variables)


def test_attention_with_a_gate_or_with_adapters_stays() -> None:
    """A gate sees the order of heads; the projections of adapters are other layers."""
    for change in ("gate", "adapters"):
        inputs = keras.Input((4, 8))
        layer = keras.layers.MultiHeadAttention(2, 3, use_gate=change == "gate")
        model = keras.Model(inputs, layer(inputs, inputs))
        if change == "adapters":
            lora.add_to_attention(layer, rank=2, prefix="first")
        x = data_for(model)
        outputs = model(x).numpy()
        assert not shuffled(model)
        np.testing.assert_allclose(model(x), outputs, rtol=1e-5)
