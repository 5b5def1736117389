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
    joined,
    scalars_of,
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
    "joined",
    "never_cancelled",
    "part_of",
    "scalars_of",
    "squares",
]
