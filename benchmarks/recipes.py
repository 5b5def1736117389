"""What README's recipe learns, as a share of the best that the study of settings found.

The recipe trains with what `dp_sparse.recommend` says. A share of gain is (score − constant) /
(best private score − constant) on the test examples of a task of `pipelines.defaults`; the best is
that of docs/results/defaults.jsonl, chosen on validation examples. Data is looked for in the folder
that DP_SPARSE_DATA names.
"""

import os
import sys
import tempfile
from pathlib import Path

from benchmarks import harness
from pipelines.defaults.page import Found
from pipelines.defaults.run import run, task_of
from pipelines.defaults.search import Results
from pipelines.defaults.settings import methods_of, recommended
from pipelines.defaults.tasks import Sources

TASKS = ("ranking", "clicks", "images")
EPSILONS, QUICK_EPSILONS = (1.0, 3.0, 8.0), (3.0,)
RESULTS = harness.ROOT / "docs/results/defaults.jsonl"
_FILES = {
    "criteo": "criteo/kaggle_sample_120k.tsv.gz",
    "movielens": "movielens/ml-1m_user_item_chronological.txt.gz",
    "mnist": "mnist/mnist.npz",
}


def measured(
    name: str, epsilon: float, sources: Sources, results: Results
) -> tuple[float, str, str]:
    """The share of gain of the recipe's test score; log loss and mean prediction with the truth."""
    task = task_of(name, sources)
    found = Found(results, name, epsilon)
    best = found.best(methods_of(task))
    if best is None:
        raise SystemExit(f"{RESULTS.name} has no finished run of {name} at epsilon={epsilon:g}.")
    result = run(task, recommended(task), epsilon)
    share = (result["test"] - task.constant) / (found.test(best) - task.constant)
    loss = mean = "-"
    if task.as_frequent:
        loss = f"{result['test_log_loss']:.3f} ({task.constant_log_loss:.3f})"
    if task.as_frequent and task.binary:
        mean = f"{result['test_mean_prediction']:.3f} ({task.rate:.3f})"
    return share, loss, mean


def main() -> None:
    """Prints the share of each task and budget; the metric of a task is its smallest."""
    options = harness.arguments(__doc__ or "")
    data = Path(os.environ.get("DP_SPARSE_DATA", ""))
    missing = [str(data / file) for file in _FILES.values() if not (data / file).is_file()]
    if missing:
        print(f"Left out, set DP_SPARSE_DATA: there is no {', '.join(missing)}.", file=sys.stderr)
        return
    epsilons = QUICK_EPSILONS if options.quick else EPSILONS
    results = Results(RESULTS)
    with tempfile.TemporaryDirectory() as folder:
        files = {name: data / file for name, file in _FILES.items()}
        sources = Sources(**files, directory=Path(folder))
        found = {
            (name, epsilon): measured(name, epsilon, sources, results)
            for name in TASKS
            for epsilon in epsilons
        }
    metrics = {
        f"recipe_share_of_gain_{name}": min(found[name, epsilon][0] for epsilon in epsilons)
        for name in TASKS
    }
    rows = [(*key, *own) for key, own in found.items()]
    headers = ("task", "epsilon", "share of gain", "log loss (constant)", "mean prediction (rate)")
    harness.report("recipes", headers, rows, metrics, options)


if __name__ == "__main__":
    main()
