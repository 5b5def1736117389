"""The study of retrieval: runs what is missing, and writes the page.

`python -m pipelines.movielens.retrieval_study --data FILE [--minutes N]` runs one point after the
other, each in its own process, and writes the page after each. A finished run is a line of
`--results` at once. Without `--data` it writes the page. `configs/retrieval_study.py` has the
points.
"""

import functools
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections

from configs import retrieval_study
from pipelines import points
from pipelines.files import whole_file
from pipelines.markdown import table
from pipelines.own_process import in_own_process
from pipelines.points import Changes, Run, missing, parser, run_config, run_missing, told_missing

_AHEAD = 0.6  # points of recall@10: two standard errors of the difference, about
results_in = functools.partial(points.results_in, of_machine=("seed", "data.path"))

_HEAD = """# Retrieval: the next film of a user

MovieLens-1M: the {history} films before each one of a user ask for it, among {items:,} films. A
query is a Dense layer over the sum of the films' rows ÷ the root of their number; candidates are
the rows of the same table, of width {width}. Recall@k is the part of users whose last film, which
does not train, is among the k best that they have not had; its standard error is 0.3 points at 5 %
of 6,040 users. ε protects an example: a film with those before it. A user's film is in several.

Private runs take {epochs:g} passes in Poisson batches of {batch:,}, Adam at {rate:g}, clip norm
{clip:g}, {negatives:,} negatives a step, DP-AdaFEST with the defaults of `recommend`. Runs without
privacy take as many passes in batches of 1,024. One seed each.

`python -m pipelines.movielens.retrieval_study --data FILE` runs what is missing and writes this
page; each run is a line of [retrieval.jsonl](retrieval.jsonl).
"""


def page_of(config: ml_collections.ConfigDict, lines: Sequence[Run]) -> str:
    """The page."""
    base = config.base
    head = _HEAD.format(
        history=base.data.history,
        items=lines[0]["items"] if lines else 0,
        width=base.model.width,
        epochs=base.training.epochs,
        batch=base.training.batch_size,
        rate=base.optimizer.options.learning_rate,
        clip=base.privacy.clip_norm,
        negatives=base.model.negatives,
    )
    parts = [head, told_missing(config.points, lines)]
    if lines and not missing(config.points, lines):
        parts.append(f"\n{_conclusions(lines)}\n")
    for group in dict.fromkeys(point["group"] for point in config.points):
        own = [line for line in lines if line["group"] == group]
        if own:
            parts.append(_section(group, own))
    return "".join(parts)


def _section(group: str, lines: Sequence[Run]) -> str:
    first = lines[0]
    title = "All users" if group == "all users" else "A fifth of the users"
    rows = [("popularity", "", *(f"{each:.2f}" for each in first["popularity"].values()), "")]
    for line in sorted(lines, key=lambda line: (line["name"], line["epsilon"] or 0)):
        epsilon = "none" if line["epsilon"] is None else f"{line['epsilon']:g}"
        noised = "" if line["rows"] is None else f"{line['rows']:,.0f}"
        recall = [f"{each:.2f}" for each in line["recall"].values()]
        rows.append((line["name"], epsilon, *recall, noised))
    headers = "", "ε", "recall@10, %", "recall@100, %", "rows noised a step"
    told = f"{first['examples']:,} examples of {first['users']:,} users."
    return f"\n## {title}\n\n{told}\n\n{table(headers, rows)}\n"


def _conclusions(lines: Sequence[Run]) -> str:
    """What the numbers say."""

    def of(group: str, name: str, epsilon: float | None) -> float:
        wanted = group, name, epsilon
        found = [x for x in lines if (x["group"], x["name"], x["epsilon"]) == wanted]
        return float(found[0]["recall"]["10"])

    sentences = []
    for group, title in (("all users", "With all users"), ("a fifth", "With a fifth of them")):
        own = [line for line in lines if line["group"] == group]
        popular, best = own[0]["popularity"]["10"], of(group, "in-batch negatives", None)
        private = {e: of(group, "sampled negatives, DP-AdaFEST", e) for e in (1.0, 3.0, 8.0)}
        ahead = [f"{e:g}" for e, recall in private.items() if recall > popular + _AHEAD]
        beat = f"beat popularity at ε = {', '.join(ahead)}" if ahead else "do not beat popularity"
        told = ", ".join(f"{recall:.1f} % at ε = {e:g}" for e, recall in private.items())
        sentences.append(
            f"{title}, sampled negatives {beat}: recall@10 is {told}, of popularity {popular:.1f} "
            f"%, and of in-batch negatives without privacy {best:.1f} %."
        )
    return textwrap.fill(" ".join(sentences), 100)


def run_point(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Trains one model; what goes into its line."""
    from pipelines.movielens.retrieval import train

    return train(config)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    own = parser(__doc__ or "", "retrieval")
    own.add_argument("--data", help="lines of `user item`; without it, the page alone")
    options, config = own.parse_args(arguments), retrieval_study.get_config()
    try:
        results = results_in(options.results, config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    def train(run: Run, changes: Changes) -> dict[str, Any]:
        made = run_config(config.base, run, changes)
        made.data.path = options.data
        return in_own_process(run_point, made)

    def write() -> None:
        with whole_file(Path(options.page)) as file:
            file.write(page_of(config, results.lines).encode())

    if options.data is None:
        write()
        return 0
    return run_missing(config.points, results, train, write, options.minutes)


if __name__ == "__main__":
    sys.exit(main())
