"""The page of `pipelines.criteo.scale`: what each part took, and what Criteo-1TB would take."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.files import whole_file
from pipelines.markdown import table

PARTS = {
    "made up": "rows made up, compressed",
    "prepared": "batches drawn before training (`pipelines.criteo.prepare`)",
    "trained": "trained, one pass (`pipelines.criteo`)",
}
TERABYTE_ROWS = 4_373_472_329  # of 24 days: LIBSVM's page of data sets, criteo_tb

_HEAD = """# As many rows as the disk holds

`python -m pipelines.criteo.scale --rows=100000000 --folder=FOLDER` makes up rows in the shape of
Criteo's in {files} files, draws the batches of one expected pass on Apache Beam with two workers,
and trains DLRM on them with DP-AdaFEST at ε = 1, all settings being those of
`configs/criteo_sample.py` but the batch size. Preparation is killed when half of the files are
read, training when three eighths of its steps are in the log, both with SIGKILL to all their
processes; the same command then goes on. Time has what was done twice.

Memory is the largest sum, over all processes of a command, of what they do not share with files.
Each measurement is a line of [scale.jsonl](scale.jsonl). Other jobs shared the machine, so rows a
second are lower bounds.
"""


def write_page(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the page of what was measured."""
    from pipelines.criteo.scale import FILES

    with whole_file(path) as file:
        file.write(page_of(lines, FILES).encode())


def page_of(lines: Sequence[dict[str, Any]], files: int) -> str:
    """The page."""
    parts = [_HEAD.format(files=files)]
    for line in lines:
        told = line["trained"]["told"]
        steps = f"{line['steps']:,} steps of {line['batch_size']:,} expected examples"
        parts.append(f"\n## {line['rows']:,} rows\n\n{steps}.\n\n{_parts_table(line)}\n")
        parts.append(f"\nTraining printed, on held-out rows of its own:\n\n```\n{told}\n```\n")
    if lines:
        parts.append(_terabyte(max(lines, key=lambda line: line["rows"])))
    return "".join(parts)


def _parts_table(line: dict[str, Any]) -> str:
    rows = []
    for name, title in PARTS.items():
        found, killed = line[name], line[name].get("killed_after")
        rows.append(
            (
                title,
                f"{found['seconds'] / 60:.1f} min",
                f"{line['rows'] / found['seconds']:,.0f}",
                f"{found['memory'] / 1e9:.1f} GB" if found["memory"] else "",
                f"{found['disk'] / 1e9:.2f} GB",
                "" if killed is None else f"after {killed / 60:.1f} min",
            )
        )
    return table(("part", "time", "rows a second", "memory", "on disk", "killed"), rows)


def _terabyte(line: dict[str, Any]) -> str:
    """In proportion: every part reads its rows once, and its memory does not grow with them."""
    times = TERABYTE_ROWS / line["rows"]
    prepared, trained = line["prepared"], line["trained"]
    return f"""
## What Criteo-1TB would take

{TERABYTE_ROWS:,} rows in 24 days, {times:.0f} times those of the largest measurement, in proportion
on these two cores: {times * prepared["seconds"] / 3600:.0f} hours for batches,
{times * prepared["disk"] / 1e12:.2f} TB on the disk and as much again while they are sorted, and
{times * trained["seconds"] / 3600:.0f} hours for a pass of training. A preparation shares its files
and buckets out among as many workers as Beam has. Not run here.
"""
