"""One run on interactions: users, privately counted items, a model, its scores and statement."""

import dataclasses
import functools
from collections.abc import Callable

import keras
import ml_collections

from pipelines.exports import require_free, require_private
from pipelines.methods import NON_PRIVATE
from pipelines.movielens.exporting import write_export
from pipelines.movielens.interactions import load
from pipelines.movielens.ranking import popularity_scores, scores
from pipelines.movielens.users import (
    Users,
    check_items,
    filtered,
    item_set,
    require_filter,
    users_of,
)
from pipelines.runs import Run
from pipelines.sequences.plans import noisy_frequencies, require_used
from pipelines.sequences.train import Trained, check, train

_USER = (
    "An example is one user: all interactions of a user in the file, cut to the last {} before the "
    "held-out one, so the example that is protected below is a user. Scores are of items held out "
    "of the same users: no epsilon covers them, nor how many users there are. Which items there "
    "are, and how they are numbered, counts as public."
)
_NONE = "No privacy: this run was trained without noise."


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a run.

    Attributes:
        ndcg: NDCG@10 in percent, over all users' held-out items.
        hit: HIT@10 in percent.
        ndcg_unseen: NDCG@10 in percent among the items that a user has not had before.
        hit_unseen: HIT@10 likewise.
        popularity: These four of the ranking by popularity, by their names.
        curve: Likewise, of the model by epochs done.
        steps: Steps taken.
        seconds: The time of training.
        noise_multiplier: σ of a step; None without privacy.
        epsilon: ε spent; None without privacy.
        statement: What is guaranteed, to whom.
        counts: What was left out of the data.
        model: The trained model.
        users: What it was trained on and judged by.
    """

    ndcg: float
    hit: float
    ndcg_unseen: float
    hit_unseen: float
    popularity: dict[str, float]
    curve: dict[int, dict[str, float]]
    steps: int
    seconds: float
    noise_multiplier: float | None
    epsilon: float | None
    statement: str
    counts: dict[str, int]
    model: keras.Model
    users: Users


def run(
    config: ml_collections.ConfigDict,
    kept: Run | None = None,
    export: str = "",
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Loads, trains and judges; a private run goes on where what is kept of it is.

    Args:
        config: Of the run.
        kept: What is kept of it.
        export: Where to write the model for use without this package; empty for nowhere.
        say: Is given what was left out of the data, before training.

    Raises:
        SequenceDataError: The data cannot be used.
        ValueError: A setting cannot be used.
    """
    _check(config, export)
    interactions, items = load(config.data), item_set(config.data)
    check_items(interactions, items, config.data)
    users, frequencies = users_of(interactions, items, config.data), None
    check(config, users.training)
    if config.data.filter_items:
        require = functools.partial(require_filter, config.data)
        frequencies = noisy_frequencies(config, users.training, kept, require)
        users, frequencies = filtered(users, frequencies, config.data)
    say(", ".join(f"{name} {number:,}" for name, number in users.counts.items()))
    trained = train(
        config,
        users.training,
        lambda model: scores(model, users),
        _protected(config),
        frequencies,
        kept,
    )
    if export:
        write_export(export, trained.model, users.items, items, _protected(config))
    return _result(config, trained, users)


def _check(config: ml_collections.ConfigDict, export: str) -> None:
    """Refuses what is wrong before anything is read, or spent."""
    private = config.privacy.method != "none"
    if export:
        require_private(config.privacy.method if private else NON_PRIVATE)
        require_free(export)
    wrong = {
        f"data.filter_items={config.data.filter_items}": config.data.filter_items,
        f"model.kind={config.model.kind!r}": config.model.kind == "re_attention",
    }
    if not private and any(wrong.values()):
        named = " and ".join(name for name, there in wrong.items() if there)
        raise ValueError(
            "Expected data.filter_items=0 and model.kind='vanilla', 'gru' or 'lstm' with "
            f"privacy.method='none', got {named}: noisy counts and noise in weights are private "
            "training's."
        )
    require_used(config, counted=bool(config.data.filter_items))


def _protected(config: ml_collections.ConfigDict) -> str:
    """Whom a private run's statement speaks of."""
    return _USER.format(config.data.length + 1)


def _result(config: ml_collections.ConfigDict, trained: Trained, users: Users) -> Result:
    last, plan = trained.curve[config.training.epochs], trained.plan
    spent = None if plan is None else plan.guaranteed(trained.steps)
    statement = _NONE
    if plan is not None:
        statement = f"{_protected(config)}\n{plan.statement(trained.steps)}"
    return Result(
        **last,
        popularity=popularity_scores(users),
        curve=trained.curve,
        steps=trained.steps,
        seconds=trained.seconds,
        noise_multiplier=None if plan is None else plan.noise_multiplier,
        epsilon=None if spent is None else spent.epsilon,
        statement=statement,
        counts=users.counts,
        model=trained.model,
        users=users,
    )
