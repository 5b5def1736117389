"""Runs the Criteo job.

`python -m pipelines.criteo --config configs/criteo_sample.py --config.data.path=FILE`, and on a
Cloud TPU with `--tpu=NAME`.
"""

import sys
from pathlib import Path

import ml_collections
from absl import app, flags
from ml_collections import config_flags

from pipelines.criteo.prepare import PreparedData, PrepareError, load_or_prepare
from pipelines.criteo.report import console_table, write_report
from pipelines.criteo.tables import tpu_strategy
from pipelines.criteo.train import train

_TPU = flags.DEFINE_string("tpu", "", "Name of a Cloud TPU, or `local` on its own machine.")
_CONFIG = config_flags.DEFINE_config_file("config", "configs/criteo_sample.py", "The experiment.")


def prepared(config: ml_collections.ConfigDict) -> PreparedData:
    """The records of `config.data.path`, remade only when the file or the vocabularies changed."""
    if not config.data.path:
        raise PrepareError(
            "Expected a Criteo file, got data.path='': pass --config.data.path=FILE.tsv.gz."
        )
    source = Path(config.data.path)
    default = Path(config.report.directory) / f"{source.name}.records"
    destination = Path(config.data.prepared or default)
    destination.parent.mkdir(parents=True, exist_ok=True)
    return load_or_prepare(source, destination, tuple(config.data.vocabularies))


def main(arguments: list[str]) -> int:
    """Prepares, trains, evaluates and reports."""
    if len(arguments) > 1:
        raise app.UsageError(f"Unexpected arguments: {arguments[1:]}.")
    config = _CONFIG.value
    if "points" in config:
        message = "Expected the config of one run, got a sweep: python -m pipelines.sweep runs it."
        print(f"error: {message}", file=sys.stderr)
        return 1
    try:
        data = prepared(config)
        strategy = None
        if _TPU.value:
            config.tables, strategy = "layer", tpu_strategy(_TPU.value)
        result = train(config, data, strategy)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    page = Path(config.report.directory) / "report.html"
    write_report(page, [result], data, f"{config.data.path}: {data.num_records} rows")
    print(console_table([result]))
    print(result.statement)
    print(f"report: {page}")
    return 0


if __name__ == "__main__":
    app.run(main)
