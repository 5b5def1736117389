"""Runs the Criteo job.

`python -m pipelines.criteo --config configs/criteo_sample.py --config.data.path=FILE`, and on a
Cloud TPU with `--tpu=NAME`. `--export=PATH` writes the trained model for use without `dp_sparse`.
`--resume` goes on with a private run that was killed, and `--monitor=N` logs every N steps.
"""

import sys
from pathlib import Path

import ml_collections
from absl import app, flags

from pipelines import command
from pipelines.criteo import exporting
from pipelines.criteo.records import PreparedData, PrepareError, load_or_prepare, prepared_in
from pipelines.criteo.report import console_table, costs, notes, write_report
from pipelines.criteo.sources import title_of
from pipelines.criteo.tables import tpu_strategy
from pipelines.criteo.train import train
from pipelines.methods import NON_PRIVATE
from pipelines.runs import REFUSALS, Run

_TPU = flags.DEFINE_string("tpu", "", "Name of a Cloud TPU, or `local` on its own machine.")
_DATA_SERVICE = flags.DEFINE_string(
    "data_service", "", "Where data.offline is read: `grpc://HOST:PORT` or `local`."
)
_EXPORT = flags.DEFINE_string("export", "", "A folder that is not there yet, for the model.")
_RESUME = flags.DEFINE_bool("resume", False, "Go on with the run in config.report.directory.")
_MONITOR = flags.DEFINE_integer("monitor", 0, "Log each time so many steps were taken.", 0)
_CONFIG = command.config_flag("configs/criteo_sample.py", "The experiment.")


def _prepared(config: ml_collections.ConfigDict) -> PreparedData:
    """The records of `config.data.path` or `.tfds`, remade only when these or vocabularies changed.

    Raises:
        PrepareError: There is neither or there are both, or the rows cannot be read.
    """
    vocabularies = config.data.vocabularies
    if bool(config.data.path) == bool(config.data.tfds):
        raise PrepareError(
            f"Expected data.path or data.tfds, got data.path={config.data.path!r} and "
            f"data.tfds={config.data.tfds!r}: pass --config.data.path=FILE.tsv.gz."
        )
    if config.data.tfds:
        from pipelines.criteo.tfds_records import records_of  # needs tensorflow-datasets

        settings = config.data
        name = f"{settings.tfds.replace('/', '_')}-{settings.tfds_split}.records"
        into = Path(settings.prepared or f"{config.report.directory}/{name}")
        return records_of(
            settings.tfds, settings.tfds_split, settings.directory, into, vocabularies
        )
    source = Path(config.data.path)
    if config.data.prepared:
        return load_or_prepare(source, Path(config.data.prepared), vocabularies)
    return prepared_in(Path(config.report.directory), source, vocabularies)


def _run(config: ml_collections.ConfigDict) -> Run | None:
    """What a private run keeps to go on with; other runs begin anew."""
    if config.method != NON_PRIVATE and config.tables == "keras" and not _TPU.value:
        return Run(config, _RESUME.value, _MONITOR.value)
    if _RESUME.value or _MONITOR.value:
        raise ValueError(
            "Expected a private method and tables=keras with --resume or --monitor, got "
            f"method={config.method!r} and tables={config.tables!r}."
        )
    return None


def main(arguments: list[str]) -> int:
    """Prepares, trains, evaluates and reports."""
    if len(arguments) > 1:
        raise app.UsageError(f"Unexpected arguments: {arguments[1:]}.")
    config = _CONFIG.value
    try:
        exporting.check(config, _EXPORT.value, on_tpu=bool(_TPU.value))
        data = _prepared(config)
        strategy = None
        if _TPU.value:
            config.tables, strategy = "layer", tpu_strategy(_TPU.value)
        if _DATA_SERVICE.value:
            config.data.service = _DATA_SERVICE.value
        result = train(config, data, strategy, _run(config), _EXPORT.value)
    except REFUSALS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    page = Path(config.report.directory) / "report.html"
    write_report(page, [result], data, title_of(config, data))
    print("\n".join([console_table([result]), *notes([result]), *costs([result])]))
    print(result.statement)
    print(f"report: {page}")
    if _EXPORT.value:
        print(f"export: {_EXPORT.value}")
    return 0


if __name__ == "__main__":
    command.run(main)
