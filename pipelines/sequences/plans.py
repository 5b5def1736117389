"""The plan of a run over sequences, and how often examples contain each token.

Re-Attention needs these frequencies, and a filter of rare items does. They come from a public file,
or from one noisy histogram of the training examples that the plan pays for. An example counts for
at most `length` distinct tokens, since it was cut to that length before.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import ml_collections
import numpy as np

import dp_sparse
from pipelines.methods import stand_in
from pipelines.runs import Run
from pipelines.sequences.examples import SequenceExamples

TABLE = "items"


def run_of(config: ml_collections.ConfigDict, resume: bool, monitor: int) -> Run | None:
    """What a private run keeps to go on with; others begin anew.

    Raises:
        ValueError: `Run` refuses it, or nothing is kept and `resume` or `monitor` was asked for.
    """
    if config.privacy.method != "none" and config.report.directory:
        return Run(config, resume, monitor)
    if resume or monitor:
        raise ValueError(
            "Expected a private method and a report.directory with --resume or --monitor, got "
            f"privacy.method={config.privacy.method!r} and report.directory="
            f"{config.report.directory!r}."
        )
    return None


def steps_of(config: ml_collections.ConfigDict, examples: int) -> int:
    """Steps of all epochs.

    Raises:
        ValueError: There is no epoch, or a batch has no example.
    """
    for name in ("epochs", "batch_size"):
        if config.training[name] < 1:
            raise ValueError(
                f"Expected training.{name} >= 1, got training.{name}={config.training[name]}."
            )
    return max(1, round(config.training.epochs * examples / config.training.batch_size))


def plan_of(
    config: ml_collections.ConfigDict,
    examples: int,
    frequencies: dp_sparse.RowFrequencies | None = None,
) -> dp_sparse.PrivacyPlan:
    """The plan before it is calibrated; δ is 1/examples if the config has none.

    Raises:
        ValueError: There are too few examples, or a setting is out of its range.
    """
    if examples < 2:
        raise ValueError(
            f"Expected at least 2 examples to hide one among others, got {examples}: one sequence "
            "alone cannot be trained on privately."
        )
    if config.training.batch_size > examples:
        raise ValueError(
            f"Expected training.batch_size <= {examples}, the training examples, got "
            f"training.batch_size={config.training.batch_size}."
        )
    paid = frequencies is not None and frequencies.costs
    return dp_sparse.PrivacyPlan(
        dp_sparse.PrivacyBudget(config.privacy.epsilon, config.privacy.delta or 1 / examples),
        dp_sparse.PoissonSampling(
            examples,
            config.training.batch_size,
            steps_of(config, examples),
        ),
        releases=(frequencies.release,) if paid else (),
    )


def noisy_frequencies(
    config: ml_collections.ConfigDict,
    examples: SequenceExamples,
    run: Run | None = None,
    require: Callable[[dp_sparse.GaussianTopK], None] = lambda source: None,
) -> dp_sparse.RowFrequencies:
    """The histogram of the examples' tokens, at `privacy.frequency_share` of ε; once in a run.

    Args:
        config: Of the run.
        examples: Which are counted.
        run: What is kept of it.
        require: Given the noise, refuses it before anything is counted.
    """
    table = _table(examples)

    def count() -> dp_sparse.RowFrequencies:
        plan, share = plan_of(config, len(examples)), config.privacy.frequency_share
        noise = dp_sparse.calibrate_top_k(plan, {TABLE: table}, k=1, share=share)
        require(noise.source)
        return dp_sparse.noisy_frequencies(
            ({TABLE: examples.x}, examples.y), TABLE, table, noise.source, progress=False
        )

    return count() if run is None else run.frequencies(count)


def public_frequencies(path: Path, num_tokens: int) -> dp_sparse.RowFrequencies:
    """Of a file with a fraction of examples in each line, for the tokens from 1 on.

    Raises:
        ValueError: No such file, another number of lines, or a fraction outside of (0, 1].
    """
    try:
        values = np.loadtxt(path, ndmin=1)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"Expected a number in each line of privacy.frequencies={path}, got {error}."
        ) from error
    if values.shape != (num_tokens,):
        raise ValueError(
            f"Expected {num_tokens} lines in privacy.frequencies={path}, one for each token, got "
            f"{values.shape[0]}."
        )
    return dp_sparse.RowFrequencies.public(TABLE, np.concatenate([[1.0], values]))


def _table(examples: SequenceExamples) -> dp_sparse.TopKTable:
    return dp_sparse.TopKTable(
        examples.num_tokens + 1, max_lookups=examples.x.shape[1], padding_id=0
    )


@dataclasses.dataclass(frozen=True)
class Accounted:
    """A calibrated plan, and the frequencies that it pays for, if any were needed."""

    plan: dp_sparse.PrivacyPlan
    frequencies: dp_sparse.RowFrequencies | None


def require_used(config: ml_collections.ConfigDict, counted: bool = False) -> None:
    """Checks that a file of frequencies has a use.

    Args:
        config: Of the run.
        counted: Whether examples are counted by noisy counts anyway.

    Raises:
        ValueError: Nothing would read it.
    """
    if config.privacy.frequencies and (counted or config.model.kind != "re_attention"):
        why = (
            "noisy counts are taken anyway, by data.filter_items"
            if counted
            else (f"model.kind={config.model.kind!r} has no use for it")
        )
        raise ValueError(
            f"Expected privacy.frequencies='' here, got {config.privacy.frequencies!r}: {why}. "
            "Public frequencies are for Re-Attention with all items kept."
        )


def unpaid(config: ml_collections.ConfigDict, examples: SequenceExamples) -> Accounted:
    """A plan and frequencies of the same form, for which nothing is read and nobody trains."""
    plan, frequencies = stand_in(plan_of(config, len(examples))), None
    if config.model.kind == "re_attention":
        frequencies = dp_sparse.RowFrequencies.public(TABLE, np.ones(examples.num_tokens + 1))
    return Accounted(plan, frequencies)


def accounted(
    config: ml_collections.ConfigDict,
    examples: SequenceExamples,
    frequencies: dp_sparse.RowFrequencies | None = None,
    run: Run | None = None,
) -> Accounted:
    """The calibrated plan of a run; counts tokens if Re-Attention needs it and nobody has yet."""
    require_used(config, counted=frequencies is not None)
    if frequencies is None and config.model.kind == "re_attention":
        if config.privacy.frequencies:
            path = Path(config.privacy.frequencies)
            frequencies = public_frequencies(path, examples.num_tokens)
        else:
            frequencies = noisy_frequencies(config, examples, run)

    def calibrated() -> dp_sparse.PrivacyPlan:
        return plan_of(config, len(examples), frequencies).calibrate()

    return Accounted(calibrated() if run is None else run.plan(calibrated), frequencies)
