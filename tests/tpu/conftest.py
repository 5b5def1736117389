"""These tests need a TPU: `DP_SPARSE_TPU=NAME pytest -m tpu tests/tpu`, `local` on its machine."""

import os

import pytest
import tensorflow as tf

from pipelines.criteo.tables import tpu_strategy


@pytest.fixture
def strategy() -> tf.distribute.TPUStrategy:
    """The TPU's, started anew, as each layer needs it; without one the test is left out."""
    name = os.environ.get("DP_SPARSE_TPU")
    if name is None:
        pytest.skip("DP_SPARSE_TPU is not set: there is no TPU")
    return tpu_strategy(name)
