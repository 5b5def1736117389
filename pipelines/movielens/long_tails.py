"""How unequal items are: Figure 6 of Ding et al., ICML 2024.

Interactions of each item in its rank, without privacy: do not publish it for private data.

`python -m pipelines.movielens.long_tails --data NAME=FILE ... --out=PICTURE.png`
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.figure
import numpy as np

from pipelines.files import whole_file
from pipelines.movielens.interactions import read

_HEAD = 0.2  # the part of the items that is the head


def counts_of(path: Path) -> np.ndarray:
    """Interactions of each item that has any, the most popular first, `[items]`."""
    counts = np.bincount(read(path).items)
    return np.sort(counts[counts > 0])[::-1]


def of_head(counts: np.ndarray) -> float:
    """The part of all interactions that are with the most popular fifth of the items."""
    return float(counts[: max(1, round(_HEAD * len(counts)))].sum() / counts.sum())


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each file, and draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="+", required=True, help="NAME=FILE of `user item` lines")
    parser.add_argument("--out", type=Path, default=Path("runs/long_tails.png"))
    options = parser.parse_args(arguments)
    figure = matplotlib.figure.Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    try:
        for given in options.data:
            name, _, path = given.partition("=")
            counts = counts_of(Path(path))
            print(
                f"{name}: {counts.sum():,} interactions with {len(counts):,} items; the most "
                f"popular {_HEAD:.0%} have {of_head(counts):.1%}, the median item "
                f"{np.median(counts):g}"
            )
            axes.plot(np.arange(1, len(counts) + 1), counts, label=name)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    axes.set(xscale="log", yscale="log", xlabel="rank of the item", ylabel="interactions")
    axes.legend()
    axes.grid(alpha=0.3)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(options.out) as file:
        figure.savefig(file, format="png", dpi=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
