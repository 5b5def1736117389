"""`model_card`: what an export is, what it guarantees and how it scored, as a Markdown page.

The headings are those that model hubs read. Every number of the page comes from the export, from a
calibration that its statement counts, or stands under a line that says that no ε covers it.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from dp_sparse.core import __version__, validate
from dp_sparse.export import Export, check_export
from dp_sparse.probabilities import Calibration

_TASK = "Fill in: the task, who uses the model, and uses that are out of scope."
_DATA = "Fill in: where the data comes from, what one example is, and how many a person may have."
_GROUPS = "Fill in: inputs and groups of people on which the model was not tested."
_RELEASED = (
    "Released with noise, and measured on examples that {} the model. ± is the standard error of "
    "that noise."
)
_NOT_COVERED = (
    "**Not private: no ε covers these values.** Publish them only if the data that they were "
    "measured on is public."
)
_NOTHING = (
    "*Nothing was released.* `calibrate_probabilities` measures a model at a small share of ε."
)
_UNCALIBRATED = (
    "Clipping and noise bend predicted probabilities: calibrate them before they are used as such."
)


def model_card(
    export: Export | str | os.PathLike[str],
    *,
    calibration: Calibration | None = None,
    not_covered: Mapping[str, float] | None = None,
) -> str:
    """A model card in Markdown, filled from an export; what only people know is marked "Fill in".

    Its headings are Model details, Intended use, Training data, Privacy guarantee, Evaluation and
    Limitations. Of a finished `Run`, pass what `run.export(model)` returns. It costs one pass over
    the files of a folder, and nothing for an `Export`.

    Args:
        export: What `export_model` or `apply_deltas` returned, or its folder, which is checked.
        calibration: What `calibrate_probabilities` returned for this model after its last step;
            the card has its measures, as released.
        not_covered: Other measures by name, such as those of validation data. They stand below a
            line that says that no ε covers them.

    Returns:
        The page; write it to README.md beside the model.

    Raises:
        ValueError: No export in the folder, or a damaged one; a calibration of other steps, or one
            that the plan of the export does not pay for; a name that is no line of text, or a value
            that is not a finite number.

    Examples:
        >>> import dp_sparse, keras, tempfile
        >>> sampling = dp_sparse.StreamSampling(num_examples=8, batch_size=4)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(0.5, 1e-3), sampling).calibrate()
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
        >>> folder = tempfile.TemporaryDirectory()
        >>> export = dp_sparse.export_model(model, f"{folder.name}/clicks")
        >>> card = dp_sparse.model_card(export, not_covered={"validation AUC": 0.71})
        >>> print(card)
        # Model card: clicks
        <BLANKLINE>
        ## Model details
        ...
        | validation AUC | 0.71 |
        ...

    ### Formal Guarantees
    All but `not_covered`, the folder's name and a note of the export is post-processing of the
    export and of the calibration's histogram. The card states the cost of both: a histogram that a
    plan pays for is rejected unless the statement of the export names one with its noise, and one
    with a budget of its own stands with that budget. That the calibration is of this model, and not
    of another run of an equal plan, is assumed.
    """
    made = export if isinstance(export, Export) else check_export(_path(export))
    if calibration is not None:
        _require_counted(calibration, made)
    sections = {
        "Model details": _details(made),
        "Intended use": [f"*{_TASK}*"],
        "Training data": [f"*{_DATA}*", "", *_public(made.statement)],
        "Privacy guarantee": [f"    {line}" for line in made.statement.splitlines()],
        "Evaluation": _evaluation(calibration, _checked(not_covered)),
        "Limitations": _limitations(made.statement, calibration),
    }
    parts = [f"# Model card: {made.path.resolve().name}"]
    parts += ["\n".join([f"## {heading}", "", *lines]) for heading, lines in sections.items()]
    return "\n\n".join(parts) + "\n"


def _path(export: Any) -> Any:
    if not isinstance(export, str | os.PathLike):
        raise ValueError(f"Expected an Export or its folder, got export={export!r}.")
    return export


def _require_counted(calibration: Calibration, export: Export) -> None:
    """Raises ValueError unless the card can state what the calibration cost."""
    if not isinstance(calibration, Calibration):
        raise ValueError(
            f"Expected what calibrate_probabilities returned, got calibration={calibration!r}."
        )
    histogram = calibration.histogram
    if histogram.steps != export.steps:
        raise ValueError(
            f"Expected a calibration of the {export.steps} steps of the export, got one of "
            f"{histogram.steps}.\nCalibrate after training, and export then."
        )
    if histogram.budget is None and not histogram.is_paid_in(export.statement):
        raise ValueError(
            f"Expected a calibration that the plan of {export.path} pays for, got one of another "
            "plan.\nPass the one that calibrate_probabilities returned for this model."
        )


def _checked(measures: Mapping[str, float] | None) -> dict[str, float]:
    """Raises ValueError unless these are names for a cell of a table, and finite numbers."""
    if measures is None:
        return {}
    if not isinstance(measures, Mapping):
        raise ValueError(f"Expected not_covered={{name: value}}, got not_covered={measures!r}.")
    for name in measures:
        if not isinstance(name, str) or "|" in name or len(name.strip().splitlines()) != 1:
            raise ValueError(
                f"Expected names of not_covered to be one line of text without '|', got {name!r}."
            )
    return {name: validate.finite(name, value) for name, value in measures.items()}


def _details(export: Export) -> list[str]:
    sizes = [math.prod(weight.shape) for weight in export.weights]
    largest = max(zip(sizes, export.weights, strict=True), key=lambda pair: pair[0])[1]
    shape = " × ".join(map(str, largest.shape))
    return [
        f"- Trained for {export.steps} steps, whose privacy is stated below. This card was written "
        f"by dp_sparse {__version__}.",
        f"- {len(sizes)} weights hold {sum(sizes):,} numbers. The largest is `{largest.name}` "
        f"({shape}, {largest.dtype}).",
        '- `keras.models.load_model("keras")` and `tf.saved_model.load("saved_model")` load it in '
        "this folder, without dp_sparse.",
        f"- Digest: `{export.digest}`. `dp_sparse.check_export` compares the files with it.",
    ]


def _public(statement: str) -> list[str]:
    """What the guarantee takes as public, by the statement."""
    assumed = _below("Assumptions", statement)
    return [f"- {line}" for line in assumed if "public" in line]


def _limitations(statement: str, calibration: Calibration | None) -> list[str]:
    told = [*_below("Against an attacker", statement)[1:]]
    told += [f"No ε covers: {line}" for line in _below("Not covered", statement)]
    told += [_UNCALIBRATED] if calibration is None else []
    return [*(f"- {line}" for line in told), f"- *{_GROUPS}*"]


def _below(heading: str, statement: str) -> list[str]:
    """The lines of a statement under one of its headings; none if it has no headings."""
    lines = statement.splitlines()
    behind = lines[lines.index(heading) + 1 :] if heading in lines else []
    end = next((i for i, line in enumerate(behind) if not line.startswith("  ")), len(behind))
    return [line.strip() for line in behind[:end]]


def _evaluation(calibration: Calibration | None, not_covered: Mapping[str, float]) -> list[str]:
    parts: list[list[str]] = []
    if calibration is not None:
        own = calibration.histogram.statement
        said = _RELEASED.format("did not train" if own else "trained")
        rows = calibration.rows()
        parts += [[said], *([[own]] if own else []), _table("measure | before | calibrated", rows)]
    if not_covered:
        values = [(name, f"{value:.4g}") for name, value in not_covered.items()]
        parts += [[_NOT_COVERED], _table("measure | value", values)]
    return "\n\n".join("\n".join(part) for part in parts or [[_NOTHING]]).splitlines()


def _table(headers: str, rows: Sequence[Sequence[str]]) -> list[str]:
    rule = " | ".join("---" for _ in headers.split("|"))
    return [f"| {row} |" for row in (headers, rule, *map(" | ".join, rows))]
