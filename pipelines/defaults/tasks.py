"""The tasks of the study: clicks, made-up clicks, the first page, ranking, retrieval, next item,
images.

Every task has examples to train on, others to choose settings by, and others to judge by. Items of
a user are in the order of time: the last one judges, the one before it chooses.
"""

import dataclasses
import functools
import gzip
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import scipy.special

import dp_sparse
from models.classifiers import mlp
from models.pctr import pctr
from pipelines.criteo.generate import generate
from pipelines.criteo.methods import table_names
from pipelines.criteo.records import PreparedData, prepared_in
from pipelines.criteo.schema import TABLE3_VOCABULARIES, examples_from_records
from pipelines.scores import exact_auc, mean_prediction

Tables = Mapping[str, int | dp_sparse.TopKTable]

_MADE_UP_ROWS = 120_000
FIRST_PAGE_ROWS = 2**14  # of each table of docs/first_model.md
_FIRST_USERS, _FIRST_ITEMS, _FIRST_ROWS = 2_000, 500, 120_000
_RANKING_USERS, _RANKING_ITEMS = 943, 1_682  # the shape of MovieLens-100k
_NEGATIVES = 20  # items of no interaction beside each one that judges
_HISTORY = 10
_LAST = 2  # items of a user that do not train
_ITEMS, _ITEM_EXAMPLES = 1_000, 300_000  # of retrieval and next item
_SEED = 0  # of what is drawn to make examples


@dataclasses.dataclass(frozen=True)
class Examples:
    """Inputs by name and labels, each `[examples, ...]`."""

    x: dict[str, np.ndarray]
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.y)


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
        name: Its name in tables.
        metric: The name of the score; more is better.
        training: Examples to train on.
        validation: Examples to choose settings by.
        test: Examples to judge by.
        model: Makes the model, with fresh weights.
        loss: As `compile` takes it.
        score: The metric of outputs, given the labels.
        constant: The score on `test` of the best prediction that does not see x.
        tables: The tables with their sizes, by the names of their layers.
        ids: The ids of each table, of the inputs.
        as_frequent: Whether labels are as frequent in `test` as in training, so that log loss and
            mean prediction can be compared.
        batch_sizes: Expected batch sizes to choose from.
        passes: Passes over the training examples.
    """

    name: str
    metric: str
    training: Examples
    validation: Examples
    test: Examples
    model: Callable[[], keras.Model]
    loss: keras.losses.Loss
    score: Callable[[np.ndarray, np.ndarray], float]
    constant: float
    tables: Tables
    ids: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
    batch_sizes: tuple[int, ...]
    passes: float
    as_frequent: bool = True

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(getattr(table, "num_rows", table) for table in self.tables.values())

    @property
    def binary(self) -> bool:
        """Whether labels are 0 or 1, so that outputs are of the probability of 1."""
        return isinstance(self.loss, keras.losses.BinaryCrossentropy)

    @property
    def rate(self) -> float:
        """The part of `test` that is labelled 1."""
        return float(np.mean(self.test.y == 1))

    @property
    def constant_log_loss(self) -> float:
        """The log loss on `test` of the best prediction that does not see x."""
        shares = np.bincount(self.test.y.astype(int)) / len(self.test)
        return float(-np.sum(shares[shares > 0] * np.log(shares[shares > 0])))

    def log_loss(self, outputs: np.ndarray, labels: np.ndarray) -> float:
        """The mean of the loss over examples."""
        return float(self.loss(labels.reshape(-1, 1), outputs))

    def mean_prediction(self, outputs: np.ndarray) -> float | None:
        """The mean probability of a label 1; None where labels are not of two kinds."""
        if not self.binary:
            return None
        return mean_prediction(outputs) if self.loss.from_logits else float(np.mean(outputs))


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where data is.

    Attributes:
        criteo: A file of Criteo rows.
        movielens: A file with `user item` in each line, in the order of time for each user.
        mnist: An .npz file of images.
        directory: Where prepared data goes.
    """

    criteo: Path
    movielens: Path
    mnist: Path
    directory: Path


def load(name: str, sources: Sources) -> Task:
    """The task of a name, one of `NAMES`."""
    return _LOADERS[name](sources)


def clicks(sources: Sources) -> Task:
    """pCTR on Criteo rows: the last tenth judges, the tenth before it chooses."""
    sizes = TABLE3_VOCABULARIES
    data = prepared_in(sources.directory, sources.criteo, sizes)
    return _clicks("clicks", data, passes=3.0)


def made_up_clicks(sources: Sources) -> Task:
    """pCTR on generated rows, of which the tables explain most."""
    path = sources.directory / f"generated_{_MADE_UP_ROWS}.tsv"
    if not path.exists():
        generate(_MADE_UP_ROWS, path, _SEED, progress=False)
    data = prepared_in(sources.directory, path, TABLE3_VOCABULARIES)
    return _clicks("made-up clicks", data, passes=2.0)


def _clicks(name: str, data: PreparedData, passes: float) -> Task:
    parts = [Examples(*examples_from_records(part)) for part in _in_time(data.records())]
    names = table_names(len(data.vocabularies))
    return Task(
        name,
        "AUC",
        *parts,
        model=lambda: pctr(data.vocabularies),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        score=lambda outputs, labels: exact_auc(labels, outputs[:, 0]),
        constant=0.5,
        tables=dict(zip(names, data.vocabularies, strict=True)),
        ids=lambda x: {each: x["categories"][:, i] for i, each in enumerate(names)},
        batch_sizes=(1024, 4096),
        passes=passes,
    )


def _in_time(records: np.ndarray) -> list[np.ndarray]:
    ends = [0, *(round(len(records) * part) for part in (0.8, 0.9)), len(records)]
    return [np.array(records[a:b]) for a, b in itertools.pairwise(ends)]


def first_page(sources: Sources) -> Task:
    """The model of docs/first_model.md on `planted_clicks`: two hashed columns, one layer."""
    del sources
    columns, labels = planted_clicks(_FIRST_ROWS, _SEED)
    ends = [0, *(round(_FIRST_ROWS * part) for part in (0.8, 0.9)), _FIRST_ROWS]
    hashed = {name: hashed_rows(values) for name, values in columns.items()}
    parts = [
        Examples({name: values[a:b] for name, values in hashed.items()}, labels[a:b])
        for a, b in itertools.pairwise(ends)
    ]
    return Task(
        "first page",
        "AUC",
        *parts,
        model=first_page_model,
        loss=keras.losses.BinaryCrossentropy(),
        score=lambda outputs, labels: exact_auc(labels, outputs[:, 0]),
        constant=0.5,
        tables=dict.fromkeys(("users", "items"), FIRST_PAGE_ROWS),
        ids=lambda x: {"users": x["user"], "items": x["item"]},
        batch_sizes=(1024,),
        passes=5.0,
    )


def planted_clicks(rows: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Columns `user` and `item` of text, and whether it was clicked: a third of the rows are.

    The log odds are those of the user, those of the item, and a product of two tastes.
    """
    rng = np.random.default_rng(seed)
    users = rng.integers(0, _FIRST_USERS, rows)
    popular = 1 / (1 + np.arange(_FIRST_ITEMS)) ** 0.8
    items = rng.choice(_FIRST_ITEMS, rows, p=popular / popular.sum())
    of_users, of_items = rng.normal(0, 0.8, _FIRST_USERS), rng.normal(0, 1.0, _FIRST_ITEMS)
    tastes = rng.normal(0, 0.5, (_FIRST_USERS, 4)), rng.normal(0, 0.5, (_FIRST_ITEMS, 4))
    odds = of_users[users] + of_items[items] + (tastes[0][users] * tastes[1][items]).sum(axis=1)
    labels = (rng.random(rows) < scipy.special.expit(odds - 0.75)).astype(np.float32)
    columns = {
        "user": np.char.add("u", users.astype(str)),
        "item": np.char.add("i", items.astype(str)),
    }
    return columns, labels


def hashed_rows(values: np.ndarray) -> np.ndarray:
    """As the page's Hashing layer has them, int32 `[examples]`."""
    names, places = np.unique(values, return_inverse=True)
    hashed = keras.layers.Hashing(FIRST_PAGE_ROWS)(names.astype(object))
    return np.asarray(hashed, np.int32)[places]


def first_page_model() -> keras.Model:
    """The page's model behind its Hashing layers: two ids, int `[batch]`, to a probability."""
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in ("user", "item")}
    looked_up = [
        keras.layers.Embedding(FIRST_PAGE_ROWS, 8, name=f"{name}s")(each)
        for name, each in inputs.items()
    ]
    values = keras.layers.Concatenate()(looked_up)
    return keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(values))


def ranking(sources: Sources) -> Task:
    """Whether a user took an item, or it was drawn at random: the shape of MovieLens-100k."""
    pairs = _interactions(sources.movielens)
    pairs = pairs[(pairs <= (_RANKING_USERS, _RANKING_ITEMS)).all(axis=1)] - 1
    rng = np.random.default_rng(_SEED)
    before = _left_after(pairs[:, 0])
    parts = [
        _with_negatives(pairs[chosen], negatives, rng)
        for chosen, negatives in (
            (before >= _LAST, 1),
            (before == 1, _NEGATIVES),
            (before == 0, _NEGATIVES),
        )
    ]
    return Task(
        "ranking",
        "AUC",
        *parts,
        model=lambda: ranking_model(_RANKING_USERS, _RANKING_ITEMS),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        score=lambda outputs, labels: exact_auc(labels, outputs[:, 0]),
        constant=0.5,
        tables={"users": _RANKING_USERS, "items": _RANKING_ITEMS},
        ids=lambda x: {"users": x["user"], "items": x["item"]},
        batch_sizes=(1024, 4096),
        passes=10.0,
        as_frequent=False,
    )


def ranking_model(users: int, items: int, width: int = 16) -> keras.Model:
    """Two tables and two layers: {"user": int `[batch]`, "item": int `[batch]`} to a logit."""
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in ("user", "item")}
    of_user = keras.layers.Embedding(users, width, name="users")(inputs["user"])
    of_item = keras.layers.Embedding(items, width, name="items")(inputs["item"])
    values = keras.layers.Concatenate()([of_user, of_item])
    values = keras.layers.Dense(64, activation="relu")(values)
    return keras.Model(inputs, keras.layers.Dense(1)(values))


def _with_negatives(pairs: np.ndarray, negatives: int, rng: np.random.Generator) -> Examples:
    users = np.repeat(pairs[:, 0], negatives + 1)
    items = np.concatenate(
        [pairs[:, 1:], rng.integers(0, _RANKING_ITEMS, (len(pairs), negatives))], axis=1
    )
    labels = np.zeros(items.shape, np.float32)
    labels[:, 0] = 1
    return Examples({"user": users, "item": items.ravel().astype(np.int32)}, labels.ravel())


def retrieval(sources: Sources) -> Task:
    """Which item a user takes: a table of users, a softmax over all items."""
    pairs = _with_items_below(_ITEMS, sources.movielens)
    users = int(pairs[:, 0].max()) + 1
    before = _left_after(pairs[:, 0])
    training = np.flatnonzero(before >= _LAST)
    rng = np.random.default_rng(_SEED)
    training = rng.choice(training, _ITEM_EXAMPLES, replace=False)
    parts = [
        Examples({"user": pairs[chosen, 0]}, pairs[chosen, 1])
        for chosen in (training, before == 1, before == 0)
    ]
    return _of_items(
        "retrieval",
        parts,
        model=lambda: retrieval_model(users, _ITEMS),
        tables={"users": users},
        ids=lambda x: {"users": x["user"]},
    )


def retrieval_model(users: int, items: int, width: int = 32) -> keras.Model:
    """{"user": int `[batch]`} to logits `[batch, items]`."""
    user = keras.Input((), dtype="int32", name="user")
    values = keras.layers.Embedding(users, width, name="users")(user)
    return keras.Model({"user": user}, keras.layers.Dense(items)(values))


def next_item(sources: Sources) -> Task:
    """Which item follows the last ten: their mean embedding, a softmax over all items."""
    pairs = _with_items_below(_ITEMS, sources.movielens)
    before, at = _left_after(pairs[:, 0]), _left_after(pairs[::-1, 0])[::-1]
    whole = at >= _HISTORY
    training = np.flatnonzero(whole & (before >= _LAST))
    rng = np.random.default_rng(_SEED)
    training = rng.choice(training, _ITEM_EXAMPLES, replace=False)
    chosen = (
        training,
        np.flatnonzero(whole & (before == 1)),
        np.flatnonzero(whole & (before == 0)),
    )
    offsets = np.arange(-_HISTORY, 0)
    parts = [
        Examples({"history": pairs[index[:, np.newaxis] + offsets, 1]}, pairs[index, 1])
        for index in chosen
    ]
    return _of_items(
        "next item",
        parts,
        model=lambda: next_item_model(_ITEMS),
        tables={"items": dp_sparse.TopKTable(_ITEMS, max_lookups=_HISTORY)},
        ids=lambda x: {"items": x["history"]},
    )


def next_item_model(items: int, width: int = 32) -> keras.Model:
    """{"history": int `[batch, 10]`} to logits `[batch, items]`."""
    history = keras.Input((_HISTORY,), dtype="int32", name="history")
    values = keras.layers.Embedding(items, width, name="items")(history)
    values = keras.layers.GlobalAveragePooling1D()(values)
    values = keras.layers.Dense(width, activation="relu")(values)
    return keras.Model({"history": history}, keras.layers.Dense(items)(values))


def _of_items(name: str, parts: list[Examples], **own: Any) -> Task:
    popular = np.bincount(parts[0].y, minlength=_ITEMS)
    return Task(
        name,
        "item AUC",
        *parts,
        **own,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        score=item_auc,
        constant=item_auc(np.tile(popular, (len(parts[2]), 1)), parts[2].y),
        batch_sizes=(1024, 4096),
        passes=5.0,
    )


def item_auc(outputs: np.ndarray, labels: np.ndarray) -> float:
    """The mean part of the other items with an output below the label's; ties count half."""
    own = outputs[np.arange(len(labels)), labels][:, np.newaxis]
    below, ties = (outputs < own).mean(axis=1), (outputs == own).mean(axis=1)
    others = outputs.shape[1] / (outputs.shape[1] - 1)
    return float(np.mean((below + (ties - 1 / outputs.shape[1]) / 2) * others))


def images(sources: Sources) -> Task:
    """MNIST by a perceptron: the last tenth of the training split chooses."""
    with np.load(sources.mnist) as arrays:
        split = {name: arrays[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    boundary = round(len(split["y_train"]) * 0.9)
    training, test = (
        Examples(
            {"image": split[f"x_{part}"].astype(np.float32) / 255},
            split[f"y_{part}"].astype(np.int32),
        )
        for part in ("train", "test")
    )
    first, last = (
        Examples({"image": training.x["image"][part]}, training.y[part])
        for part in (slice(None, boundary), slice(boundary, None))
    )
    return Task(
        "images",
        "accuracy",
        first,
        last,
        test,
        model=digits_model,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        score=lambda outputs, labels: float(np.mean(outputs.argmax(axis=1) == labels)),
        constant=float(np.bincount(test.y).max() / len(test)),
        tables={},
        ids=lambda x: {},
        batch_sizes=(512, 2048),
        passes=15.0,
    )


def digits_model() -> keras.Model:
    """{"image": float `[batch, 28, 28]`} to logits `[batch, 10]`."""
    image = keras.Input((28, 28), name="image")
    return keras.Model({"image": image}, mlp(activation="relu")(image))


@functools.cache
def _interactions(path: Path) -> np.ndarray:
    """`[interactions, 2]` of int32: user and item, numbered from 1."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        return np.array(file.read().split(), np.int32).reshape(-1, 2)


def _with_items_below(items: int, path: Path) -> np.ndarray:
    """The interactions with the first items, numbered from 0."""
    pairs = _interactions(path) - 1
    return pairs[pairs[:, 1] < items]


def _left_after(users: np.ndarray) -> np.ndarray:
    """How many interactions of the same user follow each one; users are in one piece each."""
    ends = np.flatnonzero(np.append(users[1:] != users[:-1], True))
    return ends[np.searchsorted(ends, np.arange(len(users)))] - np.arange(len(users))


_LOADERS: dict[str, Callable[[Sources], Task]] = {
    "clicks": clicks,
    "made_up_clicks": made_up_clicks,
    "first_page": first_page,
    "ranking": ranking,
    "retrieval": retrieval,
    "next_item": next_item,
    "images": images,
}
NAMES = tuple(_LOADERS)
