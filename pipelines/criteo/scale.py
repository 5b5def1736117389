"""As many rows as a disk holds, made up, prepared and trained on once, with two kills on the way.

`python -m pipelines.criteo.scale --rows=100000000 --folder=FOLDER` makes up files of rows, has
`pipelines.criteo.prepare` draw their batches, and trains on these with `pipelines.criteo`. Each
command is killed in its middle and given again. Time, memory and disk of each part go to the page;
a command that was stopped goes on. Batches of 10⁸ rows take 16 GB, as much again while they are
sorted, and the files of rows 9 GB.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dp_sparse
from pipelines.criteo.generate import generate
from pipelines.criteo.planted_rows import Drift
from pipelines.criteo.prepare.job import PAIR
from pipelines.criteo.scale_page import write_page
from pipelines.criteo.schema import RECORD_DTYPE
from pipelines.files import require_disk
from pipelines.finished_runs import FinishedRuns
from pipelines.watched import Watched

FILES, PACKED_BYTES = 20, 90  # bytes of a row that is made up and compressed, about
HELD_OUT = 200_000  # rows at most, of a file of their own
_CONFIG = "configs/criteo_sample.py"


def measure(rows: int, folder: Path, batch_size: int, workers: int) -> dict[str, Any]:
    """Runs what is missing of the three parts, and says what each took.

    Args:
        rows: Of all files that train.
        folder: For rows, batches and the run; it may hold a part of them.
        batch_size: Expected examples of a step.
        workers: Processes that make up and prepare.

    Raises:
        ValueError: Fewer rows than there are files.
        OSError: The disk has no room, or a command fails.
    """
    if rows < FILES:
        raise ValueError(f"Expected --rows >= {FILES}, a row for each file, got --rows={rows}.")
    if not folder.exists():
        needed = rows * (PACKED_BYTES + PAIR.itemsize + 1.2 * RECORD_DTYPE.itemsize)
        require_disk(folder.parent, needed, f"{rows:,} rows, their batches and what is sorted")
    files = [folder / "rows" / f"day_{day:02d}.tsv.gz" for day in range(FILES)]
    held_out = folder / "held_out.tsv.gz"
    parts = FinishedRuns(folder / "parts.jsonl", f"{rows} rows, batches of {batch_size}")

    def part(name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        found = next((line for line in parts.lines if line["part"] == name), None)
        if found is None:
            parts.add(run() | {"part": name})
            found = parts.lines[-1]
        return {key: value for key, value in found.items() if key not in ("part", "of")}

    sizes = [rows // FILES + (day < rows % FILES) for day in range(FILES)]
    wanted = [*zip(files, sizes, range(FILES), strict=True)]
    wanted.append((held_out, min(HELD_OUT, max(1, rows // 10)), FILES))
    made = part("made up", lambda: _made_up(folder, wanted, workers))
    prepared = part("prepared", lambda: _prepared(folder, files, rows, batch_size, workers))
    trained = part("trained", lambda: _trained(folder, held_out))
    steps = dp_sparse.OfflineBatches(str(folder / "prepared"), lambda fields: fields).manifest.steps
    about = {"rows": rows, "batch_size": batch_size, "steps": steps}
    return about | {"made up": made, "prepared": prepared, "trained": trained}


def _made_up(folder: Path, wanted: Sequence[tuple[Path, int, int]], workers: int) -> dict[str, Any]:
    """Rows of one world; a day has rows of its own, but nothing drifts."""
    watched = Watched(folder, "made up")
    (folder / "rows").mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        watched.own_time(pool.map(_make_up, [of for of in wanted if not of[0].exists()]))
    return watched.found(folder / "rows")


def _make_up(of: tuple[Path, int, int]) -> None:
    path, rows, day = of
    generate(rows, path, progress=False, drift=Drift(day, renewal=0.0, turn=0.0))


def _prepared(
    folder: Path, files: Sequence[Path], rows: int, batch_size: int, workers: int
) -> dict[str, Any]:
    """Killed when half of the files are read."""
    output = folder / "prepared"
    command = [
        "pipelines.criteo.prepare",
        "--input",
        *map(str, files),
        f"--output={output}",
        f"--num_examples={rows}",
        f"--batch_size={batch_size}",
        f"--direct_num_workers={workers}",
        "--direct_running_mode=multi_processing",
    ]
    watched = Watched(folder, "prepared")
    watched.run(command, kill=lambda: len([*output.glob(".work/spread-*.json")]) >= len(files) // 2)
    return watched.found(output)


def _trained(folder: Path, held_out: Path) -> dict[str, Any]:
    """Killed when three eighths of the steps are in the log."""
    run = folder / "run"
    steps = json.loads((folder / "prepared" / "manifest.json").read_text())["steps"]
    command = [
        "pipelines.criteo",
        f"--config={_CONFIG}",
        "--config.model=dlrm",  # whose layers are a third of pCTR's
        f"--config.data.offline={folder / 'prepared'}",
        f"--config.data.path={held_out}",
        f"--config.report.directory={run}",
        "--config.report.verbose=0",
        "--config.privacy.calibration_share=0.0",  # its histogram reads examples, not batches
        f"--monitor={max(1, steps // 16)}",
        "--resume",
    ]
    log = run / "log" / "log.jsonl"

    def is_due() -> bool:
        lines = log.read_text().splitlines() if log.exists() else []
        return any(json.loads(line)["step"] >= 3 * steps // 8 for line in lines)

    watched = Watched(folder, "trained")
    told = watched.run(command, kill=is_due)
    return watched.found(run) | {"told": told.partition("\nGuarantee")[0]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, help="that train; without it, the page alone")
    parser.add_argument("--folder", type=Path, help="for everything; removed in the end")
    parser.add_argument("--batch_size", type=int, default=16_384, help="expected examples a step")
    parser.add_argument("--workers", type=int, default=2, help="processes that prepare")
    parser.add_argument("--results", type=Path, default=Path("docs/results/scale.jsonl"))
    parser.add_argument("--page", type=Path, default=Path("docs/results/scale.md"))
    options = parser.parse_args(arguments)
    if (options.rows is None) != (options.folder is None):
        parser.error("expected --rows and --folder together, got one of them")
    try:
        results = FinishedRuns(options.results)
        if options.rows is not None:
            folder = options.folder.absolute()
            results.add(measure(options.rows, folder, options.batch_size, options.workers))
            shutil.rmtree(folder)
    except (ValueError, OSError, dp_sparse.PrivacyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    write_page(results.lines, options.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
