"""ε in the logs never understates; reports hold no training metric unasked."""

import secrets
import sys
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from scipy import stats

import dp_sparse
from dp_sparse.accounting import FALSE_ROWS

N, V = 400, 50


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, V, (N, 2)).astype(np.int32)
    return ids, (ids[:, :1] < 10).astype(np.float32)


def model() -> keras.Model:
    ids = keras.Input((2,), dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(V, 4)(ids))
    return keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(rows))


@pytest.fixture(scope="module")
def plan() -> dp_sparse.PrivacyPlan:
    sampling = dp_sparse.PoissonSampling(num_examples=N, expected_batch_size=40, steps=12)
    return dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(2.0, 1e-4), sampling).calibrate()


def compiled(plan: dp_sparse.PrivacyPlan, name: str = "DPAdaFESTOptimizer") -> keras.Model:
    """A model under a plan of its own, with the noise of the given one."""
    own = dp_sparse.PrivacyPlan.from_config(plan.get_config() | {"plan_id": secrets.token_hex(16)})
    trained = model()
    optimizer = getattr(dp_sparse, name)(keras.optimizers.SGD(0.1), own, clip_norm=1.0)
    trained.compile(optimizer=optimizer, loss="binary_crossentropy", metrics=["accuracy"])
    return trained


def fit(trained: keras.Model, *callbacks: Any, **options: Any) -> keras.callbacks.History:
    batches = trained.optimizer.plan.sampling.batches(data())
    return trained.fit(batches, callbacks=list(callbacks), verbose=0, **options)


class Logs(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.shown: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.shown.append(logs["epsilon"])


@pytest.mark.slow
def test_epsilon_is_never_below_what_was_spent(plan: dp_sparse.PrivacyPlan) -> None:
    trained, logs = compiled(plan), Logs()
    history = fit(trained, dp_sparse.PrivacyReport(points=4), logs)
    spent = [trained.optimizer.plan.spent(step + 1).epsilon for step in range(12)]
    assert all(shown >= true for shown, true in zip(logs.shown, spent, strict=True))
    assert logs.shown[-1] == spent[-1] == history.history["epsilon"][-1]
    assert logs.shown[0] < spent[-1]


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_execution", [1, 5])
def test_points_and_rows(plan: dp_sparse.PrivacyPlan, steps_per_execution: int) -> None:
    trained, report = compiled(plan), dp_sparse.PrivacyReport(points=4)
    trained.compile(
        optimizer=trained.optimizer, loss="mse", steps_per_execution=steps_per_execution
    )
    fit(trained, report)
    steps, rows = report.history.steps, np.array(report.history.rows)
    assert steps[-1] == 12
    assert steps == ([3, 6, 9, 12] if steps_per_execution == 1 else [5, 10, 12])
    gaps = np.diff([0, *steps])
    assert (rows[:, 0] @ gaps) == pytest.approx(trained.optimizer.diagnostics.rows.numpy()[0])
    assert report.reduction() == pytest.approx(V / rows.mean(), rel=1e-6)


@pytest.mark.slow
def test_dp_sgd_reports_no_rows_and_no_reduction(plan: dp_sparse.PrivacyPlan) -> None:
    trained, report = compiled(plan, "DPSGDOptimizer"), dp_sparse.PrivacyReport()
    fit(trained, report)
    assert report.history.rows == [] and report.reduction() == 1.0
    assert trained.optimizer.diagnostics.rows.numpy().sum() == 0


@pytest.mark.slow
def test_the_page_holds_no_training_metric_unless_asked(
    plan: dp_sparse.PrivacyPlan, tmp_path: Path
) -> None:
    words = ("training loss", "training accuracy", "clip fraction", "quarantined", "batch size")
    for diagnostics, held in (("private", False), ("non_private", True)):
        page = tmp_path / f"{diagnostics}.html"
        report = dp_sparse.PrivacyReport(str(page), diagnostics)
        fit(compiled(plan), report, validation_data=data())
        body = page.read_text()
        body = body[body.index("Privacy spent") :]
        assert all((word in body) == held for word in words)
        assert "val_accuracy" in body and "Embedding rows noised per step" in body


@pytest.mark.cases(1)
@pytest.mark.parametrize(("threshold", "trains"), [(2.0, True), (1e4, False), (None, False)])
def test_tables_that_hardly_train_are_told(
    plan: dp_sparse.PrivacyPlan, tmp_path: Path, threshold: float | None, trains: bool
) -> None:
    """50 rows, of which a batch of 40 looks most up once or twice; and much noise on the votes."""
    path, own = (
        tmp_path / "report.html",
        dp_sparse.PrivacyPlan.from_config(plan.get_config() | {"plan_id": secrets.token_hex(16)}),
    )
    choice = {"threshold": threshold} if threshold else {"expected_false_rows": 1.0}
    ratio = 0.2 if trains else 50.0
    trained, report = model(), dp_sparse.PrivacyReport(str(path))
    optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", own, 1.0, noise_ratio=ratio, **choice)
    trained.compile(optimizer, loss="binary_crossentropy")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(trained, report)
    told = [str(w.message) for w in caught if "hardly trained" in str(w.message)]
    lines = [line for line in report.history.findings if "hardly trained" in line]
    assert len(told) == len(lines) == (0 if trains else 1)
    assert ("hardly trained" in path.read_text()) == (not trains)
    if not trains:
        assert lines[0] in told[0] and "would be by noise alone" in told[0]
        assert "embedding" in lines[0] and "DPFESTOptimizer" in told[0]


@pytest.mark.parametrize(("threshold", "survive"), [(0.1, True), (1e4, False)])
def test_windows_are_drawn_and_those_without_survivors_are_told(
    tmp_path: Path, threshold: float, survive: bool
) -> None:
    own = dp_sparse.PrivacyPlan(
        dp_sparse.PrivacyBudget(8.0, 1e-3), dp_sparse.PoissonSampling(N, 40, steps=24)
    ).calibrate()
    trained, report = model(), dp_sparse.PrivacyReport(str(tmp_path / "report.html"))
    optimizer = dp_sparse.DPAdaFESTOptimizer("sgd", own, 1.0, threshold=threshold, window=2)
    trained.compile(optimizer, loss="binary_crossentropy")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        fit(trained, report)
    assert "Rows that survived each window of steps" in (tmp_path / "report.html").read_text()
    told = [line for line in report.history.findings if "no row survived any of 12" in line]
    assert len(told) == (0 if survive else 1)
    if told:
        wanted = float(told[0].partition("threshold=")[2].split(",")[0])
        rows, again = int(optimizer.tables[0].shape[0]), optimizer.contribution_noise_multiplier
        assert rows * stats.norm.sf(wanted / again) == pytest.approx(10, rel=0.05)


@pytest.mark.slow
def test_false_rows_are_those_of_a_threshold(plan: dp_sparse.PrivacyPlan) -> None:
    trained = compiled(plan)
    fit(trained, steps_per_epoch=1)
    assert trained.optimizer.false_rows_per_step == pytest.approx([FALSE_ROWS])  # of V rows
    rows = dp_sparse.SelectedRows.public({"embedding": range(10)}, {"embedding": V})
    own = dp_sparse.PrivacyPlan.from_config(plan.get_config() | {"plan_id": secrets.token_hex(16)})
    ids = keras.Input((2,), dtype="int32")
    looked_up = keras.layers.Embedding(V, 4, name="embedding")(ids)
    selected = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(looked_up)))
    plus = dp_sparse.DPAdaFESTOptimizer("sgd", own, 1.0, expected_false_rows=2, rows=rows)
    selected.compile(plus, loss="mse")
    fit(selected, steps_per_epoch=1)
    assert plus.false_rows_per_step == pytest.approx([2.0])


def test_without_a_private_optimizer_there_is_nothing_to_report() -> None:
    stock = model()
    stock.compile(optimizer="sgd", loss="mse")
    with pytest.raises(ValueError, match="Expected a model compiled with a private optimizer"):
        stock.fit(*data(), callbacks=[dp_sparse.PrivacyReport()], verbose=0)


def test_another_value_of_diagnostics_is_refused() -> None:
    with pytest.raises(ValueError, match=r"diagnostics in \('private', .*, got 'all'"):
        dp_sparse.PrivacyReport(diagnostics="all")


@pytest.mark.slow
def test_a_run_of_few_steps_has_a_point(plan: dp_sparse.PrivacyPlan, tmp_path: Path) -> None:
    """The report holds where each fit ended, whatever `points` asks for."""
    page = tmp_path / "report.html"
    trained, report = compiled(plan), dp_sparse.PrivacyReport(str(page), points=1)
    fit(trained, report, steps_per_epoch=2)
    assert report.history.steps == [2] and "Embedding rows noised" in page.read_text()
    fit(trained, report, steps_per_epoch=3, epochs=2)
    assert report.history.steps == [2, 8]
    spent = [trained.optimizer.plan.spent(step).epsilon for step in (2, 8)]
    assert report.history.epsilon == spent


@pytest.mark.cases(1)
def test_a_report_of_several_fits_is_of_all_their_steps(
    plan: dp_sparse.PrivacyPlan, tmp_path: Path
) -> None:
    """Signals are from where the report began, also of one that begins in the middle."""
    page, note = tmp_path / "report.html", "An example is a <user>."
    trained, report = compiled(plan), dp_sparse.PrivacyReport(str(page), points=1, note=note)
    fit(trained, report, steps_per_epoch=2)
    begun = report._begin
    fit(trained, report, steps_per_epoch=2)
    assert report._begin is begun and "were taken before" not in page.read_text()
    said = page.read_text()
    assert said.index("An example is a &lt;user&gt;.") < said.index("protects one example")
    other = dp_sparse.PrivacyReport(str(page), points=1)
    fit(trained, other, steps_per_epoch=2)
    assert "The first 4 steps were taken before this report began" in page.read_text()
    assert "a &lt;user" not in page.read_text()
    fit(trained, report, steps_per_epoch=2)  # it did not see two of the steps
    assert "The first 6 steps were taken before this report began" in page.read_text()
    assert report.history.steps == [8]


def test_a_page_without_matplotlib_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"matplotlib: pip install matplotlib"):
        dp_sparse.PrivacyReport("report.html")
    dp_sparse.PrivacyReport()
