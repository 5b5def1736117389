"""Users as examples: what trains, what is held out of each, and how many were left out.

Everything here is done to each user alone: adding or removing a user changes no other example. The
item set is declared: the numbers from 1 to `data.num_items`, or the lines of a public file. Items
outside of it are taken out of a user's sequence. To drop rare items is to look at other users; it
is done by noisy counts (`filtered`).
"""

import dataclasses
from pathlib import Path

import ml_collections
import numpy as np

import dp_sparse
from pipelines.movielens.interactions import Interactions, SequenceDataError
from pipelines.sequences.examples import SequenceExamples, last_of, training_examples

_HELD_OUT = {"test": 1, "validation": 2}  # the place of the item that judges, from a user's end


@dataclasses.dataclass(frozen=True)
class Users:
    """Examples, and what of each user judges.

    Attributes:
        training: One example a user, without the items that judge.
        histories: int32 `[users, length]`: the items before the one that judges.
        labels: int32 `[users]`: that item; 0 if it was filtered out, which is never found.
        earlier: All items of each user before that one, int32, however many.
        items: int64 `[num_items]`: the item of each number from 1 on.
        counts: What was left out, for anyone who runs the job.
    """

    training: SequenceExamples
    histories: np.ndarray
    labels: np.ndarray
    earlier: list[np.ndarray]
    items: np.ndarray
    counts: dict[str, int]


def item_set(config: ml_collections.ConfigDict) -> np.ndarray:
    """The declared items, int64, unique.

    Raises:
        SequenceDataError: Neither or both of `num_items` and `item_list` are given, the first is
            negative, or the second is not a list of different integers.
    """
    if bool(config.num_items) == bool(config.item_list) or config.num_items < 0:
        raise SequenceDataError(
            f"Expected either data.num_items or data.item_list, a public list, got data.num_items="
            f"{config.num_items!r} and data.item_list={config.item_list!r}."
        )
    if not config.item_list:
        return np.arange(1, config.num_items + 1)
    try:
        items = np.array(Path(config.item_list).read_text().split(), np.int64)
    except (OSError, ValueError) as error:
        raise SequenceDataError(
            f"Expected an integer in each line of data.item_list={config.item_list}, got {error}."
        ) from error
    if len(np.unique(items)) != len(items) or not len(items):
        raise SequenceDataError(
            f"Expected different items in data.item_list={config.item_list}, got {len(items)} of "
            f"which {len(np.unique(items))} are different."
        )
    return items


def check_items(
    interactions: Interactions, items: np.ndarray, config: ml_collections.ConfigDict
) -> None:
    """Checks that a number of items is that of the file; a list may leave items out.

    Raises:
        SequenceDataError: There are other items than those from 1 to `num_items`, which are left
            out and counted with `quarantine`.
    """
    other = interactions.items[(interactions.items < 1) | (interactions.items > len(items))]
    if config.num_items and len(other) and not config.quarantine:
        raise SequenceDataError(
            f"Expected items from 1 to data.num_items={config.num_items}, got {len(other):,} of "
            f"{len(interactions.items):,} interactions with others, such as item {other[0]}: set "
            "--config.data.num_items, or --config.data.item_list=FILE, a public list, or leave "
            "them out with --config.data.quarantine."
        )


def users_of(
    interactions: Interactions, items: np.ndarray, config: ml_collections.ConfigDict
) -> Users:
    """Examples of the users with enough interactions.

    Args:
        interactions: Of all users.
        items: The item set.
        config: `data`: `min_interactions`, `length`, `predicted`, `held_out`.

    Raises:
        SequenceDataError: `held_out` is unknown, or fewer than two users are left.
    """
    if config.held_out not in _HELD_OUT:
        raise SequenceDataError(
            f"Expected data.held_out to be one of {tuple(_HELD_OUT)}, got {config.held_out!r}."
        )
    numbered = [_numbered(each, items) for each in interactions.sequences()]
    least = max(config.min_interactions, 3)  # two to learn from when validating, one to judge
    kept = [each for each in numbered if len(each) >= least]
    if len(kept) < 2:
        outside = len(interactions.items) - sum(map(len, numbered))
        raise SequenceDataError(
            f"Expected at least 2 users with {least} interactions, got {len(kept)} of "
            f"{len(numbered)}: one user cannot be hidden among others. Of "
            f"{len(interactions.items):,} interactions {outside:,} are with items outside of the "
            "item set, which data.num_items or data.item_list declares."
        )
    place = _HELD_OUT[config.held_out]
    before = [each[:-place] for each in kept]
    labels = np.array([each[-place] for each in kept], np.int32)
    training = training_examples(before, config.length, config.predicted, len(items))
    counts = {
        "users": len(numbered),
        "users_dropped": len(numbered) - len(kept),
        "interactions_outside_the_item_set": len(interactions.items) - sum(map(len, numbered)),
        **_told(before, labels, training),
        "empty_lines": interactions.empty_lines,
        "bad_lines": interactions.bad_lines,
        "unsorted_users": interactions.unsorted_users,
    }
    return Users(training, last_of(before, config.length), labels, before, items, counts)


def require_filter(config: ml_collections.ConfigDict, source: dp_sparse.GaussianTopK) -> None:
    """Checks, before anything is counted, that noisy counts can be below `filter_items`.

    They are at least the deviation of their noise.

    Raises:
        SequenceDataError: None can.
    """
    deviation = max(1.0, source.scale_of(config.length))
    if config.filter_items <= deviation:
        raise SequenceDataError(
            f"Expected data.filter_items > {deviation:.1f}, the deviation of the noise of a count, "
            f"got {config.filter_items}, which no item would be below: raise it, or "
            "privacy.frequency_share, or keep all items by data.filter_items=0."
        )


def filtered(
    users: Users,
    frequencies: dp_sparse.RowFrequencies,
    config: ml_collections.ConfigDict,
) -> tuple[Users, dp_sparse.RowFrequencies]:
    """The users without rare items: those with a noisy count below `filter_items`.

    A held-out item that was filtered out still judges, and is never found.

    Returns:
        The users, and the frequencies of the items that are left, which cost nothing more.

    Raises:
        SequenceDataError: No item is left.
    """
    counts = frequencies.values[1:] * len(users.training)
    kept = np.flatnonzero(counts >= config.filter_items)
    if not len(kept):
        raise SequenceDataError(
            f"Expected items with a noisy count of {config.filter_items} or more, got none: lower "
            "data.filter_items, or raise privacy.frequency_share. These counts are spent: another "
            "run on the same data adds its own epsilon."
        )
    number = np.zeros(len(users.items) + 1, np.int32)
    number[kept + 1] = np.arange(1, len(kept) + 1)
    left = [tokens[tokens > 0] for tokens in (number[each] for each in users.earlier)]
    training = training_examples(left, config.length, config.predicted, len(kept))
    smaller = dp_sparse.RowFrequencies(
        frequencies.table,
        frequencies.values[np.append(0, kept + 1)],
        frequencies.source,
        frequencies.lookups,
    )
    histories = last_of(left, config.length)
    labels = number[users.labels]
    told = users.counts | _told(left, labels, training)
    told["items_filtered_out"] = len(users.items) - len(kept)
    told["held_out_items_filtered_out"] = int(np.count_nonzero(labels == 0))
    return Users(training, histories, labels, left, users.items[kept], told), smaller


def _numbered(items_of_user: np.ndarray, items: np.ndarray) -> np.ndarray:
    """The numbers from 1 on of a user's items that are in the set."""
    order = np.argsort(items)
    places = np.minimum(np.searchsorted(items, items_of_user, sorter=order), len(items) - 1)
    known = items[order[places]] == items_of_user
    return (order[places] + 1)[known].astype(np.int32)


def _told(
    before: list[np.ndarray], labels: np.ndarray, training: SequenceExamples
) -> dict[str, int]:
    """How many users were cut to the length, and how many held-out items no example has."""
    cut = sum(len(each) > training.x.shape[1] + 1 for each in before)
    never = _never_trained(labels[labels > 0], training)
    return {"users_cut": cut, "held_out_items_never_trained": never}


def _never_trained(labels: np.ndarray, training: SequenceExamples) -> int:
    """Different held-out items that no example has; they are ranked as all others."""
    return len(np.setdiff1d(labels, np.concatenate([training.x.ravel(), training.y.ravel()])))
