"""A gradient term: one variable's part in a batch, its squared per-example norms and clipped sum.

A term holds activations and cotangents of a whole batch, from which both quantities come without
any per-example gradient of a matrix or a table ("book-keeping"): a product costs what an
ordinary weight gradient costs. Terms of one variable are joined before norms are taken, since norms
of several terms do not add.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol, Self

import keras
import tensorflow as tf

from dp_sparse.clipping.gradient_terms.numerics import (
    exact,
    squares,
)

OF_BATCH = {"of_batch": True}  # metadata of a field that no example may decide


class GradientTerm(Protocol):
    """One variable's part in a batch, with cotangents of the sum of per-example losses.

    Attributes:
        float_fields: Names of the fields that hold values of examples, `[batch, ...]`.
        holds_gradients: Whether they are gradients themselves, sums of which much may cancel.
    """

    float_fields: ClassVar[tuple[str, ...]]
    holds_gradients: ClassVar[bool]

    def squared_norms(self) -> tf.Tensor:
        """‖g_i‖² of each example's gradient of this variable, float32 `[batch]`."""
        ...

    def joined_with(self, others: Sequence[Self]) -> Self:
        """One term of the variable for this and its others.

        Raises:
            ValueError: The terms do not fit together.
        """
        ...


Terms = Sequence[tuple[keras.Variable, GradientTerm]]


@dataclasses.dataclass(frozen=True)
class Explicit:
    """A variable small enough for its per-example gradients themselves.

    Attributes:
        gradients: float32 `[batch, *shape of the variable]`.
    """

    float_fields: ClassVar[tuple[str, ...]] = ("gradients",)
    holds_gradients: ClassVar[bool] = True
    gradients: tf.Tensor

    def squared_norms(self) -> tf.Tensor:
        """‖g_i‖²."""
        return squares(self.gradients)

    def clipped_sum(self, factors: tf.Tensor) -> tf.Tensor:
        """Σ_i f_i g_i, float64, of the variable's shape."""
        flat = tf.reshape(self.gradients, [tf.shape(self.gradients)[0], -1])
        total = tf.matmul(exact(factors)[tf.newaxis], exact(flat))
        return tf.reshape(total, self.gradients.shape[1:])

    def joined_with(self, others: Sequence["Explicit"]) -> "Explicit":
        """The sum of their gradients."""
        return Explicit(tf.add_n([self.gradients, *(other.gradients for other in others)]))


def joined(terms: Sequence[GradientTerm]) -> GradientTerm:
    """One term for all terms of a variable, so that its gradient is whole before its norm is taken.

    Raises:
        ValueError: The terms are of different kinds (a table that is also a matrix).
    """
    kinds = {type(term) for term in terms}
    if len(kinds) > 1:
        raise ValueError(f"used in different ways: {sorted(kind.__name__ for kind in kinds)}")
    return terms[0].joined_with(terms[1:]) if len(terms) > 1 else terms[0]


def floats_of(term: GradientTerm) -> dict[str, tf.Tensor]:
    """The `float_fields` that a term has, by their names."""
    found = {name: getattr(term, name) for name in term.float_fields}
    return {name: values for name, values in found.items() if values is not None}


def fields_of(term: GradientTerm) -> list[tf.Tensor]:
    """All tensors that a term holds of its examples, each `[batch, ...]`."""
    return [tensor for tensor, of_batch in _tensors_of(term) if not of_batch]


def of_batch(term: GradientTerm) -> list[tf.Tensor]:
    """All tensors that a term holds of its batch, which no example may decide."""
    return [tensor for tensor, of_batch in _tensors_of(term) if of_batch]


def _tensors_of(term: GradientTerm) -> Iterator[tuple[tf.Tensor, bool]]:
    """Each, and whether it is of the batch: a scalar, or marked as such."""
    for field in dataclasses.fields(term):  # type: ignore[arg-type]
        for value in tf.nest.flatten(getattr(term, field.name)):
            if tf.is_tensor(value):
                yield value, value.shape.rank == 0 or "of_batch" in field.metadata
