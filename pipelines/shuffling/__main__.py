"""Computes what is missing of the study, and writes its page.

`python -m pipelines.shuffling --mnist=mnist.npz --sst2=FOLDER [--out=docs/results]`; the folder has
train.tsv.gz and dev.tsv.gz. Some minutes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import shuffling
from pipelines.memory import keep_freed_memory
from pipelines.shuffling.study import points, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; returns 1 after an error."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.shuffling", description=__doc__)
    parser.add_argument("--mnist", type=Path, required=True, help="Keras' mnist.npz")
    parser.add_argument("--sst2", type=Path, required=True, help="a folder of SST-2")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args(arguments)
    keep_freed_memory()
    for path in (options.mnist, options.sst2):
        if not path.exists():
            print(f"error: No such file or folder: {path}.", file=sys.stderr)
            return 1
    ways = lambda: shuffling.permutation_times(shuffling.SIZE, shuffling.PRODUCTS)  # noqa: E731
    try:
        run(points(options.mnist, options.sst2, ways), options.out)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
