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
without privacy and with it. `examples/keras_rs` has a script for each:
`python -m examples.keras_rs.basic_ranking --epsilon=3`. A plan is added, and two lines change:

```python
budget = dp_sparse.PrivacyBudget(epsilon, delta=1 / num_examples)
sampling = dp_sparse.PoissonSampling(num_examples, batch_size, epochs=epochs)
plan = dp_sparse.PrivacyPlan(budget, sampling).calibrate()

model.compile(optimizer=dp_sparse.recommend(model, plan, batch).optimizer(), loss=loss)
model.fit(plan.sampling.batches((x, y)), epochs=epochs)
```

`python -m examples.keras_rs --run` runs what is missing and writes this page; each run is a line of
[keras_rs.jsonl](keras_rs.jsonl).
"""
_UNITS = """
*Tutorial* is its own optimizer and batch, *Adam* the optimizer and batch of the private runs
without clipping and noise; both are without privacy. All runs of a script take the same passes.
DP-SGD is what `recommend` says for tables of this size; DP-AdaFEST, which does not grow with them,
takes the same Adam. RMSE is in stars. One seed each.

ε protects an example: a rating, in `listwise_ranking` a list of five, in `sequential_retrieval` a
film with the ten before it, in `sas_rec` a user. A user has many ratings, and a rating is in
several of these lists and windows: there ε covers neither.

What differs from the tutorials, beside the data: fewer passes (4 of 5 in ranking, of 10 in `dcn`,
of 30 in `deep_recommender`; 16 of 50 by ratings, 2 of 5 in `sequential_retrieval`) over ten times
as many ratings; the last 50 films of a user in place of 200 in `sas_rec`; a mean in place of a sum
for the retrieval loss of `multi_task`, whose recall is over all films. `data_parallel_retrieval`
and `scann` train the model of `basic_retrieval`. With DP-AdaFEST `sas_rec` also loses the
regularizer of its table.
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
    models = [script for script in SCRIPTS if script not in SAME_MODEL]
    over_tutorial = sum(_ahead(lines, script, (TUTORIAL, None)) for script in models)
    over_adam = sum(_ahead(lines, script, (ADAM, None)) for script in models)
    told = (
        f"{two} of {len(SCRIPTS)} train privately with these lines alone. The others compare an "
        "example with the rest of its batch, which is refused before the first step; "
        f"`SampledSoftmax` replaces that loss. By their first scores at ε = 8, {over_tutorial} of "
        f"the {len(models)} models are ahead of the tutorial's own optimizer, whose rate was made "
        f"for fewer ratings, and {over_adam} of the same Adam without privacy."
    )
    return textwrap.fill(told, 100)


def _ahead(lines: Sequence[Run], script: str, other: tuple[str, None]) -> bool:
    """Whether the first score of a script is better at ε = 8 than in another run."""
    ours = [line for line in lines if line["group"] == script and "scores" in line]
    own = {(line["name"], line["epsilon"]): line["scores"] for line in ours}
    name = next(iter(own[other]))
    sign = _BETTER.get(name, 1)
    return bool(sign * own[PRIVATE, 8.0][name] > sign * own[other][name])
