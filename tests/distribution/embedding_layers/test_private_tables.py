"""What `PrivateTables` accepts, what it adds, and how much room it leaves."""

import dataclasses
from typing import Any

import keras
import keras_rs
import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse import distribution
from dp_sparse.core.errors import PrivacyError
from dp_sparse.distribution.embedding_layers.host_step import HostStep
from tests.distribution.embedding_layers import two_tables
from tests.distribution.embedding_layers.emulator import Strategy


def test_features_of_noise_and_of_bags() -> None:
    tables = two_tables.private_tables(two_tables.private_optimizer())
    config = tables.feature_config
    assert set(config) == {
        *two_tables.FEATURES,
        "private_backward_words",
        "private_noise_shared",
        "private_noise_bag",
    }
    of = {name: feature.table for name, feature in config.items()}
    assert of["left"] is of["right"] is of["private_noise_shared"]
    assert of["words"] is of["private_backward_words"] is of["private_noise_bag"]
    assert all(table.optimizer is tables.layer_optimizer for table in of.values())
    assert all(tf.TensorShape(feature.output_shape).rank is None for feature in config.values())


def test_several_hosts_are_refused() -> None:
    """A choice is made with a key of the host's own, so each would release another one."""
    optimizer = two_tables.private_optimizer()
    with pytest.raises(PrivacyError, match="Expected a TPU with one host, got 2"):
        two_tables.private_tables(optimizer, strategy=Strategy(num_hosts=2))
    one, other = (
        HostStep(two_tables.private_tables(optimizer)),
        HostStep(two_tables.private_tables(optimizer)),
    )
    assert one._key.words().numpy().tolist() != other._key.words().numpy().tolist()


def test_shapes_on_a_tpu() -> None:
    """Multiples of 8 for each of 4 replicas, and every size known beforehand."""
    tables = two_tables.private_tables(two_tables.private_optimizer(), strategy=Strategy())
    assert tables.examples == 32  # 24 and 8 of padding
    config = tables.feature_config
    assert list(config["left"].output_shape) == [8]
    shared, bag = tables.tables
    assert shared.capacity == 64 and bag.capacity == 32  # never more than 40 and 30 rows
    assert list(config["private_noise_shared"].output_shape) == [16]
    room = tables.sparse_core_config
    assert room.max_ids_per_table == {"shared": (32 * 2 + 64) // 4, "bag": (32 * 8 + 32) // 4}
    assert not room.allow_id_dropping and room.disable_table_stacking


def test_room_is_for_every_lookup_of_a_batch() -> None:
    wide = two_tables.E.TableConfig(10_000, 2, name="wide")
    optimizer = two_tables.private_optimizer()
    tables = distribution.PrivateTables({"id": two_tables.E.FeatureConfig(wide)}, optimizer)
    (table,) = tables.tables
    assert table.capacity >= tables.examples + optimizer.most_false_rows(10_000)
    assert table.capacity < tables.examples + 100


def test_learning_rate_is_read_at_each_step() -> None:
    optimizer = two_tables.private_optimizer("adagrad")
    tables = two_tables.private_tables(optimizer)
    assert type(tables.layer_optimizer) is two_tables.E.Adagrad
    assert tables.layer_optimizer.initial_accumulator_value == 0.2
    assert tables.layer_optimizer.use_gradient_accumulation
    assert float(tables.layer_optimizer.learning_rate()) == 0.5
    optimizer.learning_rate = 0.25
    assert float(tables.layer_optimizer.learning_rate()) == 0.25


def plan_optimizer(cls: Any, *given: Any, **arguments: Any) -> Any:
    plan = two_tables.private_optimizer().plan
    return cls(keras.optimizers.SGD(), plan, 1.0, *given, **arguments)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: plan_optimizer(dp_sparse.DPSGDOptimizer), "Expected a DPAdaFESTOptimizer"),
        (
            lambda: plan_optimizer(
                dp_sparse.DPAdaFESTOptimizer, table_optimizer=keras.optimizers.Adam()
            ),
            "Expected SGD or Adagrad for the tables, got Adam",
        ),
        (
            lambda: plan_optimizer(
                dp_sparse.DPAdaFESTOptimizer,
                table_optimizer=keras.optimizers.Adagrad(0.1, epsilon=1e-3),
            ),
            "Expected Adagrad's default epsilon for the tables, got 0.001",
        ),
        (
            lambda: plan_optimizer(dp_sparse.DPAdaFESTOptimizer, microbatch_size=2),
            "Expected microbatch_size=None, got 2",
        ),
        (
            lambda: plan_optimizer(
                dp_sparse.DPAdaFESTOptimizer, clipping=dp_sparse.PerLayerClipping()
            ),
            "Expected FlatClipping or AutomaticClipping, got PerLayerClipping",
        ),
        (
            lambda: plan_optimizer(
                dp_sparse.DPAdaFESTOptimizer,
                rows=dp_sparse.SelectedRows.public({"t": [1]}, {"t": 4}),
            ),
            "without rows=",
        ),
    ],
)
def test_optimizers_that_are_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        two_tables.private_tables(optimizer())


def table(**arguments: Any) -> Any:
    return two_tables.E.TableConfig(**{"vocabulary_size": 9, "dim": 2, "name": "t", **arguments})


def feature(**arguments: Any) -> Any:
    options = {k: arguments.pop(k) for k in ("max_sequence_length",) if k in arguments}
    return two_tables.E.FeatureConfig(table(**arguments), **options)


@pytest.mark.parametrize(
    ("features", "arguments", "message"),
    [
        ({}, {}, "at least one feature"),
        ({"a": "t"}, {}, "Expected FeatureConfigs .* got str for 'a'"),
        ({"a": feature(name=None)}, {}, "Expected tables with names"),
        ({"a": feature(vocabulary_size=2**31)}, {}, "fewer than 2147483648 rows"),
        (
            {"a": feature(combiner=two_tables.E.CustomCombiner(tf.reduce_sum, max_valency=2))},
            {},
            "Expected a combiner of .* for 't', got <.*CustomCombiner",
        ),
        ({"a": feature(dtype=tf.int32)}, {}, "Expected float32 for 't', got int32"),
        (
            {"a": feature(quantization_config=two_tables.E.QuantizationConfig(4, -1.0, 1.0))},
            {},
            "Expected no quantization_config for 't'",
        ),
        ({"a": feature(max_sequence_length=3)}, {}, "Expected max_sequence_length=0 for 'a'"),
        ({"a": feature(optimizer=two_tables.E.Adam())}, {}, "Expected no optimizer for 't'"),
        ({"a": feature(), "b": feature()}, {}, "Expected one table of each name"),
        ({"a": feature()}, {"bags": {"b": 2}}, "Expected bags of features, got 'b'"),
        ({"a": feature()}, {"bags": {"a": 0}}, r"Expected bags\['a'\] >= 1"),
        ({"a": feature()}, {"weights": {"a": "w"}}, "Expected weights for bags only"),
        ({"private_noise_t": feature()}, {}, "Expected features of other names"),
    ],
)
def test_features_that_are_refused(features: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distribution.PrivateTables(features, two_tables.private_optimizer(), **arguments)


def test_of_keras_rs() -> None:
    own = keras_rs.layers.TableConfig("t", 9, 2)
    config = keras_rs.layers.FeatureConfig("a", own, (two_tables.SIZE,), (two_tables.SIZE, 2))
    optimizer = two_tables.private_optimizer()
    tables = distribution.PrivateTables({"a": config}, optimizer)
    derived = tables.feature_config
    assert derived["a"].output_shape == (24, 2)
    assert derived["private_noise_t"].input_shape == (16, None)
    assert derived["a"].table is derived["private_noise_t"].table
    assert derived["a"].table.optimizer is tables.layer_optimizer
    changed = dataclasses.replace(own, optimizer=keras.optimizers.Adam())
    other = keras_rs.layers.FeatureConfig("a", changed, (two_tables.SIZE,), (two_tables.SIZE, 2))
    with pytest.raises(ValueError, match="Expected no optimizer for 't'"):
        distribution.PrivateTables({"a": other}, optimizer)


def test_slots_are_kept_by_a_checkpoint(tmp_path: Any) -> None:
    tables = two_tables.private_tables(two_tables.private_optimizer("adagrad"))
    variable = tf.Variable(tf.ones([4, 2]))
    gradient = tf.IndexedSlices(tf.ones([1, 2]), [3])
    tables.updates.apply([variable], [gradient])
    saved = tf.train.Checkpoint(tables=tables).save(str(tmp_path / "slots"))
    other = two_tables.private_tables(two_tables.private_optimizer("adagrad"))
    tf.train.Checkpoint(tables=other).restore(saved)
    other.updates.apply([variable], [gradient])
    assert other.updates._slots[0][3, 0].numpy() == pytest.approx(2.2)
