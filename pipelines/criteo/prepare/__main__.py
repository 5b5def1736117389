"""Prepares Criteo rows for offline Poisson sampling.

`python -m pipelines.criteo.prepare --input DAY... --output FOLDER --num_examples N --batch_size B
--epochs E`, and Beam's own options, such as `--runner=DirectRunner --direct_num_workers=2
--direct_running_mode=multi_processing`. `--count` counts the well-formed rows, which N must be.
"""

import argparse
import logging
import sys
from collections.abc import Sequence

from pipelines.criteo.parse import parse_lines
from pipelines.criteo.prepare.job import new_job
from pipelines.criteo.records import PrepareError, Tally
from pipelines.criteo.schema import TABLE3_VOCABULARIES
from pipelines.criteo.shards import blocks_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", nargs="+", default=[], help="Criteo TSV files, plain or gzip")
    parser.add_argument("--output", help="a new folder for the batches")
    parser.add_argument("--num_examples", type=int, help="well-formed rows of all inputs")
    parser.add_argument("--batch_size", type=float, default=2048.0, help="expected examples a step")
    parser.add_argument("--epochs", type=float, default=1.0, help="expected uses of an example")
    parser.add_argument(
        "--histogram_noise", type=float, help="noise multiplier of a histogram, for DP-FEST"
    )
    parser.add_argument("--key_file", help="by default OUTPUT.key; deleted in the end")
    parser.add_argument("--seed", type=int, help="for tests: private training refuses its batches")
    parser.add_argument("--count", action="store_true", help="only count well-formed rows")
    options, beam_options = parser.parse_known_args(arguments)
    logging.getLogger().setLevel(logging.WARNING)
    try:
        if options.count:
            print(f"well-formed rows: {_count(options.input)}")
            return 0
        for name in ("output", "num_examples"):
            if getattr(options, name) is None:
                raise PrepareError(f"Expected --{name}; --count counts well-formed rows.")
        return _prepare(options, beam_options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _prepare(options: argparse.Namespace, beam_options: Sequence[str]) -> int:
    from pipelines.criteo.prepare.run import prepare  # needs apache-beam, which counting does not

    job = new_job(
        options.input,
        options.output,
        num_examples=options.num_examples,
        batch_size=options.batch_size,
        epochs=options.epochs,
        key_file=options.key_file,
        seeded=options.seed is not None,
        histogram_noise=options.histogram_noise,
    )
    manifest = prepare(job, beam_options, options.seed)
    print(
        f"{job.output}: {manifest.num_examples} examples, {manifest.steps} steps of "
        f"{manifest.expected_batch_size:g} expected, at most {manifest.capacity}"
    )
    for reason, count in manifest.about["quarantined"].items():
        print(f"quarantined: {count} × {reason}")
    return 0


def _count(inputs: Sequence[str]) -> int:
    if not inputs:
        raise PrepareError("Expected Criteo files to count, got none: pass --input FILE ...")
    tally = Tally()
    for path in inputs:
        for block in blocks_of(path, progress=True):
            tally.add(parse_lines(block, TABLE3_VOCABULARIES).reasons)
    return tally.records


if __name__ == "__main__":
    sys.exit(main())
