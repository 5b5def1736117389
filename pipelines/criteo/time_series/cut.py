"""Cuts one file of rows, in their order, into days.

`python -m pipelines.criteo.time_series.cut --input FILE --output FOLDER --days 24`
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.criteo.time_series.days import cut_into_days


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, required=True, help="Criteo rows, plain or gzip")
    parser.add_argument("--output", type=Path, required=True, help="a folder for the days")
    parser.add_argument("--days", type=int, default=24, help="how many")
    options = parser.parse_args(arguments)
    try:
        cut_into_days(options.input, options.output, options.days)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
