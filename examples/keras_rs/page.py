"""The page of the ten examples."""

import textwrap
from collections.abc import Sequence

from examples.keras_rs.names import (
    ADAM,
    POINTS,
    PRIVATE,
    SAME_MODEL,
    SCRIPTS,
    SPARSE,
    STEPS,
    TUTORIAL,
    TWO_LINES,
)
from pipelines.markdown import table
from pipelines.points import Run, told_missing

_HEAD = """# The examples of keras-rs

The ten examples that keras-rs 0.4 ships, rewritten for made-up data in the shape of MovieLens-1M,
trained as the tutorial does and privately. `examples/keras_rs` has a script for each:
`python -m examples.keras_rs.basic_ranking --epsilon=3`. Two lines change:

```python
model.compile(optimizer=dp_sparse.recommend(model, plan, batch).optimizer(), ...)
model.fit(plan.sampling.batches((x, y)), ...)
```

`python -m examples.keras_rs --run` runs what is missing and writes this page; each run is a line of
[keras_rs.jsonl](keras_rs.jsonl). One seed each. All runs of a script take the same passes.
"""
_UNITS = """
An example, which ε protects, is a rating; in `listwise_ranking` a list of five films, in
`sequential_retrieval` a film with the ten before it, in `sas_rec` a user. *Tutorial* is its own
optimizer and batch, *Adam* the optimizer and batch of the private runs without clipping and noise;
both are without privacy. DP-SGD is what `recommend` says for tables of this size; DP-AdaFEST, which
does not grow with them, takes the same Adam. `data_parallel_retrieval` and `scann` train the model
of `basic_retrieval`. RMSE is in stars.
"""
_COSTS = """
## What it costs

Time of a step under `fit` over that of the tutorial's optimizer, at the batch size of the private
runs, in turns, medians; and the rows of all tables that get noise in a step of DP-AdaFEST at
ε = 8.
"""
_BETTER = {"RMSE": -1, "NDCG": 1}  # 1: more is better, as of every recall


def page_of(lines: Sequence[Run]) -> str:
    """The page; what has not run is left empty."""
    parts = [_HEAD, told_missing(POINTS, lines), _UNITS]
    if len(lines) == len(POINTS):
        parts.append(f"\n{_conclusions(lines)}\n")
    return "".join([*parts, "\n", _scores(lines), "\n", _COSTS, "\n", _costs(lines), "\n"])


def _scores(lines: Sequence[Run]) -> str:
    rows = []
    for script in SCRIPTS:
        own = {(x["name"], x["epsilon"]): x for x in lines if x["group"] == script}
        columns = [
            own.get(key)
            for key in (
                (TUTORIAL, None),
                (ADAM, None),
                (PRIVATE, 8.0),
                (PRIVATE, 3.0),
                (SPARSE, 8.0),
            )
        ]
        first = next((column for column in columns if column), None)
        for name in first["scores"] if first else ():
            cells = [f"{c['scores'][name]:.4g}" if c else "" for c in columns]
            rows.append((f"`{script}`", str(first["lines"]), name, *cells))
    headers = ("", "lines changed", "", "tutorial", "Adam", "ε = 8", "ε = 3", "DP-AdaFEST, ε = 8")
    return table(headers, rows)


def _costs(lines: Sequence[Run]) -> str:
    rows = []
    for script in SCRIPTS:
        own = {x["name"]: x for x in lines if x["group"] == script}
        if STEPS in own and PRIVATE in own:
            times = [f"{own[STEPS]['over_stock'][name]:.2f}" for name in (PRIVATE, SPARSE)]
            noised = f"{own[SPARSE]['rows']:,.0f}" if SPARSE in own else ""
            rows.append((f"`{script}`", f"{own[PRIVATE]['examples']:,}", *times, noised))
    headers = ("", "examples", "DP-SGD over stock", "DP-AdaFEST over stock", "rows with noise")
    return table(headers, rows)


def _conclusions(lines: Sequence[Run]) -> str:
    """What the numbers say."""
    two = sum(line["name"] == TUTORIAL and line["lines"] == TWO_LINES for line in lines)
    over_tutorial = sum(_ahead(lines, script, (TUTORIAL, None)) for script in SCRIPTS)
    others = [script for script in SCRIPTS if script not in SAME_MODEL]
    over_adam = sum(_ahead(lines, script, (ADAM, None)) for script in others)
    told = (
        f"{two} of {len(SCRIPTS)} train privately with the two lines alone. The others compare an "
        "example with the rest of its batch, which is refused before the first step; "
        f"`SampledSoftmax` replaces that loss. At ε = 8, {over_tutorial} of {len(SCRIPTS)} are "
        f"ahead of the tutorial's own optimizer, and {over_adam} of {len(others)} ahead of the "
        "same Adam without privacy."
    )
    return textwrap.fill(told, 100)


def _ahead(lines: Sequence[Run], script: str, other: tuple[str, None]) -> bool:
    """Whether the first score of a script is better at ε = 8 than in another run."""
    ours = [line for line in lines if line["group"] == script and "scores" in line]
    own = {(line["name"], line["epsilon"]): line["scores"] for line in ours}
    name = next(iter(own[other]))
    sign = _BETTER.get(name, 1)
    return bool(sign * own[PRIVATE, 8.0][name] > sign * own[other][name])
