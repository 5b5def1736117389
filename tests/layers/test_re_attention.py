"""Re-Attention beside its reference and Keras' layer; privacy: no gradient, no company, exact."""

from pathlib import Path
from typing import Any

import dp_accounting
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import dp_sparse
from dp_sparse import layers
from dp_sparse.clipping import stop_gradient_read
from dp_sparse.layers.error_propagation import ProjectedVariance
from tests.clipping.brute_force import assert_as_brute_force, clipped, ids, refusal, values
from tests.reference import error_propagation as reference
from tests.training_cases import plan_for, weights_of

WIDTH, LENGTH, TOKENS, NOISE = 6, 5, 9, 0.05
CORRECTIONS = ("before_softmax", "after_softmax")


def token_variances() -> np.ndarray:
    return np.random.default_rng(5).uniform(0, 3, TOKENS).astype(np.float32)


def encoder(correction: str = CORRECTIONS[0], tied: bool = True, heads: int = 2) -> keras.Model:
    """Two blocks of Re-Attention, all rules of error propagation, the last position's logits."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(TOKENS, WIDTH, tie_weights=tied)
    mean = table(tokens)
    variance = layers.TokenVariance(TOKENS, layers.EffectiveErrors(NOISE, token_variances()))(
        tokens
    )
    for activation in ("relu", "gelu"):
        attention = layers.ReAttention(heads, 3, weight_variance=NOISE, correction=correction)
        attended, error = attention(
            mean, mean, variance=variance, use_causal_mask=True, return_variance=True
        )
        norm = layers.WithVariance(keras.layers.LayerNormalization(), NOISE)
        mean, variance = norm(mean + attended, variance + error)
        dense = layers.WithVariance(keras.layers.Dense(WIDTH, activation=activation), NOISE)
        mean, variance = dense(mean, variance)
    return keras.Model(tokens, table(mean[:, -1], reverse=True))


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 99), st.sampled_from(CORRECTIONS))
def test_scores_are_those_of_the_reference(
    heads: int, length: int, seed: int, correction: str
) -> None:
    keras.utils.set_random_seed(seed)
    layer = layers.ReAttention(heads, 3, weight_variance=NOISE, correction=correction)
    x, variance = values(2, length, 4, seed=seed), values(2, length, 4, seed=seed + 1) ** 2
    _, scores = layer(x, x, variance=variance, use_causal_mask=True, return_attention_scores=True)
    query, key = (np.asarray(each(x)) for each in (layer.query_dense, layer.key_dense))
    kernel = np.asarray(layer.key_dense.kernel)
    allowed = np.tril(np.ones((length, length), bool))
    for b, h in np.ndindex(2, heads):
        noise = np.array(
            [reference.linear(x[b, s], variance[b, s], kernel[:, h], NOISE) for s in range(length)]
        )
        after = correction == "after_softmax"
        expected = reference.attention(query[b, :, h], key[b, :, h], noise, allowed, after)
        np.testing.assert_allclose(scores[b, h], expected, rtol=1e-4, atol=1e-6)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 99), st.sampled_from(CORRECTIONS))
def test_one_variance_for_all_entries_is_that_of_each(
    heads: int, length: int, seed: int, correction: str
) -> None:
    """Its sums have two terms in place of one for each entry."""
    keras.utils.set_random_seed(seed)
    layer = layers.ReAttention(heads, 3, weight_variance=NOISE, correction=correction, value_dim=2)
    x, one = values(2, length, 4, seed=seed), values(2, length, 1, seed=seed + 1) ** 2
    asked = {"use_causal_mask": True, "return_attention_scores": True, "return_variance": True}
    found = layer(x, x, variance=one, **asked)
    expected = layer(x, x, variance=np.repeat(one, 4, axis=-1), **asked)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("width", [1, 4])
def test_layers_without_biases_have_none_that_is_noisy(width: int) -> None:
    nothing = np.zeros((2, 3, width), np.float32)
    attention = layers.ReAttention(2, 3, weight_variance=NOISE, use_bias=False)
    dense = layers.WithVariance(keras.layers.Dense(5, use_bias=False), NOISE)
    zeros = np.zeros((2, 3, 4), np.float32)
    assert not np.any(attention(zeros, zeros, variance=nothing, return_variance=True)[-1])
    assert not np.any(dense(zeros, nothing)[1])


def test_a_variance_of_an_unknown_width_is_named() -> None:
    layer = layers.ReAttention(1, 4)
    traced = tf.function(lambda x, v: layer(x, x, variance=v), autograph=False)
    given_ = (tf.TensorSpec([None, None, n], tf.float32) for n in (8, None))
    with pytest.raises(ValueError, match="Expected variance of shape"):
        traced.get_concrete_function(*given_)


@pytest.mark.parametrize("shape", [(), (2, 3), (2, 3, 5), (2, 1, 1), (3, 3, 1)])
def test_a_variance_of_another_shape_is_named(shape: tuple[int, ...]) -> None:
    layer, x = layers.ReAttention(1, 4, name="attention"), values(2, 3, 8)
    with pytest.raises(ValueError, match=r"\(2, 3, 8\) or \(2, 3, 1\) at layer 'attention', got"):
        layer(x, x, variance=np.ones(shape, np.float32))


@pytest.mark.parametrize("shape", [(2, 3), (3, 5), (3,)])
def test_a_variance_of_another_shape_is_named_when_a_model_is_made(shape: tuple[int, ...]) -> None:
    x, variance = keras.Input((3, 8)), keras.Input(shape)
    with pytest.raises(ValueError, match=r"\(None, 3, 8\) or \(None, 3, 1\) at layer"):
        layers.ReAttention(1, 4)(x, x, variance=variance)
    layers.ReAttention(1, 4)(x, value=x, variance=keras.Input((3, 1)))


def test_what_keras_does_not_have_is_given_by_name() -> None:
    """Keras' third argument is `value_dim`, its fourth `dropout`."""
    with pytest.raises(TypeError, match="positional argument"):
        layers.ReAttention(2, 8, 8)  # type: ignore[misc]


def test_in_half_precision_variances_are_float32() -> None:
    half = layers.ReAttention(2, 3, weight_variance=NOISE, dtype="mixed_float16")
    whole = layers.ReAttention(2, 3, weight_variance=NOISE)
    x = values(2, LENGTH, 4)
    given_ = {"variance": np.full((2, LENGTH, 1), 0.1, np.float32), "return_variance": True}
    for layer in (half, whole):
        layer(x, x)
    half.set_weights(whole.get_weights())
    (found, variance), (expected, wanted) = (layer(x, x, **given_) for layer in (half, whole))
    assert found.dtype == "float16" and variance.dtype == "float32"
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(variance, wanted, rtol=0.02)


def test_without_noise_it_is_keras_layer_over_other_axes() -> None:
    x = values(2, 3 * LENGTH, 4)
    x = np.reshape(x, (2, 3, LENGTH, 4))
    ours = layers.ReAttention(2, 3, attention_axes=2)
    theirs = keras.layers.MultiHeadAttention(2, 3, attention_axes=2)
    for layer in (ours, theirs):
        layer(x, x)
    ours.set_weights(theirs.get_weights())
    np.testing.assert_allclose(ours(x, x), theirs(x, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("options", [{}, {"value_dim": 2, "use_bias": False, "output_shape": 7}])
def test_without_noise_it_is_keras_layer(correction: str, options: dict[str, Any]) -> None:
    x, mask = values(3, LENGTH, 4), np.arange(LENGTH) != 2
    ours = layers.ReAttention(2, 3, correction=correction, **options)
    theirs = keras.layers.MultiHeadAttention(2, 3, **options)
    for layer in (ours, theirs):
        layer(x, x)
    ours.set_weights(theirs.get_weights())
    given_ = {"attention_mask": mask, "use_causal_mask": True, "return_attention_scores": True}
    for found, expected in zip(ours(x, x, **given_), theirs(x, x, **given_), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_expected_exponentials_are_those_of_the_means() -> None:
    """What the correction is for: E[exp(⟨q, K⟩ − excess)] = exp⟨q, μ⟩, and not at other noise."""
    rng = np.random.default_rng(0)
    query, key, spread = rng.normal(size=4), rng.normal(size=4), rng.uniform(0.8, 1.5, 4)
    samples = key + spread * rng.normal(size=(400_000, 4))
    layer = layers.ReAttention(1, 4)
    layer(values(1, 2, 4), values(1, 2, 4))
    given_ = [
        tf.constant(each, tf.float32)[tf.newaxis, tf.newaxis, tf.newaxis]
        for each in (query / 2, spread**2)
    ]
    excess = float(tf.squeeze(layer._excess(given_[0], ProjectedVariance(given_[1], None))))
    logits, exact = samples @ query / 2, np.exp(key @ query / 2)
    assert excess > 0.1
    assert np.exp(logits - excess).mean() == pytest.approx(exact, rel=0.02)
    for factor in (0.0, 2 / 3, 3 / 2):
        assert np.exp(logits - factor * excess).mean() != pytest.approx(exact, rel=0.02)


def test_the_variance_of_outputs_is_that_of_samples() -> None:
    """Of one key, so that scores are 1, and noise in all weights; others are rejected."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    layer, x = layers.ReAttention(2, 3, weight_variance=0.01), values(1, 1, 4)
    _, variance = layer(x, x, return_variance=True)
    *of_scores, kernel, bias, last_kernel, last_bias = (
        w + 0.1 * rng.normal(size=(20_000, *w.shape)) for w in layer.get_weights()
    )
    attended = np.einsum("i,niho->nho", x[0, 0], kernel) + bias
    outputs = np.einsum("nho,nhod->nd", attended, last_kernel) + last_bias
    for draw in range(2):  # the formula is the layer's own
        every = [*of_scores, kernel, bias, last_kernel, last_bias]
        layer.set_weights([each[draw] for each in every])
        np.testing.assert_allclose(layer(x, x)[0, 0], outputs[draw], rtol=1e-4, atol=1e-5)
    ratios = variance[0, 0] / outputs.var(axis=0)
    np.testing.assert_allclose(ratios, 1, rtol=0.06)
    for factor in (2 / 3, 3 / 2):
        assert not np.allclose(factor * ratios, 1, rtol=0.06)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_no_gradient_flows_through_the_correction(correction: str) -> None:
    """Gradients are those with the excess as a constant."""
    x, variance = tf.constant(values(2, LENGTH, 4)), tf.constant(values(2, LENGTH, 4) ** 2)
    layer = layers.ReAttention(2, 3, weight_variance=NOISE, correction=correction)
    layer(x, x)
    weights = [v.value for v in layer.trainable_variables]
    key_variance = layer._projected_variance(layer.key_dense, x, variance)
    query = layer.query_dense(x) * 3**-0.5
    excess = tf.constant(layer._excess(query, key_variance).numpy())

    def by_hand() -> tf.Tensor:
        query, key, value = (
            each(x) for each in (layer.query_dense, layer.key_dense, layer.value_dense)
        )
        logits = tf.einsum("bshd,bthd->bhts", key, query) * 3**-0.5
        if correction == "before_softmax":
            scores = tf.nn.softmax(logits - excess)
        else:
            scores = tf.nn.softmax(logits) * tf.exp(-excess)
        return layer.output_dense(tf.einsum("bhts,bshd->bthd", scores, value))

    found = []
    for run in (lambda: layer(x, x, variance=variance), by_hand):
        with tf.GradientTape() as tape:
            tape.watch([x, variance])
            loss = tf.reduce_sum(tf.square(run()))
        found.append(tape.gradient(loss, [*weights, x]))
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-3, atol=1e-5)
    with tf.GradientTape() as tape:
        tape.watch(variance)
        loss = tf.reduce_sum(layer(x, x, variance=variance))
    assert tape.gradient(loss, variance) is None


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_clipping_is_exact(correction: str, tied: bool) -> None:
    keras.utils.set_random_seed(0)
    assert_as_brute_force(encoder(correction, tied), ids(6, LENGTH, rows=TOKENS))


def test_an_example_does_not_depend_on_its_company() -> None:
    keras.utils.set_random_seed(0)
    model, x = encoder(), ids(6, LENGTH, rows=TOKENS)
    y = np.linspace(-1, 1, 6, dtype=np.float32)
    together, norms = model(x).numpy(), clipped(model, x, y, 1.0).norms
    for i in range(6):
        np.testing.assert_allclose(model(x[i : i + 1])[0], together[i], rtol=1e-4, atol=1e-6)
        alone = clipped(model, x[i : i + 1], y[i : i + 1], 1.0).norms
        np.testing.assert_allclose(alone, norms[i : i + 1], rtol=1e-4)


def labels(count: int) -> np.ndarray:
    return ids(count, rows=TOKENS, seed=3)


def test_check_model_accepts_it_and_names_its_rules() -> None:
    examples = ids(6, LENGTH, rows=TOKENS), labels(6)
    model = encoder()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    check = dp_sparse.check_model(model, examples)
    assert not check.problems, str(check)


def trained(tied: bool, **options: Any) -> list[np.ndarray]:
    """Weights after three steps without noise."""
    keras.utils.set_random_seed(0)
    count = 12
    model, plan = encoder(tied=tied), plan_for(count, steps=3)
    jit = options.pop("jit_compile", False)
    optimizer = dp_sparse.DPSGDOptimizer("sgd", plan, 0.5, **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit)
    batches = plan.sampling.batches((ids(count, LENGTH, rows=TOKENS), labels(count)))
    model.fit(batches, epochs=1, verbose=0)
    return weights_of(model)


@pytest.mark.slow
@pytest.mark.usefixtures("no_noise")
@pytest.mark.parametrize(
    ("tied", "options"), [(False, {"jit_compile": True}), (True, {"microbatch_size": 4})]
)
def test_xla_and_micro_batches_take_the_same_steps(tied: bool, options: dict[str, Any]) -> None:
    for ours, expected in zip(trained(tied, **options), trained(tied), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_loaded_model_gives_the_same_outputs(correction: str, tmp_path: Path) -> None:
    model, x = encoder(correction), ids(3, LENGTH, rows=TOKENS)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "served"))
    for again in (loaded(x), served.serve(x)):
        np.testing.assert_allclose(again, model(x), rtol=1e-5)
    variances = [w for w in loaded.weights if w.path.endswith("variances")]
    np.testing.assert_allclose(variances[0], token_variances(), rtol=1e-6)
    assert not variances[0].trainable


def test_bad_arguments_are_refused() -> None:
    for bad in (-1.0, float("nan"), "noise"):
        with pytest.raises(ValueError, match="Expected a finite weight_variance >= 0, got"):
            layers.ReAttention(1, 2, weight_variance=bad)
        with pytest.raises(ValueError, match="Expected a finite weight_variance >= 0, got"):
            layers.WithVariance(keras.layers.Dense(2), bad)
    with pytest.raises(ValueError, match="correction to be one of .*got correction='later'"):
        layers.ReAttention(1, 2, correction="later")
    with pytest.raises(ValueError, match="got use_gate=True"):
        layers.ReAttention(1, 2, use_gate=True)
    with pytest.raises(ValueError, match="errors of 3 tokens, got 2"):
        layers.TokenVariance(3, layers.EffectiveErrors(0.0, np.ones(2)))
    for layer in (keras.layers.Dense(2, "tanh"), keras.layers.LSTM(2)):
        with pytest.raises(ValueError, match="Expected a Dense or Activation"):
            layers.WithVariance(layer)


class Peeks(keras.layers.Layer):
    """Reads the kernel of another layer, with or without a gradient."""

    def __init__(self, other: keras.layers.Layer, apart: bool) -> None:
        super().__init__()
        self.other, self.apart = [other], apart  # in a list made private to the Keras tracker

    def call(self, x: tf.Tensor) -> tf.Tensor:
        kernel = self.other[0].kernel
        total = stop_gradient_read(kernel) if self.apart else tf.convert_to_tensor(kernel.value)
        return x * tf.reduce_sum(total)


def test_detached_weights_have_no_gradient_and_others_stay_refused() -> None:
    inputs = keras.Input((3,))
    dense = keras.layers.Dense(2)
    apart = keras.Model(inputs, Peeks(dense, apart=True)(dense(inputs)))
    assert_as_brute_force(apart, values(5, 3))
    told = refusal(keras.Model(inputs, Peeks(dense, apart=False)(dense(inputs))), 3)
    assert "kernel" in told


def test_errors_come_from_what_the_plan_makes_public() -> None:
    plan = plan_for(100, steps=2).with_noise(3.0)
    known = dp_sparse.RowFrequencies.public("items", [1.0, 0.1])
    errors = layers.effective_errors(plan, 0.5, known)
    deviation = 3.0 * 0.5 / plan.sampling.expected_batch_size
    assert errors.weight_variance == pytest.approx(deviation**2)
    np.testing.assert_allclose(
        errors.token_variances, [deviation**2, (10 * deviation) ** 2], rtol=1e-6
    )
    fresh = dp_sparse.PrivacyPlan(plan.budget, plan.sampling)
    with pytest.raises(ValueError, match="Expected a calibrated plan"):
        layers.effective_errors(fresh, 0.5, known)
    with pytest.raises(ValueError, match="clip_norm"):
        layers.effective_errors(plan, -1.0, known)


def test_frequencies_of_private_data_must_be_paid_for() -> None:
    x = {"items": np.tile([[0, 1]], (50, 1))}
    table, source = dp_sparse.TopKTable(2, max_lookups=2), dp_sparse.GaussianTopK(20.0)
    found = dp_sparse.noisy_frequencies((x, np.ones(50)), "items", table, source, progress=False)
    plan = plan_for(50, steps=2)
    with pytest.raises(dp_sparse.PrivacyError, match="Expected a plan that pays for 'frequencies"):
        layers.effective_errors(plan.with_noise(3.0), 1.0, found)
    paying = dp_sparse.PrivacyPlan(plan.budget, plan.sampling, releases=(found.release,))
    errors = layers.effective_errors(paying.with_noise(3.0), 1.0, found)
    assert errors.token_variances.shape == (2,) and errors.release == found.release


PAID = dp_sparse.Release("frequencies of 2 rows", dp_accounting.GaussianDpEvent(20.0))


def model_of_frequencies() -> keras.Model:
    tokens = keras.Input((1,), dtype="int32")
    variance = layers.TokenVariance(2, layers.EffectiveErrors(NOISE, np.ones(2), PAID))(tokens)
    return keras.Model(tokens, keras.layers.Dense(1)(variance))


def train_under(model: keras.Model, *, pays: bool) -> None:
    """One step, or the refusal that is expected."""
    plan = plan_for(50, steps=1)
    releases = (PAID,) if pays else ()
    plan = dp_sparse.PrivacyPlan(plan.budget, plan.sampling, releases=releases).with_noise(3.0)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), "mse")
    model.fit(plan.sampling.batches((np.ones((50, 1), np.int32), np.ones((50, 1)))), verbose=0)
    assert int(model.optimizer.steps_spent) == 1


UNPAID = "pays for 'frequencies of 2 rows'"


def test_a_model_with_private_frequencies_trains_under_the_plan_that_pays_alone() -> None:
    model = model_of_frequencies()
    with pytest.raises(dp_sparse.PrivacyError, match=UNPAID):
        train_under(model, pays=False)
    assert int(model.optimizer.steps_spent) == 0
    train_under(model, pays=True)


def test_a_copy_owes_what_its_model_owed(tmp_path: Path) -> None:
    """One of a model that was paid for is as public as its weights."""
    model = model_of_frequencies()
    model.save(tmp_path / "untrained.keras")
    for copy in (
        keras.models.clone_model(model),
        keras.models.load_model(tmp_path / "untrained.keras"),
    ):
        with pytest.raises(dp_sparse.PrivacyError, match=UNPAID):
            train_under(copy, pays=False)
        train_under(copy, pays=True)
    train_under(model, pays=True)
    model.save(tmp_path / "trained.keras")
    train_under(keras.models.load_model(tmp_path / "trained.keras"), pays=False)


def test_what_was_paid_stays_paid() -> None:
    """A second plan that has the release, and takes no step, does not undo the first one."""
    model = model_of_frequencies()
    train_under(model, pays=True)
    plan = plan_for(50, steps=1)
    plan = dp_sparse.PrivacyPlan(plan.budget, plan.sampling, releases=(PAID,)).with_noise(3.0)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), "mse")
    with pytest.raises(dp_sparse.PrivacyError):
        model.fit(np.ones((50, 1), np.int32), np.ones((50, 1)), verbose=0)
    train_under(model, pays=False)


def test_a_plan_pays_with_its_first_step(tmp_path: Path) -> None:
    """A fit that was refused has published nothing, and paid for nothing."""
    model, plan = model_of_frequencies(), plan_for(50, steps=1)
    plan = dp_sparse.PrivacyPlan(plan.budget, plan.sampling, releases=(PAID,)).with_noise(3.0)
    model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), "mse")
    with pytest.raises(dp_sparse.PrivacyError):
        model.fit(np.ones((50, 1), np.int32), np.ones((50, 1)), verbose=0)
    assert int(model.optimizer.steps_spent) == 0
    model.save(tmp_path / "refused.keras")
    with pytest.raises(dp_sparse.PrivacyError, match=UNPAID):
        train_under(keras.models.load_model(tmp_path / "refused.keras"), pays=False)


@pytest.mark.parametrize("through", [None, lambda model: keras.Model(model.inputs, model.outputs)])
def test_an_export_asks_who_pays(through: Any, tmp_path: Path) -> None:
    """Also where the model to export is another one, and the compiled one has no frequencies."""
    model = model_of_frequencies()
    compiled = model
    if through is not None:
        tokens = keras.Input((1,))
        compiled, model = keras.Model(tokens, keras.layers.Dense(1)(tokens)), through(model)
    as_model = None if through is None else lambda trained: model
    for pays in (False, True):
        plan = plan_for(50, steps=1)
        releases = (PAID,) if pays else ()
        plan = dp_sparse.PrivacyPlan(plan.budget, plan.sampling, releases=releases).with_noise(3.0)
        compiled.compile(dp_sparse.DPSGDOptimizer("sgd", plan, 1.0), "mse")
        compiled.optimizer.build(compiled.trainable_variables)
        if pays:
            dp_sparse.export_model(compiled, tmp_path / "paid", as_model=as_model)
            assert "frequencies of 2 rows" in (tmp_path / "paid" / "statement.txt").read_text()
        else:
            with pytest.raises(dp_sparse.PrivacyError, match=UNPAID + ".*export it with a plan"):
                dp_sparse.export_model(compiled, tmp_path / "unpaid", as_model=as_model)
    assert not (tmp_path / "unpaid").exists()


def test_bad_errors_are_refused() -> None:
    for bad in ([-1.0], [np.nan], [[1.0]]):
        with pytest.raises(ValueError, match="Expected token_variances finite"):
            layers.EffectiveErrors(0.1, np.array(bad))
    with pytest.raises(ValueError, match="weight_variance"):
        layers.EffectiveErrors(-0.1, np.ones(2))
