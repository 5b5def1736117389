"""The fused Philox: published answers, the reference, TensorFlow's own kernel."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_sparse.noise import gaussian
from tests.reference import philox as reference

WORDS = st.integers(0, 2**64 - 1)
LOW = st.integers(0, 2**62)


def fused(key: int, counter: int, count: int) -> np.ndarray:
    low, high = counter % 2**64, counter // 2**64
    compiled = tf.function(gaussian.random_words, jit_compile=True, autograph=False)
    return compiled(
        tf.constant([key], tf.uint64), tf.constant([low, high], tf.uint64), count
    ).numpy()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    """The known answers that the authors publish with their library Random123."""
    assert reference.block(counter, key) == expected
    low, high = (tf.constant(counter[i] | counter[i + 1] << 32, tf.uint64) for i in (0, 2))
    words = gaussian._mixed(tf.constant(key[0] | key[1] << 32, tf.uint64), low, high)
    assert tuple(int(word) % 2**32 for word in words) == expected


@settings(max_examples=25, deadline=None)
@given(WORDS, LOW, WORDS, st.sampled_from([1, 2, 7, 1024, 1025, 3000]))
def test_equals_the_reference_and_the_kernel(key: int, low: int, high: int, count: int) -> None:
    counter = low + (high << 64)
    found = fused(key, counter, count)
    kernel = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[count],
        key=tf.constant([key], tf.uint64),
        counter=tf.constant([low, high], tf.uint64),
        alg=1,
        dtype=tf.uint64,
    )
    np.testing.assert_array_equal(found, kernel)
    some = min(count, 50)
    assert found[:some].tolist() == reference.words(key, counter, some)


def test_no_long_constant_is_compiled_in() -> None:
    """Positions are the sum of two ranges, so memory does not grow with the tensor."""
    words = tf.function(
        lambda key, counter: gaussian.random_words(key, counter, 2**22),
        jit_compile=True,
        autograph=False,
    )
    inputs = tf.constant([1], tf.uint64), tf.constant([0, 0], tf.uint64)
    text = words.experimental_get_compiler_ir(*inputs)(stage="optimized_hlo")
    assert "u64[4194304]{0} constant" not in text
    assert "u64[4096,1024]{1,0} constant" not in text
    assert "fusion" in text
