"""No kernel of XLA that may run beside itself has a part for YNNPACK: two threads would break it.

`xla::cpu::EmitYnnSubgraph` of TensorFlow 2.21 appends to a list of the executable without a lock,
at each thread's first run of it: the process ends with a segmentation fault, or a freed constant is
read. Variables, heads of attention and replicas run one kernel at once.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.layers import error_propagation
from dp_sparse.noise import gaussian
from dp_sparse.shuffling import groups

SHAPE = 512, 20, 16  # of few values XLA makes the sums itself
VALUES, ONE_EACH = tf.ones(SHAPE), tf.ones([*SHAPE[:2], 1])
KEY, COUNTER = tf.constant([1], tf.uint64), tf.constant([1, 2], tf.uint64)
AVERAGES = ONE_EACH, ONE_EACH, ONE_EACH
KERNELS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "noise/gaussian.py _noisy": (
        gaussian._noisy,
        (tf.ones([163_840]), tf.ones([3], tf.float64), KEY, COUNTER),
    ),
    "noise/gaussian.py _normals": (gaussian._normals, (KEY, COUNTER, 163_840)),
    "layers/error_propagation.py relu": (error_propagation.relu, (VALUES, VALUES)),
    "layers/error_propagation.py _second_moment": (
        error_propagation._second_moment,
        (VALUES, VALUES),
    ),
    "layers/error_propagation.py _squared_distance": (
        error_propagation._squared_distance,
        (VALUES, ONE_EACH),
    ),
    "layers/error_propagation.py _weighted": (
        error_propagation._weighted,
        (VALUES, VALUES, ONE_EACH, ONE_EACH),
    ),
    "layers/error_propagation.py _normalised": (
        error_propagation._normalised,
        (VALUES, VALUES, VALUES[0, 0], ONE_EACH, ONE_EACH, AVERAGES, 0.1),
    ),
    "shuffling/groups.py _inner": (groups._inner, (VALUES, tf.range(20))),
}
ALONE = {"core/xla.py kernel"}  # made anew for one place of one step
# How many functions each file gives to XLA; two of the noise run once, in its check of the machine.
FUNCTIONS = {
    "core/xla.py": 1,
    "layers/error_propagation.py": 1,
    "noise/gaussian.py": 4,
    "shuffling/groups.py": 1,
}


def optimised(kernel: Any, *arguments: Any) -> str:
    """What XLA runs, as text."""
    return kernel.experimental_get_compiler_ir(*arguments)(stage="optimized_hlo")


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_nothing_for_ynnpack(name: str) -> None:
    kernel, arguments = KERNELS[name]
    text = optimised(kernel, *arguments)
    assert "ENTRY" in text and "ynn" not in text


def test_a_sum_would_be_found() -> None:
    @tf.function(jit_compile=True, autograph=False)
    def total(values: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(values, -1)

    assert "ynn" in optimised(total, VALUES)


def test_every_kernel_of_the_package_is_looked_at() -> None:
    root = Path(dp_sparse.__file__).parent
    found, functions = set(), {}
    for path in root.rglob("*.py"):
        text = path.read_text()
        if count := len(re.findall(r"tf\.function\([^()]*jit_compile=True", text)):
            functions[str(path.relative_to(root))] = count
        decorated = re.findall(
            r"@(?:tf\.function\(jit_compile=True[^)]*\)|_elementwise)\n\s*def (\w+)", text
        )
        found |= {f"{path.relative_to(root)} {name}" for name in decorated}
    assert found == {*KERNELS, *ALONE}
    assert functions == FUNCTIONS
