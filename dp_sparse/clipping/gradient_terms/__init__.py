"""Gradient terms: what a layer call means for a variable, as squared norms and the clipped sum."""

from dp_sparse.clipping.gradient_terms.lookups import Rows, Tied
from dp_sparse.clipping.gradient_terms.numerics import (
    by_part,
    exact,
    expanded,
    flat,
    never_cancelled,
    part_of,
    squares,
)
from dp_sparse.clipping.gradient_terms.product import BilinearForm, Linear, Product
from dp_sparse.clipping.gradient_terms.term import (
    Explicit,
    GradientTerm,
    Terms,
    fields_of,
    floats_of,
    joined,
    of_batch,
)

__all__ = [
    "BilinearForm",
    "Explicit",
    "GradientTerm",
    "Linear",
    "Product",
    "Rows",
    "Terms",
    "Tied",
    "by_part",
    "exact",
    "expanded",
    "fields_of",
    "flat",
    "floats_of",
    "joined",
    "never_cancelled",
    "of_batch",
    "part_of",
    "squares",
]
