"""How a refusal leaves a graph: as its own exception, with its sentence and nothing else."""

from collections.abc import Callable

import pytest
import tensorflow as tf

from dp_sparse.core.errors import BadExampleError, PrivacyError, require, translated

Refusal = Callable[..., None]


def eagerly(condition: bool, kind: type[Exception], message: str, *values: tf.Tensor) -> None:
    require(tf.constant(condition), kind, message, *values)


def in_a_graph(condition: bool, kind: type[Exception], message: str, *values: tf.Tensor) -> None:
    @tf.function
    def step(satisfied: tf.Tensor, *printed: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([require(satisfied, kind, message, *printed)]):
            return tf.constant(1.0)

    step(tf.constant(condition), *values)


def in_a_dataset(condition: bool, kind: type[Exception], message: str, *values: tf.Tensor) -> None:
    def check(satisfied: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([require(satisfied, kind, message, *values)]):
            return tf.identity(satisfied)

    list(tf.data.Dataset.from_tensors(condition).map(check))


WAYS = [eagerly, in_a_graph, in_a_dataset]


@pytest.mark.parametrize("refuse", WAYS)
@pytest.mark.parametrize("kind", [PrivacyError, BadExampleError])
def test_the_sentence_alone_comes_out(refuse: Refusal, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught, translated():
        refuse(False, kind, "Expected {} >= 0, got {}.", tf.constant(3), tf.constant([1, -2]))
    assert str(caught.value) == "Expected 3 >= 0, got [1 -2]."
    assert type(caught.value) is kind
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("refuse", WAYS)
def test_a_satisfied_requirement_passes(refuse: Refusal) -> None:
    passed = False
    with translated():
        refuse(True, PrivacyError, "Never seen: {}.", tf.constant(1))
        passed = True
    assert passed


@pytest.mark.parametrize("refuse", WAYS)
@pytest.mark.parametrize(
    "sentence",
    [
        "Expected a batch of this plan's sampler.",
        'Expected label "yes".',
        "Expected σ ≥ 3, got less.",
        "One line.\nAnother line.",
    ],
)
def test_sentences_come_out_as_written(refuse: Refusal, sentence: str) -> None:
    with pytest.raises(PrivacyError) as caught, translated():
        refuse(False, PrivacyError, sentence)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("refuse", WAYS)
def test_values_are_printed(refuse: Refusal) -> None:
    values = [tf.constant(float("nan")), tf.constant(2**62, tf.int64), tf.range(100)]
    with pytest.raises(BadExampleError) as caught, translated():
        refuse(False, BadExampleError, "{}, {}, {}", *values)
    assert str(caught.value) == f"nan, {2**62}, [0 1 2 3 4 5 6 7...]"


@pytest.mark.parametrize("refuse", WAYS)
@pytest.mark.parametrize("name", ["layer/kernel", "tableσ", 'it\'s {} [3] \\ "x"', ""])
def test_names_are_printed_as_they_are(refuse: Refusal, name: str) -> None:
    with pytest.raises(PrivacyError) as caught, translated():
        refuse(False, PrivacyError, "{} at {}.", tf.constant(-3), tf.constant(name))
    assert str(caught.value) == f"-3 at {name}."


@pytest.mark.parametrize("refuse", WAYS)
def test_untranslated_refusals_still_carry_the_sentence(refuse: Refusal) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Expected nothing, got {}.*\[5\]"):
        refuse(False, PrivacyError, "Expected nothing, got {}.", tf.constant(5))


def test_other_errors_pass_unchanged() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="Incompatible shapes"), translated():
        tf.add(tf.zeros([2]), tf.zeros([3]))
    with pytest.raises(KeyError), translated():
        raise KeyError("x")


def test_kinds() -> None:
    """A user catches bad data as ValueError, and a voided guarantee as RuntimeError."""
    assert issubclass(BadExampleError, ValueError)
    assert issubclass(PrivacyError, RuntimeError)
    assert not issubclass(PrivacyError, ValueError)
