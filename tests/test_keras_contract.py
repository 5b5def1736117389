"""One test for each internal of Keras that dp_sparse stands on; a Keras that moves one fails."""

import inspect
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.replicas import strategy_of


def small() -> keras.Model:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])


def test_the_minor_version_is_one_that_was_tested() -> None:
    assert keras.__version__.split(".")[0] == "3"


def test_compile_is_found_on_the_mro_and_binds_by_name() -> None:
    owner = next(cls for cls in keras.Model.__mro__ if "compile" in vars(cls))
    assert owner.__module__ == "keras.src.trainers.trainer"
    names = inspect.signature(owner.compile).parameters
    assert {"optimizer", "loss", "jit_compile", "auto_scale_loss"} <= set(names)


def test_steps_and_losses_are_defined_in_keras_modules() -> None:
    for name in ("train_step", "compute_loss", "_compute_loss"):
        owner = next(cls for cls in keras.Model.__mro__ if name in vars(cls))
        assert owner.__module__.startswith("keras.")


def test_a_dataset_tells_its_functions_and_what_it_is_made_of() -> None:
    """As the input guard reads them."""
    source = tf.data.Dataset.range(3)
    mapped = source.map(lambda i: i + tf.random.uniform([], maxval=3, seed=5, dtype=tf.int64))
    [function] = mapped._functions()
    assert mapped.prefetch(1)._inputs() == [mapped] and mapped._inputs() == [source]
    assert function._func.__name__ == "<lambda>"
    graph = function.function.graph
    drawn = [op for op in graph.get_operations() if op.type == "RandomUniformInt"]
    assert [op.get_attr("seed2") for op in drawn] == [5]
    assert int(function.function(tf.constant(0, tf.int64))[0]) in (0, 1, 2)
    chosen = tf.data.Dataset.choose_from_datasets([source, mapped], tf.data.Dataset.range(2))
    assert chosen._inputs()[1:] == [source, mapped]  # the first one chooses
    random = tf.data.Dataset.random(seed=3)
    assert int(random._seed) or int(random._seed2)


def test_flatten_layers_takes_both_flags() -> None:
    inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model = keras.Sequential([keras.Input((2,)), inner])
    direct = list(model._flatten_layers(include_self=False, recursive=False))
    assert inner in direct
    assert inner.layers[0] not in direct
    assert inner.layers[0] in list(model._flatten_layers())
    assert model in list(model._flatten_layers())


def test_a_stateless_scope_sees_every_read_and_write() -> None:
    reads, writes = [], []

    class Scope(keras.StatelessScope):
        def get_current_value(self, variable: Any) -> Any:
            reads.append(variable.path)
            return super().get_current_value(variable)

        def add_update(self, update: Any) -> None:
            writes.append(update[0].path)
            super().add_update(update)

    model = small()
    with Scope(collect_losses=True) as scope:
        model(np.ones((2, 3), np.float32), training=True)
    dense, dropout = model.layers
    assert {dense.kernel.path, dense.bias.path} <= set(reads)
    assert writes == [dropout.seed_generator.state.path]
    assert writes[0].endswith("seed_generator_state")
    assert scope.losses == []
    table = keras.layers.Embedding(4, 2)
    table.build(None)
    reads.clear()
    with Scope():
        for read in (
            lambda: table.embeddings.value,
            lambda: table.embeddings + 0,
            lambda: table.embeddings[0],
        ):
            reads.clear()
            read()
            assert table.embeddings.path in reads
        tf.convert_to_tensor(table.embeddings)
        table.embeddings.assign(table.embeddings)
    assert writes[-1] == table.embeddings.path


def test_a_stateless_scope_collects_losses() -> None:
    layer = keras.layers.ActivityRegularization(l2=1.0)
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(np.ones((2, 3), np.float32))
    assert len(scope.losses) == 1


def test_call_on_the_instance_is_honoured_and_can_be_taken_away() -> None:
    layer = keras.layers.Dense(2)
    x = np.ones((1, 3), np.float32)
    stock = layer(x)
    original = layer.call
    layer.call = lambda *args, **kwargs: 2 * original(*args, **kwargs)
    np.testing.assert_allclose(layer(x), 2 * stock)
    del layer.call
    np.testing.assert_allclose(layer(x), stock)


def test_an_activation_swapped_during_the_call_is_used() -> None:
    layer = keras.layers.Dense(2, activation="relu")
    x = np.ones((1, 3), np.float32)
    layer(x)
    seen = []
    layer.activation = lambda z: seen.append(z) or 0 * z
    np.testing.assert_array_equal(layer(x), 0)
    np.testing.assert_allclose(seen[0], x @ layer.kernel.numpy() + layer.bias.numpy(), rtol=1e-5)


def test_a_compiled_loss_is_a_list_of_named_tuples_with_metrics_beside() -> None:
    inputs = keras.Input((3,))
    heads = [keras.layers.Dense(1, name="a")(inputs), keras.layers.Dense(1, name="b")(inputs)]
    model = keras.Model(inputs, heads)
    model.compile(loss=["mse", keras.losses.MeanAbsoluteError()], loss_weights=[1.0, 0.5])
    compiled = model._compile_loss
    assert not compiled.built
    y = [tf.ones((2, 1)), tf.ones((2, 1))]
    compiled.build(y, model(tf.ones((2, 3))))
    assert compiled.built
    entries = compiled._flat_losses
    assert [entry.loss_weights for entry in entries] == [1.0, 0.5]
    assert all(isinstance(entry.loss, keras.losses.Loss) for entry in entries)
    assert entries[0].loss.fn is keras.losses.mean_squared_error
    assert [metric.name for metric in compiled._metrics] == ["a_loss", "b_loss"]
    assert entries[0]._replace(loss=None).loss is None


def test_a_loss_has_a_reduction_a_dtype_and_values_per_position() -> None:
    loss = keras.losses.MeanSquaredError()
    assert (loss.reduction, loss.dtype) == ("sum_over_batch_size", "float32")
    values = loss.call(tf.ones((2, 4, 3)), tf.zeros((2, 4, 3)))
    assert values.shape == (2, 4)


def test_a_mask_travels_on_the_prediction() -> None:
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), keras.layers.Embedding(4, 2, mask_zero=True)]
    )
    assert model(np.array([[1, 0, 2]]))._keras_mask.numpy().tolist() == [[True, False, True]]


def test_the_trainer_traces_train_step_through_make_train_function() -> None:
    model = small()
    model.compile("sgd", "mse")
    assert model.train_function is None
    called = []
    step = model.train_step
    model.train_step = lambda data: called.append(data) or step(data)
    model.make_train_function()
    function = model.train_function
    assert callable(function)
    model.make_train_function()
    assert model.train_function is function  # made once, until compile or force
    x, y = np.ones((4, 3), np.float32), np.ones((4, 2), np.float32)
    model.fit(x, y, verbose=0)
    assert called
    assert set(inspect.signature(model._make_function).parameters) == {"step_function"}


def test_symbolic_build_builds_model_and_metrics_from_a_batch() -> None:
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=["mae"])
    batch = (tf.ones((4, 3)), tf.ones((4, 2)), tf.ones((4,)))
    model._symbolic_build(data_batch=batch)
    assert model.built
    assert model._compile_loss.built
    assert model._compile_metrics.built
    assert model.optimizer.built


def test_loss_tracker_and_compute_loss() -> None:
    model = small()
    model.compile("sgd", "mse")
    assert isinstance(model._loss_tracker, keras.metrics.Mean)
    ones = tf.ones((2, 2))
    loss = model._compute_loss(x=None, y=ones, y_pred=0 * ones, sample_weight=None, training=True)
    assert float(loss) == 1.0
    assert model._distribute_strategy is None


def test_an_optimizer_tracks_variables_and_knows_what_it_was_built_with() -> None:
    optimizer = keras.optimizers.Adagrad(0.1)
    variable = keras.Variable(np.ones(3, np.float32))
    optimizer.build([variable])
    assert optimizer._trainable_variables == [variable]
    own = [path.split("/")[-1] for path in (v.path for v in optimizer._variables)]
    assert own[:2] == ["iteration", "learning_rate"]
    extra = keras.Variable(0.0)
    optimizer._track_variable(extra)
    assert any(v is extra for v in optimizer.variables)


def test_an_optimizer_is_saved_and_loaded_through_its_variables_property() -> None:
    optimizer = keras.optimizers.Adagrad(0.1)
    optimizer.build([keras.Variable(np.ones(3, np.float32))])
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    assert list(store) == ["0", "1", "2"]
    store["0"] = 7
    optimizer.load_own_variables(store)
    assert int(optimizer.iterations) == 7


def test_fit_finalizes_through_the_compiled_optimizer() -> None:
    called = []

    class Optimizer(keras.optimizers.SGD):
        def finalize_variable_values(self, var_list: Any) -> None:
            called.append(len(var_list))

    model = small()
    model.compile(Optimizer(), "mse")
    model.fit(np.ones((4, 3), np.float32), np.ones((4, 2), np.float32), verbose=0)
    assert called == [2]


def test_what_compile_was_given_is_kept_for_a_saved_model() -> None:
    model = small()
    model.compile("sgd", "mse", jit_compile=False)
    model._compile_config.config["jit_compile"] = True
    assert model.get_compile_config()["jit_compile"] is True


def test_a_quantised_or_lora_layer_says_so() -> None:
    layer = keras.layers.Dense(4)
    layer.build((None, 4))
    assert layer.lora_enabled is False
    assert layer.quantization_mode is None
    layer.enable_lora(2)
    assert layer.lora_enabled is True


def test_functional_and_sequential_models_keep_the_structure_of_their_inputs() -> None:
    inputs = {"a": keras.Input((2,)), "b": keras.Input((3,))}
    model = keras.Model(inputs, keras.layers.Concatenate()(list(inputs.values())))
    assert sorted(model._inputs_struct) == ["a", "b"]
    sequential = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert sequential._functional._inputs_struct.shape == (None, 2)


def test_models_and_optimizers_know_their_strategy() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        inside, optimizer = small(), keras.optimizers.SGD()
    assert inside._distribute_strategy is inside.distribute_strategy is strategy
    assert optimizer._distribution_strategy is strategy
    outside = small()
    assert outside._distribute_strategy is None
    assert outside.distribute_strategy is keras.optimizers.SGD()._distribution_strategy
    assert outside.distribute_strategy is tf.distribute.get_strategy()


def test_fit_builds_from_its_iterator() -> None:
    """Before anything is traced, so that variables are made outside of the replicas."""
    seen: list[object] = []
    with strategy_of(2).scope():
        model = small()
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((np.zeros((2, 3)), np.zeros((2, 1))))
    build = model._maybe_symbolic_build

    def watched(iterator: object = None, data_batch: object = None) -> None:
        seen.append(iterator.data_adapter.get_tf_dataset())  # type: ignore[attr-defined]
        build(iterator=iterator, data_batch=data_batch)

    model._maybe_symbolic_build = watched
    model.fit(data, verbose=0)
    assert seen == [data]


def test_apply_sums_gradients_over_replicas() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        variable, optimizer = keras.Variable(0.0), keras.optimizers.SGD(1.0)
        optimizer.build([variable])

    @tf.function
    def step() -> None:
        strategy.run(lambda: optimizer.apply([tf.constant(0.5)], [variable]))

    step()
    assert float(variable.numpy()) == -1.0 and int(optimizer.iterations.numpy()) == 1


def test_additional_losses_are_a_replicas_share() -> None:
    strategy = strategy_of(2)
    with strategy.scope():
        model = small()
    found = tf.function(
        lambda: strategy.experimental_local_results(
            strategy.run(lambda: model._aggregate_additional_loss(tf.constant(3.0)))
        )
    )()
    assert [float(share) for share in found] == [1.5, 1.5]


def test_a_variable_reads_and_writes_the_value_it_was_given() -> None:
    """`RankingModel` puts variables of legacy Keras into layers of Keras 3."""
    dense, other = keras.layers.Dense(3), tf.Variable(tf.ones([2, 3]))
    dense.build((None, 2))
    dense._kernel._value = other
    np.testing.assert_array_equal(dense(tf.ones([1, 2])), [[2.0, 2.0, 2.0]])
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.apply([tf.ones([2, 3]), tf.ones([3])], [dense.kernel, dense.bias])
    np.testing.assert_array_equal(other, tf.zeros([2, 3]))
    assert dense.trainable_variables[0] is dense._kernel


def test_a_built_attention_layer_takes_another_projection_once_its_tracker_is_unlocked() -> None:
    attention = keras.layers.MultiHeadAttention(2, 3)
    attention.build((None, None, 6), (None, None, 6))
    twice = keras.Sequential([attention._query_dense])
    attention._tracker.unlock()
    attention._query_dense = twice
    attention._tracker.lock()
    assert attention.query_dense is twice and twice in attention._flatten_layers()
    x = np.ones((1, 2, 6), np.float32)
    twice.layers[0].kernel.assign(np.zeros((6, 2, 3)))
    assert np.ptp(attention(x, x)) >= 0 and len(attention.trainable_variables) == 8


def test_layers_say_whether_xla_supports_them() -> None:
    hashed, dense = keras.layers.Hashing(3), keras.layers.Dense(1)
    assert (hashed.supports_jit, dense.supports_jit) == (False, True)


def test_averages_are_looked_for_in_an_inner_optimizer() -> None:
    class Outer(keras.optimizers.SGD):
        @property
        def inner_optimizer(self) -> keras.optimizers.Optimizer:
            return inner

    inner = keras.optimizers.SGD(use_ema=True)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(Outer(), "mse")
    inner.build(model.trainable_variables)
    inner._model_variables_moving_average[0].assign([[7.0]])
    callback = keras.callbacks.SwapEMAWeights()
    callback.set_model(model)
    callback.on_test_begin()
    assert float(model.get_weights()[0][0, 0]) == 7.0


@pytest.mark.filterwarnings("ignore:The structure of")
def test_a_functional_model_pairs_its_inputs_in_two_places() -> None:
    """And pairs a dict of one column more by place, which `named_inputs` undoes."""
    inputs = {name: keras.Input((), name=name) for name in ("b", "c")}
    model = keras.Model(inputs, inputs["b"] + 10 * inputs["c"])
    assert type(model).call.__module__ == "keras.src.models.functional"
    assert model._standardize_inputs({"b": np.ones(2), "c": np.zeros(2)})[0].numpy().tolist() == [
        1,
        1,
    ]
    assert callable(model.compute_output_spec)
    assert model({"a": np.ones(2), "b": np.zeros(2), "c": np.zeros(2)}).numpy().tolist() == [1, 1]
