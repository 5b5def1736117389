"""Offline Poisson and a stream side by side, at equal ε, on the same rows of a Criteo file.

The first nine tenths of the lines train, each expected once in either way; the rest is held out.
Offline Poisson prepares batches on Apache Beam and reads them in their order; the stream reads the
lines as they come, without amplification.

`python -m pipelines.criteo.stream_study --data FILE --page docs/results/streams.md`
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ml_collections

from configs import criteo_sample
from pipelines.criteo.lines import line_blocks
from pipelines.criteo.parse import MAX_LINE_BYTES
from pipelines.criteo.prepare.job import new_job
from pipelines.criteo.records import prepare, prepared_in
from pipelines.criteo.time_series.days import cut_into_days
from pipelines.criteo.train import RunResult, train
from pipelines.files import whole_file
from pipelines.memory import keep_freed_memory

EPSILONS = (1.0, 3.0, 8.0)
METHODS = ("dp_sgd", "dp_adafest")
_PARTS = 10  # of the lines; the last one is held out

_HEAD = """# Offline Poisson and a stream at equal ε

The same rows, once each in either way, in batches of {batch}: the first nine tenths of {lines:,}
lines train, the rest is held out. σ is the plan's noise multiplier, of the same budget; all other
settings are those of `configs/criteo_sample.py`, without calibration. One seed.

`python -m pipelines.criteo.stream_study --data DATA --page docs/results/streams.md`

| ε | method | σ, offline Poisson | σ, stream | AUC, offline | AUC, stream | log loss, offline \
| log loss, stream | mean prediction, offline | mean prediction, stream |
|---|---|---|---|---|---|---|---|---|---|
"""


def compare(
    data: Path, folder: Path, epsilons: Sequence[float], changes: dict[str, object]
) -> tuple[int, list[tuple[float, str, RunResult, RunResult]]]:
    """Trains in both ways.

    Args:
        data: Criteo rows.
        folder: For what is prepared.
        epsilons: Budgets.
        changes: Of `configs/criteo_sample.py`, by the paths of its fields.

    Returns:
        The number of lines, and for each budget and method the result offline and as a stream.
    """
    parts = cut_into_days(data, folder / "parts", _PARTS)
    stream = folder / "day_0.tsv"
    with whole_file(stream) as file:
        file.write(b"".join(path.read_bytes() for path in parts[:-1]))
    lines = _lines(stream)
    held_out = prepared_in(folder, parts[-1])
    results = []
    for epsilon in epsilons:
        for method in METHODS:
            config = criteo_sample.get_config()
            config.method, config.privacy.epsilon = method, epsilon
            config.privacy.calibration_share = 0.0  # which there is not for batches drawn before
            config.training.epochs, config.report.verbose = 1.0, 0
            config.report.directory = str(folder / "report")
            config.update_from_flattened_dict(changes)
            offline, streamed = config.copy_and_resolve_references(), config
            offline.data.offline = _drawn(stream, folder / f"{method}_{epsilon:g}", config)
            streamed.data.stream, streamed.data.num_examples = str(stream), lines
            results.append((epsilon, method, train(offline, held_out), train(streamed, held_out)))
    return lines + _lines(parts[-1]), results


def _drawn(stream: Path, output: Path, config: ml_collections.ConfigDict) -> str:
    """A new draw: one serves one plan."""
    from pipelines.criteo.prepare import run  # needs apache-beam

    count = prepare(stream, output.with_suffix(".records"), progress=False).num_records
    batch = config.training.batch_size
    run.prepare(new_job([str(stream)], str(output), num_examples=count, batch_size=batch, epochs=1))
    return str(output)


def _lines(path: Path) -> int:
    return sum(block.count(b"\n") for block in line_blocks(path, MAX_LINE_BYTES, progress=False))


def page(lines: int, results: Sequence[tuple[float, str, RunResult, RunResult]], batch: int) -> str:
    """The results as Markdown."""
    rows = []
    for epsilon, method, offline, streamed in results:
        noise = [_noise(result) for result in (offline, streamed)]
        auc, log_loss, mean = (
            [f"{getattr(result, name):.4f}" for result in (offline, streamed)]
            for name in ("auc", "log_loss", "mean_prediction")
        )
        shown = [f"{each:.3f}" for each in noise] + auc + log_loss + mean
        rows.append(f"| {epsilon:g} | {method} | {' | '.join(shown)} |")
    return _HEAD.format(batch=batch, lines=lines) + "\n".join(rows) + "\n"


def _noise(result: RunResult) -> float:
    assert result.report is not None
    return float(result.report.model.optimizer.plan.noise_multiplier)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="Criteo rows, plain or gzip")
    parser.add_argument("--page", type=Path, required=True, help="the Markdown page to write")
    options = parser.parse_args(arguments)
    keep_freed_memory()
    try:
        with tempfile.TemporaryDirectory() as folder:
            lines, results = compare(options.data, Path(folder), EPSILONS, {})
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with whole_file(options.page) as file:
        file.write(page(lines, results, criteo_sample.get_config().training.batch_size).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
