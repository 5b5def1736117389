"""How sparse the embedding gradients of the click model are, feature by feature.

Figure 1b of Ghazi et al., NeurIPS 2023: the fraction of a table's gradient that is zero, averaged
over 50 batches, for the five features with the most buckets and for all. It is computed without
privacy, so do not publish it for private rows.

`python -m pipelines.criteo.sparsity --data=FILE`
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from models.pctr import embedding_width
from pipelines.criteo.methods import table_names
from pipelines.criteo.records import PreparedData, prepared_in

_BATCHES, _SHOWN = 50, 5


def sparsity(data: PreparedData, batch_size: int, seed: int = 0) -> dict[str, float]:
    """The mean fraction of zero entries of each table's gradient, and of all tables together."""
    rng, records = np.random.default_rng(seed), data.records()
    sizes = np.array(data.vocabularies)
    looked_up = np.zeros(len(sizes))
    for _ in range(_BATCHES):
        batch = np.sort(rng.choice(data.num_records, min(batch_size, data.num_records), False))
        ids = records["categories"][batch]
        looked_up += [len(np.unique(column)) for column in ids.T]
    used = looked_up / _BATCHES
    widths = np.array([embedding_width(size) for size in sizes])
    whole = 1 - (used * widths).sum() / (sizes * widths).sum()
    by_table = dict(zip(table_names(len(sizes)), (1 - used / sizes).tolist(), strict=True))
    return {**by_table, "all": float(whole)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table, and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a Criteo TSV or .gz")
    parser.add_argument("--batch_size", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path("runs/sparsity"))
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        data = prepared_in(options.out, options.data)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    found = sparsity(data, options.batch_size)
    sizes = dict(zip(table_names(len(data.vocabularies)), data.vocabularies, strict=True))
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_SHOWN]
    for name in [*largest, "all"]:
        print(f"{name:12} {sizes.get(name, sum(sizes.values())):9,} rows  {found[name]:.5f} zero")
    figure, axes = plt.subplots(figsize=(7, 3.5))
    axes.bar([*largest, "all"], [found[name] for name in [*largest, "all"]])
    axes.set(ylabel="zero fraction of the gradient", ylim=(0.9, 1.0))
    figure.tight_layout()
    figure.savefig(options.out / "sparsity.png", dpi=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
