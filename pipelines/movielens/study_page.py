"""The page of the comparison: scores, curves (Figure 4), sharing (Figure 7), maps (Figure 10)."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import dp_accounting
import ml_collections
from dp_accounting import rdp

from pipelines.files import whole_file
from pipelines.movielens import study_maps
from pipelines.movielens.study_plots import Lines, of, plot_curves, plot_sharing


@dataclasses.dataclass(frozen=True)
class DataSet:
    """What a page says of the data, and what the paper has on it.

    Attributes:
        title: Its name.
        users: How many train; public.
        shows: What of the paper the page is about.
        table: Which of its tables has the scores.
        curves: Which of its figures has the training curves.
        choices: How settings were found beside the grid.
        paper: NDCG@10 by model and ε.
    """

    title: str
    users: int
    shows: str
    table: str
    curves: str
    choices: str
    paper: Mapping[str, Mapping[float, float]]


DATA_SETS = {
    "movielens": DataSet(
        title="MovieLens-1M",
        users=6_040,
        shows="Table 2 and Figures 4, 7 and 10",
        table="Table 2",
        curves="Figure 4",
        choices=(
            "that rule, and rates below 0.01, came when Re-Attention and plain attention had been "
            "compared at 0.01. The width, the number of items and epochs were found before in some "
            "ten trials, of which the first were judged by the last item."
        ),
        paper={
            "re_attention": {5.0: 5.88, 8.0: 7.70, 10.0: 8.42},
            "vanilla": {5.0: 4.57, 8.0: 7.05, 10.0: 7.99},
            "without_sharing": {5.0: 2.33, 8.0: 2.56, 10.0: 2.74},
            "gru": {5.0: 2.26, 8.0: 2.40, 10.0: 2.81},
            "lstm": {5.0: 2.65, 8.0: 2.76, 10.0: 2.95},
        },
    ),
    "amazon": DataSet(
        title="Amazon's ratings of video games",
        users=29_341,
        shows="Table 3 and Figure 9",
        table="Table 3",
        curves="Figure 9",
        choices="that rule came from the study on MovieLens-1M.",
        paper={
            "re_attention": {5.0: 1.64, 8.0: 1.98, 10.0: 1.99},
            "vanilla": {5.0: 1.37, 8.0: 1.54, 10.0: 1.57},
            "gru": {5.0: 1.13, 8.0: 1.33, 10.0: 1.47},
        },
    ),
}
_SCORES = {
    "ndcg": "NDCG@10 in %",
    "hit": "HIT@10 in %",
    "ndcg_unseen": "NDCG@10, unseen",
    "hit_unseen": "HIT@10, unseen",
}
_HEADERS = ("model", "ε", "setting", "seeds", *_SCORES.values(), "NDCG, paper")
Budgets = dict[tuple[float, int, int, float], dict[str, None]]  # models by ε, batch, steps, σ

_HEAD = """# Next-item models with user-level privacy

{title}, {users:,} users, one example a user, δ = 1/users, all items ranked: {shows} of Ding et al.
(ICML 2024). {setting} {grid} No ε
covers these choices, nor the scores, which are of items of the same users; their data are public
here.
What is missing has not been run: the command does the rest, and writes this page. Every run is a
line of [{results}]({results}).

`python -m pipelines.movielens.study --config configs/{data}_study.py --config.data.path=FILE`
"""
_GRID = """A grid of batch sizes and learning rates
was run for each model at ε = {grid:g} with one seed and judged by the last item but one; while its
largest rate is the best, twice that rate is run, too. The best setting is run at every ε and judged
by the last item. Scores within {same:g} points of the best one
count as equal, and the largest of their rates is taken; {choices}"""
_NO_GRID = (
    "All models have one batch size and one learning rate, which were not searched for. Each was "
    "run at ε = {grid:g}, judged by the last item but one, and at every ε, judged by the last item."
)
_SETTING = (
    "The last {length} items of a user, of which the last {predicted} predict the next one; "
    "items that {filter_items} users or more have there, by noisy counts, of which the others are "
    "never found; width {width}, {epochs} epochs, dropout {dropout:g}."
)


def write(
    study: ml_collections.ConfigDict, lines: Lines, replaced: Lines, path: Path, maps: Path
) -> None:
    """Writes the page, and the pictures beside it whose runs are there.

    Args:
        study: The study.
        lines: The grids, and the runs of each model's best setting.
        replaced: Runs of settings that were best before the grid grew.
        path: The page.
        maps: A folder of attention maps.
    """
    setting = _SETTING.format(
        length=study.data.length,
        predicted=study.data.predicted,
        filter_items=study.data.filter_items,
        width=study.model.width,
        epochs=study.training.epochs,
        dropout=study.model.dropout,
    )
    data = DATA_SETS[study.study.data]
    head = _HEAD.format(
        title=data.title,
        users=data.users,
        shows=data.shows,
        data=study.study.data,
        setting=setting,
        grid=_grid_of(study.study, data),
        results=Path(study.study.results).name,
    )
    epsilons = study.study.epsilons
    parts = [
        head,
        *_comparison(lines, epsilons, data),
        *_grids(lines),
        *_replaced(replaced, epsilons, data),
    ]
    pictures: list[tuple[str, Callable[[Path], bool]]] = [
        ("curves", lambda file: plot_curves(lines, tuple(data.paper), epsilons, file)),
        ("sharing", lambda file: plot_sharing(lines, file)),
        ("maps", lambda file: study_maps.plot(maps, tuple(study.study.epsilons), file)),
    ]
    for name, plot in pictures:
        file = path.with_name(f"{path.stem}_{name}.png")
        if plot(file) or file.exists():
            caption = _CAPTIONS[name].format(curves=data.curves)
            parts.append(f"{caption}\n\n![{name}]({file.name})\n")
    with whole_file(path) as page:
        page.write("\n".join(parts).encode())


def _grid_of(study: ml_collections.ConfigDict, data: DataSet) -> str:
    """How settings were found."""
    if len(study.batch_sizes) == len(study.learning_rates) == 1:
        return _NO_GRID.format(grid=study.grid_epsilon)
    return _GRID.format(grid=study.grid_epsilon, same=study.same, choices=data.choices)


_CAPTIONS = {
    "curves": "## Training curves ({curves})\n\nThe mean over seeds, on the held-out items.",
    "sharing": (
        "## With and without a tied table (Figure 7)\n\nPlain attention at the settings of the "
        "grid, on the validation items."
    ),
    "maps": (
        "## Attention maps (Figure 10)\n\nScores of the first block, the last items of five "
        "users, one model each of the first seed. A row is a query, its keys are in time's "
        "order. They show what these users took: no ε covers them."
    ),
}


def _comparison(lines: Lines, epsilons: Sequence[float], data: DataSet) -> list[str]:
    """The table, and what each budget's noise is by either accounting."""
    budgets: Budgets = {}
    for line in of(lines, held_out="test"):
        point, result = line["point"], line["result"]
        noise = point["epsilon"], point["batch_size"], result["steps"], result["noise_multiplier"]
        budgets.setdefault(noise, {})[point["model"]] = None
    rows = _rows(lines, epsilons, data)
    return [
        _section(f"Held-out items ({data.table})", _HEADERS, rows, _of_popularity(lines)),
        *_best(lines, epsilons, data),
        *_gains(lines, epsilons),
        *_accountings(budgets, data.users),
    ]


def _rows(lines: Lines, epsilons: Sequence[float], data: DataSet) -> list[tuple[str, ...]]:
    """A row for each model and ε, of the one setting that its runs have."""
    rows = []
    for model, epsilon in itertools.product(data.paper, epsilons):
        own = of(lines, model=model, epsilon=epsilon, held_out="test")
        if own:
            point, printed = own[0]["point"], data.paper[model]
            scores = [_spread([each["result"][key] for each in own]) for key in _SCORES]
            setting = f"batch {point['batch_size']:,}, rate {point['learning_rate']:g}"
            paper = f"{printed[epsilon]:.2f}" if epsilon in printed else "-"
            rows.append((model, f"{epsilon:g}", setting, str(len(own)), *scores, paper))
    return rows


def _replaced(lines: Lines, epsilons: Sequence[float], data: DataSet) -> list[str]:
    """The table of settings that were compared before the grid had a better one."""
    rates = sorted({(e["point"]["batch_size"], e["point"]["learning_rate"]) for e in lines})
    rows = [
        row
        for batch, rate in rates
        for row in _rows(of(lines, batch_size=batch, learning_rate=rate), epsilons, data)
    ]
    text = "They were the best ones of a smaller grid."
    return [_section("Settings that were compared before", _HEADERS, rows, text)] if rows else []


def _of_popularity(lines: Lines) -> str:
    """What a ranking that is the same for all users has."""
    of_test = of(lines, held_out="test")
    found = of_test[0]["result"]["popularity"] if of_test else {}
    scores = ", ".join(f"{_SCORES[name]} {score:.2f}" for name, score in found.items())
    return (
        "Unseen are the items that a user has not had before; in these data nobody has an item "
        "twice. The paper does not say whether it leaves the others out. The ranking by how often "
        f"users have an item, without noise: {scores}."
    )


def _best(lines: Lines, epsilons: Sequence[float], data: DataSet) -> Iterable[str]:
    """The best model at each ε, beside what the paper says of Re-Attention."""
    for epsilon in epsilons:
        found: dict[str, list[float]] = {}
        for line in of(lines, epsilon=epsilon, held_out="test"):
            found.setdefault(line["point"]["model"], []).append(line["result"]["ndcg"])
        printed = data.paper["re_attention"].get(epsilon)
        if found and printed is not None:
            means = {model: statistics.fmean(scores) for model, scores in found.items()}
            best = max(means, key=means.__getitem__)
            reached = "is reached" if means[best] >= printed else "is not reached"
            yield (
                f"At ε = {epsilon:g} the best mean NDCG@10 is {means[best]:.2f} %, of {best}. The "
                f"paper's {printed:.2f} % of Re-Attention {reached}.\n"
            )


def _gains(lines: Lines, epsilons: Sequence[float]) -> Iterable[str]:
    """What Re-Attention adds, in percentage points, beside the spread."""
    for epsilon, key in itertools.product(epsilons, ("ndcg", "ndcg_unseen")):
        ours, plain = (
            [e["result"][key] for e in of(lines, model=m, epsilon=epsilon, held_out="test")]
            for m in ("re_attention", "vanilla")
        )
        if len(ours) == len(plain) > 1:  # one seed has no spread
            gain = statistics.fmean(ours) - statistics.fmean(plain)
            spread = max(map(statistics.stdev, (ours, plain)))
            yield (
                f"At ε = {epsilon:g} Re-Attention has {gain:+.2f} points of {_SCORES[key]} over "
                f"plain attention; the larger deviation between seeds is {spread:.2f}.\n"
            )


def _accountings(budgets: Budgets, users: int) -> list[str]:
    """The same noise by privacy loss distributions and by Rényi divergences."""
    rows = []
    for (epsilon, batch, steps, noise), models in sorted(budgets.items()):
        found = renyi_epsilon(noise, batch / users, steps, 1 / users)
        sizes = f"{batch:,}", str(steps), f"{noise:.3f}"
        rows.append((f"{epsilon:g}", ", ".join(models), *sizes, found))
    text = (
        "Batches are true Poisson samples, and ε is by privacy loss distributions of the whole "
        "run, of which noisy counts of items take a part. The paper cites Rényi accounting of "
        "subsampled batches, and does not say how it draws them. The last column is what Rényi "
        "accounting says of the steps' noise, so it is the ε that would be printed in that way for "
        "these runs."
    )
    headers = ("ε", "models", "batch", "steps", "σ", "ε by Rényi accounting, steps alone")
    return [_section("Noise and accounting", headers, rows, text)]


def renyi_epsilon(noise_multiplier: float, probability: float, steps: int, delta: float) -> str:
    """ε of Poisson-sampled Gaussian steps by Rényi divergences, with two decimals."""
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    event = dp_accounting.PoissonSampledDpEvent(probability, gaussian)
    accountant = rdp.RdpAccountant()
    accountant.compose(event, steps)
    return f"{accountant.get_epsilon(delta):.2f}"


def _grids(lines: Lines) -> list[str]:
    """The validation scores among which settings were chosen."""
    rows = [
        (
            point["model"],
            f"{point['batch_size']:,}",
            f"{point['learning_rate']:g}",
            f"{result['ndcg']:.2f}",
            f"{result['hit']:.2f}",
            f"{result['seconds']:,}",
        )
        for point, result in ((e["point"], e["result"]) for e in of(lines, held_out="validation"))
    ]
    headers = ("model", "batch", "learning rate", "NDCG@10 in %", "HIT@10 in %", "seconds")
    text = (
        "One seed. Seconds are of training. Names say what differs from the settings above; with "
        "`all_items` no item is left out."
    )
    return [_section("The grid (validation items)", headers, rows, text)]


def _spread(scores: Sequence[float]) -> str:
    mean = f"{statistics.fmean(scores):.2f}"
    return f"{mean} ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else mean


def _section(
    title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], text: str = ""
) -> str:
    if not rows:
        return f"## {title}\n\nNo run has finished yet.\n"
    table = "\n".join(f"| {' | '.join(row)} |" for row in (headers, ["---"] * len(headers), *rows))
    return "\n\n".join([f"## {title}", *([text] if text else []), table]) + "\n"
