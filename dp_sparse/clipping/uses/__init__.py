"""How a layer call used a variable: its squared per-example norms, and the clipped sum."""

from dp_sparse.clipping.uses.lookups import Rows
from dp_sparse.clipping.uses.numerics import (
    by_part,
    exact,
    expanded,
    flat,
    never_cancelled,
    part_of,
    squares,
)
from dp_sparse.clipping.uses.product import BilinearForm, Linear, Product
from dp_sparse.clipping.uses.tied import Tied
from dp_sparse.clipping.uses.use import Direct, Use, Used, fields_of, joined, scalars_of

__all__ = [
    "BilinearForm",
    "Direct",
    "Linear",
    "Product",
    "Rows",
    "Tied",
    "Use",
    "Used",
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
