"""`reserve_vocabulary` and `private_vocabulary`: a plan pays for one vocabulary, drawn once.

A vocabulary that `adapt` or `unique` takes from private data tells who is in it. This one has the
values that many examples have, at a small share of the plan's ε and δ. Its guarantee is derived in
`threshold`. O(values of all examples) time, in one pass.
"""

import dataclasses
import secrets
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dp_sparse.accounting import PrivacyPlan, has_folder, release_noise
from dp_sparse.core import PrivacyError, validate
from dp_sparse.selection.top_k.histograms import noisy_counts
from dp_sparse.selection.top_k.noise_sources import secret_generator
from dp_sparse.selection.vocabulary.counting import ValueCounts, count_values
from dp_sparse.selection.vocabulary.threshold import VocabularyNoise, noise_paid_by
from dp_sparse.selection.vocabulary.vocabulary import PrivateVocabulary, VocabularyDraw

_RESERVE = "plan = dp_sparse.reserve_vocabulary(plan, share=0.01).calibrate()"


class Asked(NamedTuple):
    """What a vocabulary was drawn for."""

    columns: tuple[str, ...]
    max_values: int
    padding_value: int | None

    def described(self) -> dict[str, Any]:
        """The same for JSON."""
        return {**self._asdict(), "columns": list(self.columns)}


class _Drawn(NamedTuple):
    vocabulary: PrivateVocabulary
    asked: Asked


_DRAWN: dict[str, _Drawn] = {}  # by the run of the plan that pays, in this process
_ONE_DRAWS = threading.Lock()


def reserve_vocabulary(plan: PrivacyPlan, share: float = 0.01) -> PrivacyPlan:
    """A plan that also pays for one `private_vocabulary`; call its `calibrate()` next.

    The vocabulary is composed with training in one privacy loss. It takes some seconds.

    Args:
        plan: A plan that does not pay for one, whether its noise is known or not.
        share: The part of ε that training leaves to the vocabulary, and the part of δ for a value
            that one example alone has; in (0, 1). A larger share means less noise and a lower
            threshold.

    Raises:
        ValueError: The plan pays for one already, `share` is out of its range, batches beyond the
            capacity take all of δ, or no noise meets its budget.

    Examples:
        >>> import dp_sparse
        >>> sampling = dp_sparse.StreamSampling(num_examples=8000, batch_size=400)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-5), sampling)
        >>> plan = dp_sparse.reserve_vocabulary(plan, share=0.1)
        >>> print(plan.releases[0].name)
        private vocabulary (Gaussian noise multiplier ...; probability of a value that one example
        alone has: 1e-06)

    ### Formal Guarantees
    Those of the plan, whose `calibrate` counts the release with all steps.
    """
    if not isinstance(plan, PrivacyPlan):
        raise ValueError(f"Expected a PrivacyPlan, got plan={plan!r}.")
    if noise_paid_by(plan.releases) is not None:
        raise ValueError(
            "Expected a plan without a private vocabulary, got one that pays for it: one "
            "vocabulary has all columns. Call calibrate(), then private_vocabulary."
        )
    share = validate.probability("share", share)
    delta = share * plan.for_all_steps.delta
    noise = release_noise(plan, lambda sigma: VocabularyNoise(sigma, delta).event, share)
    releases = (*plan.releases, VocabularyNoise(noise, delta).release)
    return dataclasses.replace(plan, releases=releases, noise_multiplier=None)


def private_vocabulary(
    examples: Any,
    columns: str | Sequence[str],
    plan: PrivacyPlan,
    *,
    max_values: int | None = None,
    padding_value: int | None = None,
    progress: bool = True,
) -> PrivateVocabulary:
    """The values of columns that many examples have, for Keras' lookup layers.

    An example votes once for each of its distinct values. A value is released if its votes, with
    noise, exceed a threshold: `draws[0].threshold` of the result, which no single example reaches
    but with a probability that δ includes. All other values are out of vocabulary.

    Args:
        examples: The examples of the plan, each once: arrays `(x, y)` or `(x, y, sample_weight)`, x
            alone, a `dp_sparse.RecordFile` or another data source with `len` and `gather`, a list
            of them, or a `tf.data.Dataset` or another iterable of batches. Not the batches of a
            sampler. x maps names to arrays of text or integers, `[n]` or `[n, values]`.
        columns: Names in x, or one of them.
        plan: A calibrated plan of `reserve_vocabulary`, which pays.
        max_values: m, the most values of all columns for which one example votes; its first ones,
            if it has more. By default the number of columns. Needed if a column has several values
            of an example. Public; noise and threshold grow with its root.
        padding_value: The integer that means no value, in columns of integers. Missing text is ''.
            None and NaN are missing in both.
        progress: Whether to show a progress bar.

    Returns:
        The vocabulary. A second call under the same plan in this process returns the same one.

    Raises:
        ValueError: An argument out of its range, a plan without noise or that pays for no
            vocabulary, another number of examples than the plan's, a column that is missing, or
            arrays of other shapes.
        BadExampleError: Values that are neither text nor integers, or both in one column.
        PrivacyError: The plan's vocabulary was drawn for other columns or with another
            `max_values`, its run has a folder, a dataset mixes examples, or `examples` are batches
            of a sampler.

    Examples:
        >>> import dp_sparse, keras, numpy as np
        >>> sampling = dp_sparse.StreamSampling(num_examples=4000, batch_size=400)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(2.0, 1e-4), sampling)
        >>> plan = dp_sparse.reserve_vocabulary(plan, share=0.1).calibrate()
        >>> cities = np.array(["Rome", "Rome", "Rome", "Oslo"] * 1000)
        >>> cities[17] = "a village of one"
        >>> found = dp_sparse.private_vocabulary({"city": cities}, "city", plan, progress=False)
        >>> found["city"]
        ['Rome', 'Oslo']
        >>> layer = keras.layers.StringLookup(vocabulary=found["city"])
        >>> layer(np.array(["Oslo", "a village of one"])).numpy()
        array([2, 0])

    ### Formal Guarantees
    Those of `threshold`: neighbouring datasets differ by one example added, removed or zeroed out;
    a Gaussian mechanism, whose noise the plan composed with training, and a probability in its δ. A
    plan pays for one vocabulary of its examples. Another process does not know of it, so save the
    result, or use `Run.private_vocabulary`. Public: columns, whether they hold text or integers,
    `max_values`, the number of examples, and that no bad value stopped the count. The result has
    the values that exceed the threshold and their noisy counts, and nothing else of the data.
    """
    return draw_vocabulary(
        examples,
        asked_for(columns, max_values, padding_value),
        plan,
        one_value_each=max_values is None,
        progress=progress,
    )


def asked_for(
    columns: str | Sequence[str], max_values: int | None, padding_value: int | None
) -> Asked:
    """The arguments of `private_vocabulary`.

    Raises:
        ValueError: One of them is out of its range.
    """
    names = (columns,) if isinstance(columns, str) else tuple(columns)
    if not names or len({*names}) != len(names) or not all(isinstance(n, str) for n in names):
        raise ValueError(
            f"Expected columns to be different names of columns in x, got columns={columns!r}."
        )
    wanted = (
        len(names) if max_values is None else validate.positive_integer("max_values", max_values)
    )
    if wanted < len(names):
        raise ValueError(
            f"Expected max_values of at least {len(names)}, the number of columns, got "
            f"max_values={max_values}: a column behind the first ones would never have a vote."
        )
    if padding_value is not None and type(padding_value) is not int:
        raise ValueError(f"Expected padding_value to be an int, got {padding_value!r}.")
    return Asked(names, wanted, padding_value)


def draw_vocabulary(
    examples: Any,
    asked: Asked,
    plan: PrivacyPlan,
    *,
    one_value_each: bool,
    progress: bool,
    kept: bool = False,
) -> PrivateVocabulary:
    """The vocabulary that a plan pays for, drawn once.

    Args, Raises and Formal Guarantees: as `private_vocabulary`; `one_value_each` says that an
    example must have one value of each column, and `kept` that the caller is the `Run` of the plan,
    and keeps it in its folder.
    """
    noise = _noise_of(plan)
    if has_folder(plan.run_id) and not kept:
        raise PrivacyError(
            "The plan belongs to a Run, which keeps what its plan pays for.\nCall "
            "run.private_vocabulary(examples, columns)."
        )
    noise.threshold(asked.max_values)  # refuses what no noise can promise
    if plan.run_id in _DRAWN:
        return _drawn_before(plan, asked)
    counts = count_values(
        examples,
        asked.columns,
        None if one_value_each else asked.max_values,
        num_examples=plan.sampling.num_examples,
        padding_value=asked.padding_value,
        progress=progress,
    )
    with _ONE_DRAWS:
        if plan.run_id in _DRAWN:
            return _drawn_before(plan, asked)
        draw = VocabularyDraw(noise, asked.max_values, plan.run_id, secrets.token_hex(16))
        vocabulary = released(counts, draw)
        _DRAWN[plan.run_id] = _Drawn(vocabulary, asked)
    return vocabulary


def _noise_of(plan: Any) -> VocabularyNoise:
    if not isinstance(plan, PrivacyPlan):
        raise ValueError(f"Expected a PrivacyPlan, got plan={plan!r}.\nMake it pay: {_RESERVE}.")
    if plan.noise_multiplier is None or plan.plan_id is None:
        raise ValueError(
            f"Expected a calibrated plan, got one without noise.\nMake it pay: {_RESERVE}."
        )
    noise = noise_paid_by(plan.releases)
    if noise is None:
        raise ValueError(
            "Expected a plan that pays for a vocabulary, got one whose releases are "
            f"{[release.name for release in plan.releases]}.\nReserve it before training: "
            f"{_RESERVE}."
        )
    return noise


def _drawn_before(plan: PrivacyPlan, asked: Asked) -> PrivateVocabulary:
    """The vocabulary that the plan paid for; raises PrivacyError if another one is asked for."""
    vocabulary, before = _DRAWN[plan.run_id]
    for name, was, now in zip(Asked._fields, before, asked, strict=True):
        if was != now:
            raise PrivacyError(
                f"The vocabulary that this plan pays for was drawn with {name}={was!r}, got "
                f"{name}={now!r}.\nA second one would cost as much again: use the first, or a plan "
                "of its own."
            )
    return vocabulary


def released(counts: dict[str, ValueCounts], draw: VocabularyDraw) -> PrivateVocabulary:
    """The values whose noisy counts exceed the threshold; each call draws new noise.

    They are in the order of their noisy counts, the largest first, and of equal ones in that of the
    values themselves: places tell of the order of examples.
    """
    source, threshold, rng = draw.noise.source, draw.threshold, secret_generator()
    values: dict[str, Any] = {}
    kept: dict[str, np.ndarray] = {}
    for name, column in counts.items():
        noisy = noisy_counts(column.counts, source, source.scale_of(draw.max_values), rng)
        found = [(-int(noisy[at]), column.values[at]) for at in np.flatnonzero(noisy > threshold)]
        found.sort()
        values[name] = tuple(v.decode() if isinstance(v, bytes) else int(v) for _, v in found)
        kept[name] = np.array([-count for count, _ in found], np.int64)
    return PrivateVocabulary(values, kept, (draw,))
