"""`PrivateVocabulary`: the values that were released, and how vocabularies of periods join.

It holds nothing of the data but what was released with noise. O(values released).
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from dp_sparse.accounting import Release
from dp_sparse.core import PrivacyError, damage_told, read_arrays, whole_file, write_arrays
from dp_sparse.selection.vocabulary.threshold import VocabularyNoise

_FORMAT = "dp-sparse-vocabulary-1"


@dataclasses.dataclass(frozen=True)
class VocabularyDraw:
    """One draw of noise on the values of one set of examples; all of it is public.

    Attributes:
        noise: The noise, and what it costs.
        max_values: m, the most values for which one example voted.
        paid_by: The run of the plan that pays for it.
        draw_id: A random name: another draw on the same data has another one.
    """

    noise: VocabularyNoise
    max_values: int
    paid_by: str
    draw_id: str

    @property
    def threshold(self) -> int:
        """The whole number that the noisy counts of its values exceed."""
        return self.noise.threshold(self.max_values)


@dataclasses.dataclass(frozen=True, eq=False)
class PrivateVocabulary:
    """The values that many examples have, for each column.

    `private_vocabulary` makes it. `vocabulary["city"]` is a list for
    `keras.layers.StringLookup(vocabulary=...)`, or, of integers, for `IntegerLookup`.

    Attributes:
        values: Texts or integers of each column by name: those of the first draw in the order of
            their noisy counts, the largest first, then what each later draw added.
        noisy_counts: int64 `[values]` of each column, read-only: about how many examples voted for
            the value in the draw that added it.
        draws: The draws, the oldest first.

    Raises:
        ValueError: Columns, values and counts do not fit together, or a value is there twice.

    Examples:
        >>> import dp_sparse, numpy as np, tempfile
        >>> sampling = dp_sparse.StreamSampling(num_examples=4000, batch_size=400)
        >>> budget = dp_sparse.PrivacyBudget(epsilon=2.0, delta=1e-4)
        >>> plan = dp_sparse.reserve_vocabulary(dp_sparse.PrivacyPlan(budget, sampling), share=0.1)
        >>> monday, tuesday = (  # each day has a plan of its own
        ...     dp_sparse.private_vocabulary(
        ...         {"city": np.full(4000, city)}, "city", plan.calibrate(), progress=False
        ...     )
        ...     for city in ("Rome", "Oslo")
        ... )
        >>> monday.extended(tuesday)["city"]  # Rome keeps its place
        ['Rome', 'Oslo']
        >>> folder = tempfile.TemporaryDirectory()
        >>> monday.save(f"{folder.name}/cities.npz")
        >>> dp_sparse.PrivateVocabulary.load(f"{folder.name}/cities.npz")["city"]
        ['Rome']

    ### Formal Guarantees
    Each draw is a Gaussian mechanism and a (0, δ)-private one on the examples that it counted
    (`threshold`), for which the plan of `paid_by` pays. Everything here is post-processing of what
    was drawn.
    """

    values: Mapping[str, tuple[str, ...] | tuple[int, ...]]
    noisy_counts: Mapping[str, np.ndarray]
    draws: tuple[VocabularyDraw, ...]

    def __post_init__(self) -> None:
        if list(self.values) != list(self.noisy_counts) or not self.draws:
            raise ValueError(
                f"Expected counts of the columns {list(self.values)} and a draw, got counts of "
                f"{list(self.noisy_counts)} and {len(self.draws)} draws."
            )
        try:
            counts = {name: np.array(each, np.int64) for name, each in self.noisy_counts.items()}
        except OverflowError as error:
            raise ValueError("Expected counts of 64 bits, got a larger one.") from error
        for name, values in self.values.items():
            _check_column(name, values, counts[name])
            counts[name].flags.writeable = False
        object.__setattr__(self, "values", {n: tuple(v) for n, v in self.values.items()})
        object.__setattr__(self, "noisy_counts", counts)

    def __getitem__(self, column: str) -> list[str] | list[int]:
        """The vocabulary of a column, as Keras' lookup layers take it.

        Raises:
            ValueError: There is no such column.
        """
        if column not in self.values:
            raise ValueError(f"Expected a column among {list(self.values)}, got {column!r}.")
        return list(self.values[column])  # type: ignore[return-value]

    @property
    def release(self) -> Release:
        """The release of the plan that pays for the newest draw."""
        return self.draws[-1].noise.release

    def extended(self, newer: "PrivateVocabulary") -> "PrivateVocabulary":
        """This vocabulary, and behind it the values that a newer one adds: old ids stay.

        Post-processing, at no cost: the plans of both have paid. An embedding table must have room
        for the ids of later values.

        Args:
            newer: Of the same columns, drawn from other examples, such as those of the next day.

        Raises:
            ValueError: Other columns, text where there were integers, or a draw is in both.
            PrivacyError: One plan paid for a draw in each.
        """
        self._refuse_same_draws(newer)
        self._refuse_other_columns(newer)
        values: dict[str, Any] = {}
        counts = {}
        for name, own in self.values.items():
            known = {*own}
            added = [at for at, value in enumerate(newer.values[name]) if value not in known]
            values[name] = (*own, *(newer.values[name][at] for at in added))
            fresh = newer.noisy_counts[name][np.array(added, np.int64)]
            counts[name] = np.concatenate([self.noisy_counts[name], fresh])
        return PrivateVocabulary(values, counts, (*self.draws, *newer.draws))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one file, whole or not at all: drawing again would spend again."""
        with whole_file(path) as file:
            write_arrays(file, _FORMAT, self.get_config(), {})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PrivateVocabulary":
        """The vocabulary that `save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is of another kind, or damaged.
        """
        told = (
            f"Expected {path} to be a vocabulary that PrivateVocabulary.save wrote, got another or "
            "a damaged file ({}).\nRestore it: drawing again spends again."
        )
        with damage_told(told):
            return cls.from_config(read_arrays(path, _FORMAT)[0])

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description from which `from_config` makes an equal vocabulary."""
        return {
            "values": {name: list(values) for name, values in self.values.items()},
            "noisy_counts": {name: each.tolist() for name, each in self.noisy_counts.items()},
            "draws": [dataclasses.asdict(draw) for draw in self.draws],
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "PrivateVocabulary":
        """The vocabulary that `get_config` described.

        Raises:
            ValueError: As the class.
        """
        draws = [{**d, "noise": VocabularyNoise(**d["noise"])} for d in config["draws"]]
        return cls(
            config["values"],
            config["noisy_counts"],
            tuple(VocabularyDraw(**draw) for draw in draws),
        )

    def _refuse_same_draws(self, newer: Any) -> None:
        if not isinstance(newer, PrivateVocabulary):
            raise ValueError(f"Expected newer to be a PrivateVocabulary, got newer={newer!r}.")
        own = {draw.draw_id for draw in self.draws}
        if own & {draw.draw_id for draw in newer.draws}:
            raise ValueError(
                "Expected a vocabulary of other examples, got newer= with a draw that this one "
                "has: pass what private_vocabulary returned for the new period, under its own plan."
            )
        payers = {draw.paid_by for draw in self.draws}
        if payers & {draw.paid_by for draw in newer.draws}:
            raise PrivacyError(
                "Expected vocabularies of which each has a plan of its own, got two draws under "
                "one plan, which pays for one.\nUse the first of them alone, and publish no other."
            )

    def _refuse_other_columns(self, newer: "PrivateVocabulary") -> None:
        if set(self.values) != set(newer.values):
            raise ValueError(
                f"Expected newer to have the columns {sorted(self.values)}, got "
                f"{sorted(newer.values)}."
            )
        for name, own in self.values.items():
            kinds = {type(value) for value in (*own[:1], *newer.values[name][:1])}
            if len(kinds) > 1:
                raise ValueError(
                    f"Expected text in both vocabularies of column {name!r}, or integers in both, "
                    "got one of each: cast the column alike every day."
                )


def _check_column(name: str, values: Any, counts: np.ndarray) -> None:
    """Raises ValueError unless these are distinct values of one kind, each with a count."""
    kinds = {type(value) for value in values}
    if not (kinds <= {str} or kinds <= {int}) or len(set(values)) != len(values):
        raise ValueError(f"Expected distinct texts, or distinct integers, of column {name!r}.")
    if counts.shape != (len(values),):
        raise ValueError(
            f"Expected a count for each of {len(values)} values of column {name!r}, got shape "
            f"{counts.shape}."
        )
