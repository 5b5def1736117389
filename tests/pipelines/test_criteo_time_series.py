"""Training day by day: plans and rows of periods, readers, what is refused, runs that go on."""

import gc
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dp_accounting
import keras
import ml_collections
import numpy as np
import pytest

pytest.importorskip("apache_beam")

import dp_sparse
from configs import criteo_time_series
from dp_sparse.sampling.offline import poisson
from pipelines.criteo.generate import generate_days
from pipelines.criteo.records import PrepareError
from pipelines.criteo.time_series.days import Period, day_files, periods_of
from pipelines.criteo.time_series.exports import PeriodExports
from pipelines.criteo.time_series.periods import FREQUENCIES, Frequencies, PeriodPlans, PeriodRuns
from pipelines.criteo.time_series.reading import DrawnReader, JoinedRecords, RecordReader
from pipelines.criteo.time_series.train import Run, TimeSeriesResult, train
from tests.subprocesses import HANG

ROOT = Path(__file__).parents[2]
SIZES = (30,) * 26
ROWS, DAYS, TRAIN_DAYS = 240, 4, 2


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("days")
    generate_days(DAYS, ROWS, folder, vocabularies=SIZES, progress=False)
    return str(folder / "day_*.gz")


def config_of(days: str, **changes: Any) -> ml_collections.ConfigDict:
    config = criteo_time_series.get_config()
    config.hidden = (4,)
    config.data.days, config.data.train_days, config.data.vocabularies = days, TRAIN_DAYS, SIZES
    config.training.batch_size, config.training.epochs = 80, 1.0
    config.privacy.epsilon, config.privacy.delta = 8.0, 1e-3
    config.selection.rows = 100
    config.update_from_flattened_dict(changes)
    return config


def plans_of(
    config: ml_collections.ConfigDict, folder: Path, periods: Sequence[Period]
) -> PeriodPlans:
    reader = RecordReader(config, folder)
    return PeriodPlans(config, reader, PeriodRuns(config, reader), periods, 1e-3)


def plans_in(folder: Path) -> dict[str, dp_sparse.PrivacyPlan]:
    paths = sorted(folder.glob("period-*/plan.json"))
    return {
        path.parent.name: dp_sparse.PrivacyPlan.from_config(json.loads(path.read_text()))
        for path in paths
    }


@pytest.fixture(scope="module")
def running(days: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[TimeSeriesResult, Path]:
    """DP-AdaFEST+ on drawn batches, rows from the running sum of histograms."""
    folder = tmp_path_factory.mktemp("running")
    changes = {"method": "dp_adafest_plus", "data.reading": "drawn"}
    changes["export"] = str(folder / "exports")
    return train(config_of(days, **changes), folder), folder


class TestARun:
    def test_each_period_pays_its_own_plan(self, running: tuple[TimeSeriesResult, Path]) -> None:
        result, folder = running
        plans = plans_in(folder)
        assert len(plans) == TRAIN_DAYS
        assert result.steps == sum(plan.sampling.steps for plan in plans.values()) == 6
        spent = [plan.spent(plan.sampling.steps).epsilon for plan in plans.values()]
        assert result.epsilon == pytest.approx(max(spent))
        assert 7.9 < result.epsilon <= 8.0
        assert result.delta == 1e-3
        assert "pays in each" in result.statement

    def test_every_period_pays_its_own_histogram_alone(
        self, running: tuple[TimeSeriesResult, Path]
    ) -> None:
        plans = plans_in(running[1])
        for number, plan in enumerate(plans.values()):
            (release,) = plan.releases
            noise = float((running[1] / f"period-{number:03d}/histogram_noise.json").read_text())
            assert release.event.noise_multiplier == noise
            assert f"sum of {number + 1} noisy histograms" in release.name

    def test_histograms_are_those_of_their_days(
        self, running: tuple[TimeSeriesResult, Path]
    ) -> None:
        loaded = [
            dp_sparse.NoisyHistogram.load(running[1] / f"period-{n:03d}/histogram.npz")
            for n in range(TRAIN_DAYS)
        ]
        assert [h.data for h in loaded] == ["day 0", "day 1"]
        assert len({h.histogram_id for h in loaded}) == TRAIN_DAYS
        for histogram in loaded:  # ROWS examples look up one row of each of 26 tables
            total = sum(counts.sum() for counts in histogram.counts.values())
            deviation = histogram.noise_multiplier * np.sqrt(26) * np.sqrt(26 * 30)
            assert abs(total - 26 * ROWS) < 6 * deviation

    def test_it_evaluates_after_each_period(self, running: tuple[TimeSeriesResult, Path]) -> None:
        result, _ = running
        assert [name for name, _ in result.curve] == ["day 0", "day 1"]
        assert result.curve[-1][1] == result.auc
        assert result.reduction > 1

    def test_each_period_is_exported_as_what_it_changed(
        self, running: tuple[TimeSeriesResult, Path], tmp_path: Path
    ) -> None:
        result, folder = running
        first, delta, last = (
            folder / "exports" / name for name in ("period-000", "delta-001", "period-001")
        )
        made = dp_sparse.apply_deltas(first, [delta], tmp_path / "made")
        assert made.digest == dp_sparse.check_export(last).digest
        assert (last / "statement.txt").read_text().strip() == result.statement
        assert "2 disjoint parts" not in (first / "statement.txt").read_text()
        weights = json.loads((delta / "export.json").read_text())["weights"]
        assert any(weight["rows"] is not None for weight in weights)
        assert keras.models.load_model(last / "keras").count_params() > 0

    def test_a_run_that_has_ended_is_not_trained_again(
        self, days: str, running: tuple[TimeSeriesResult, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("trained again")

        monkeypatch.setattr(keras.Model, "fit", refuse)
        gc.collect()  # the lock of the checkpoints goes with their owner
        changes = {"method": "dp_adafest_plus", "data.reading": "drawn"}
        assert train(config_of(days, **changes), running[1]) == running[0]

    def test_a_period_whose_checkpoints_are_lost_is_not_trained_again(
        self, days: str, running: tuple[TimeSeriesResult, Path], tmp_path: Path
    ) -> None:
        folder = shutil.copytree(running[1], tmp_path / "run")
        shutil.rmtree(folder / "period-001" / "checkpoints")
        changes = {"method": "dp_adafest_plus", "data.reading": "drawn"}
        with pytest.raises(dp_sparse.PrivacyError, match="the checkpoints of a run that has begun"):
            train(config_of(days, **changes), folder)

    @pytest.mark.parametrize(
        ("lost", "message"),
        [
            (["period-001/rows.npz"], "period-001/rows.npz is missing"),
            (["period-000/plan.json"], "period-000/plan.json is missing"),
            (["period-000/plan.json", "period-000/begun.json"], "got no plan"),
        ],
    )
    def test_what_was_paid_and_is_lost_is_not_made_again(
        self,
        days: str,
        running: tuple[TimeSeriesResult, Path],
        tmp_path: Path,
        lost: list[str],
        message: str,
    ) -> None:
        folder = shutil.copytree(running[1], tmp_path / "run")
        for name in lost:
            (folder / name).unlink()
        changes = {"method": "dp_adafest_plus", "data.reading": "drawn"}
        with pytest.raises(ValueError, match=message):
            train(config_of(days, **changes), folder)
        assert not (folder / lost[0]).exists()


def test_a_histogram_that_a_killed_process_drew_goes(days: str, tmp_path: Path) -> None:
    """Beside the one that is drawn anew it would tell more than one of them."""
    periods, folder = periods_of(day_files(days), 1), tmp_path / "period-000"
    folder.mkdir()
    (folder / ".histogram.npz.123.tmp").write_bytes(b"whole")
    (folder / "histogram_noise.json").write_text("1.0")
    plans_of(config_of(days, method="dp_fest"), tmp_path, periods).prepare(periods[0])
    assert [path.name for path in folder.glob("*histogram.npz*")] == ["histogram.npz"]
    assert not list(folder.glob(".*"))


def test_a_lost_histogram_is_not_drawn_again(days: str, tmp_path: Path) -> None:
    """The plan of its period paid for one, and a later period would use the second."""
    periods, folder = periods_of(day_files(days), 1), tmp_path / "period-000"
    plans = plans_of(config_of(days, method="dp_fest"), tmp_path, periods)
    folder.mkdir()
    (folder / "histogram_noise.json").write_text("1.0")
    plans.prepare(periods[0])
    sampling = dp_sparse.PoissonSampling(ROWS, 80, 3)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(8.0, 1e-3), sampling).with_noise(1.0)
    plans._runs.of(periods[0]).plan_once(lambda: plan)
    plans._runs.close()
    (folder / "histogram.npz").unlink()
    with pytest.raises(ValueError, match="histogram.npz is missing, which the plan of this run"):
        plans.prepare(periods[0])


@pytest.mark.slow
def test_an_export_states_all_periods_whose_histograms_it_shows(days: str, tmp_path: Path) -> None:
    changes = {"method": "dp_fest", "selection.frequencies": "all_days"}
    config = config_of(days, **changes, export=str(tmp_path / "exports"))
    train(config, tmp_path / "run")
    first = (tmp_path / "exports" / "period-000" / "statement.txt").read_text()
    assert "2 disjoint parts" in first  # of which one has not trained


@pytest.mark.slow
@pytest.mark.parametrize("frequencies", FREQUENCIES)
def test_rows_come_from_the_histograms_that_were_asked_for(
    days: str, tmp_path: Path, frequencies: str
) -> None:
    changes = {"method": "dp_fest", "selection.frequencies": frequencies, "period": 2}
    changes["data.train_days"] = 3
    result = train(config_of(days, **changes), tmp_path)
    rows = [
        dp_sparse.SelectedRows.load(path) for path in sorted(tmp_path.glob("period-*/rows.npz"))
    ]
    summed = {"first_day": [1, 1], "all_days": [2, 2], "running": [1, 2]}[frequencies]
    assert [len(selected.source.histograms) for selected in rows] == summed
    pays = {"first_day": [True, False], "all_days": [True, True], "running": [True, True]}
    assert [bool(plan.releases) for plan in plans_in(tmp_path).values()] == pays[frequencies]
    first = dp_sparse.NoisyHistogram.load(tmp_path / "period-000/histogram.npz")
    assert first.data == ("day 0" if frequencies == "first_day" else "days 0 to 1")
    same = rows[0].row_ids["category_14"].tolist() == rows[1].row_ids["category_14"].tolist()
    assert same or frequencies == "running"
    assert result.epsilon <= 8.0


def test_slots_rate_and_clip_norm_go_on_into_the_next_period(
    days: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, norms = [], []
    original = dp_sparse.DPSGDOptimizer.take_slots

    def take(self: Any, previous: Any) -> None:
        original(self, previous)
        taken.append((int(previous.iterations), int(self.iterations), int(self.steps_spent)))
        norms.append((float(previous.current_clip_norm), float(self.current_clip_norm)))
        rates.append(float(self.learning_rate))

    rates: list[float] = []
    monkeypatch.setattr(dp_sparse.DPSGDOptimizer, "take_slots", take)
    train(config_of(days, method="dp_sgd"), tmp_path)
    assert taken == [(3, 3, 0)]
    assert norms[0][0] == norms[0][1] != 1.0
    assert rates == [pytest.approx(0.01 / 2)]  # half of all steps


@pytest.mark.slow
def test_without_privacy_it_says_so(days: str, tmp_path: Path) -> None:
    result = train(config_of(days, method="non_private", period=2), tmp_path)
    assert (result.epsilon, result.delta, result.reduction) == (np.inf, 1.0, 1.0)
    assert "No guarantee" in result.statement
    assert result.steps == 6


def write_first_day_twice(days: str, folder: Path) -> None:
    """The second day has its rows behind a malformed line: the file begins otherwise."""
    for k, path in enumerate(day_files(days)):
        source = day_files(days)[0] if k == 1 else path
        lines = gzip.decompress(source.read_bytes())
        (folder / f"day_{k}.gz").write_bytes(gzip.compress(b"x\n" * k + lines))


class TestRefused:
    @pytest.mark.slow
    def test_rows_of_another_period(self, days: str, tmp_path: Path) -> None:
        write_first_day_twice(days, tmp_path)
        config = config_of(str(tmp_path / "day_*.gz"), method="dp_sgd")
        with pytest.raises(PrepareError, match="an example in two periods would pay in both"):
            train(config, tmp_path / "run")
        assert len(list((tmp_path / "run").glob("period-*/plan.json"))) == 1

    def test_rows_of_a_later_period_before_their_histogram_is_used(
        self, days: str, tmp_path: Path
    ) -> None:
        """With `all_days` its histogram would count them a second time, which nothing pays."""
        write_first_day_twice(days, tmp_path)
        changes = {"method": "dp_fest", "selection.frequencies": "all_days"}
        with pytest.raises(PrepareError, match="an example in two periods would pay in both"):
            train(config_of(str(tmp_path / "day_*.gz"), **changes), tmp_path / "run")
        assert not list((tmp_path / "run").glob("period-*/rows.npz"))

    def test_files_that_changed_their_names_while_the_run_was_stopped(
        self, days: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As logs do that are rotated: the rows of a period that has ended would train again."""
        first, second, *others = (path.read_bytes() for path in day_files(days))
        for k, content in enumerate([first, second, *others]):
            (tmp_path / f"day_{k}.gz").write_bytes(content)
        config, fit = config_of(str(tmp_path / "day_*.gz"), method="dp_sgd"), keras.Model.fit

        def stopped(model: keras.Model, *given: Any, **more: Any) -> Any:
            if (tmp_path / "run" / "period-001").exists():
                raise RuntimeError("stopped")
            return fit(model, *given, **more)

        with monkeypatch.context() as patched:
            patched.setattr(keras.Model, "fit", stopped)
            with pytest.raises(RuntimeError, match="stopped"):
                train(config, tmp_path / "run")
        gc.collect()
        (tmp_path / "day_0.gz").write_bytes(second)
        (tmp_path / "day_1.gz").write_bytes(first)
        with pytest.raises(PrepareError, match="Expected the rows that day 0 had when it was read"):
            train(config, tmp_path / "run")

    def test_rows_twice_in_a_period(self, days: str, tmp_path: Path) -> None:
        write_first_day_twice(days, tmp_path)
        config = config_of(str(tmp_path / "day_*.gz"), method="dp_sgd", period=2)
        with pytest.raises(PrepareError, match="rows of its own in each file"):
            train(config, tmp_path / "run")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"method": "sgd"}, "method to be one of"),
            ({"data.reading": "quickly"}, "data.reading to be one of"),
            ({"data.train_days": 4}, "1 <= data.train_days < 4"),
            ({"period": 4}, "1 <= period <= 2"),
            ({"method": "dp_fest", "selection.frequencies": "monthly"}, "selection.frequencies"),
            ({"method": "non_private", "data.reading": "drawn"}, "data.reading=records"),
            ({"method": "non_private", "export": "out"}, "private method with export"),
            ({"method": "dp_fest", "privacy.clip_norm": -1.0}, "Expected clip_norm"),
            ({"method": "dp_adafest_plus", "adafest.noise_ratio": 0.0}, "Expected noise_ratio"),
            ({"method": "dp_fest", "optimizer.name": "AdamW"}, "AdamW"),
            ({"method": "dp_fest", "checkpoint_seconds": 0.0}, "Expected every_seconds"),
        ],
    )
    def test_settings(
        self, days: str, tmp_path: Path, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            train(config_of(days, **changes), tmp_path)
        assert not list(tmp_path.rglob("histogram.npz"))  # which would be spent

    def test_a_day_without_rows_before_anything_trains(self, days: str, tmp_path: Path) -> None:
        for k, path in enumerate(day_files(days)):
            content = gzip.compress(b"x\n") if k == 1 else path.read_bytes()
            (tmp_path / f"day_{k}.gz").write_bytes(content)
        config = config_of(str(tmp_path / "day_*.gz"), **{"data.reading": "drawn"})
        with pytest.raises(PrepareError, match=r"Expected rows in .*day_1\.gz, got 1 lines"):
            train(config, tmp_path / "run")
        assert not list((tmp_path / "run").glob("period-*/plan.json"))

    def test_a_day_that_trains_and_evaluates(self, days: str, tmp_path: Path) -> None:
        for k, path in enumerate(day_files(days)):
            plain = gzip.decompress((day_files(days)[0] if k == 3 else path).read_bytes())
            (tmp_path / f"day_{k}.tsv").write_bytes(plain)
        with pytest.raises(PrepareError, match=r"each file once.*day_0\.tsv and .*day_3\.tsv"):
            train(config_of(str(tmp_path / "day_*.tsv")), tmp_path / "run")

    def test_a_folder_of_exports_of_another_run(self, days: str, tmp_path: Path) -> None:
        """No export is there yet: one of them would write its own among the other's."""
        config = config_of(days, export=str(tmp_path / "exports"))
        first = Run.of(config, tmp_path / "run")
        with pytest.raises(ValueError, match="Expected nobody else in .*exports"):
            Run.of(config, tmp_path / "other")
        del first
        gc.collect()
        with pytest.raises(ValueError, match=r"exports of this run.* of the run in .*/run: name"):
            Run.of(config, tmp_path / "other")

    def test_exports_without_their_run(
        self, days: str, running: tuple[TimeSeriesResult, Path], tmp_path: Path
    ) -> None:
        """A run that begins would take them for its own; one that goes on may."""
        changes = {"method": "dp_adafest_plus", "data.reading": "drawn"}  # as of `running`
        config = config_of(days, export=str(tmp_path / "exports"), **changes)
        Run.of(config, tmp_path / "run")
        gc.collect()
        (tmp_path / "exports" / "period-000").mkdir()
        with pytest.raises(ValueError, match="without exports for a run that begins.*period-000"):
            Run.of(config, tmp_path / "run")
        gc.collect()
        shutil.rmtree(tmp_path / "run" / "period-000")
        shutil.copytree(running[1] / "period-000", tmp_path / "run" / "period-000")
        Run.of(config, tmp_path / "run")
        gc.collect()
        (tmp_path / "exports" / "run.txt").unlink()  # as of the versions that wrote none
        Run.of(config, tmp_path / "run")

    def test_a_folder_of_exports_that_was_taken_away(self, days: str, tmp_path: Path) -> None:
        exports = PeriodExports(tmp_path / "exports", tmp_path / "run", trained=False)
        shutil.rmtree(tmp_path / "exports")
        PeriodExports(tmp_path / "exports", tmp_path / "other", trained=False)
        period = periods_of(day_files(days), 1)[0]
        with pytest.raises(ValueError, match=r"exports of this run.* of the run in .*/other: name"):
            exports.write(keras.Model(), period, {})  # type: ignore[arg-type]

    def test_exports_in_the_folder_of_the_run(self, days: str, tmp_path: Path) -> None:
        config = config_of(days, export=str(tmp_path / "run"))
        with pytest.raises(ValueError, match="a folder for exports alone"):
            Run.of(config, tmp_path / "run")


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(
    days: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has seen anything of it, though its batches have served it."""
    changes = {"data.reading": "drawn", "data.train_days": 1}

    def killed(*_: Any, **__: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(keras.Model, "fit", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(config_of(days, **changes), tmp_path)
    gc.collect()
    poisson._Process.renew()  # as in a new process
    assert train(config_of(days, **changes), tmp_path).steps == 3


@pytest.mark.parametrize("lost", ["plan", "mark"])
def test_batches_on_which_something_else_may_have_trained_stay_claimed(
    days: str, tmp_path: Path, lost: str
) -> None:
    """A run of which all but its batches was removed has trained on them all the same."""
    changes: dict[str, Any] = {"data.reading": "drawn", "data.train_days": 1}
    train(config_of(days, **changes), tmp_path)
    gc.collect()
    period = tmp_path / "period-000"
    shutil.rmtree(period / "checkpoints")
    (period / "done.json").unlink()
    if lost == "plan":
        (period / "plan.json").unlink()
        (period / "run.json").unlink()
        changes["privacy.epsilon"] = 2.0
    (period / "begun.json").unlink()
    poisson._Process.renew()
    with pytest.raises(dp_sparse.PrivacyError, match="two runs on one draw|no run began with"):
        train(config_of(days, **changes), tmp_path)
    gc.collect()
    with pytest.raises(dp_sparse.PrivacyError, match="two runs on one draw|no run began with"):
        train(config_of(days, **changes), tmp_path)  # which has a mark by now


def test_a_claim_of_another_run_stays(days: str, tmp_path: Path) -> None:
    (period, *_) = periods_of(day_files(days), 2)
    reader = DrawnReader(config_of(days), tmp_path)
    path = tmp_path / "period-000" / "batches" / "plan.json"
    path.parent.mkdir(parents=True)
    path.write_text("of another")
    reader.begin_anew(period, "own")
    assert reader.claim(period) == "of another"
    reader.begin_anew(period, "of another")
    assert not path.exists()


def test_one_run_at_a_time(days: str, tmp_path: Path) -> None:
    """Two would draw the noise of one histogram twice."""
    first = Run.of(config_of(days), tmp_path)
    with pytest.raises(ValueError, match="Expected nobody else in .*, got a run that has not"):
        Run.of(config_of(days), tmp_path)
    del first
    Run.of(config_of(days), tmp_path)


def test_a_stream_does_not_know_later_days() -> None:
    periods = periods_of([Path(f"day_{n}") for n in range(4)], 1)
    known = Frequencies("running", periods)
    assert [p.number for p in known.of(periods[2])] == [0, 1, 2]
    assert [p.number for p in Frequencies("all_days", periods).of(periods[0])] == [0, 1, 2, 3]


def test_periods_of_one_size_share_the_noise_of_what_they_release(
    days: str, tmp_path: Path
) -> None:
    """A period that pays for a histogram has less left for training than one that does not."""
    plans = plans_of(config_of(days), tmp_path, [])
    sampling = dp_sparse.StreamSampling(100, 10)
    found = []
    for noise in (None, 2.0, 2.0, 1.0):
        event = dp_accounting.GaussianDpEvent(noise or 1.0)
        releases = () if noise is None else (dp_sparse.Release("histogram", event),)
        budget = dp_sparse.PrivacyBudget(8.0, 1e-3)
        plan = plans._calibrated(dp_sparse.PrivacyPlan(budget, sampling, releases=releases))
        found.append(plan.noise_multiplier)
    nothing, one, same, more = found
    assert nothing < one == same < more


def test_both_readers_see_the_same_rows(days: str, tmp_path: Path) -> None:
    (period, *_) = periods_of(day_files(days), 2)
    config = config_of(days)
    records, drawn = RecordReader(config, tmp_path), DrawnReader(config, tmp_path)
    assert records.count(period) == drawn.count(period) == 2 * ROWS
    for reader in (records, drawn):
        reader.prepare(period, None, None)
    assert records.sampling(period).steps == drawn.sampling(period).steps
    assert records.sampling(period).sampling_probability == pytest.approx(
        drawn.sampling(period).sampling_probability
    )
    assert len(set(records.digests(period))) == len(set(drawn.digests(period))) == 2


def test_joined_records_keep_their_order(days: str, tmp_path: Path) -> None:
    reader = RecordReader(config_of(days), tmp_path)
    (period, *_) = periods_of(day_files(days), 3)
    joined = reader.source(period)
    parts = [JoinedRecords([reader._prepared(path).path]) for path in period.files]
    indices = np.array([0, 2 * ROWS, 1, ROWS, 3 * ROWS - 1])
    x, y = joined.gather(indices)
    for place, index in enumerate(indices):
        own_x, own_y = parts[index // ROWS].gather(np.array([index % ROWS]))
        assert y[place] == own_y[0]
        np.testing.assert_array_equal(x["categories"][place], own_x["categories"][0])


def command(days: str, folder: Path, *more: str) -> list[str]:
    given = ["--config=configs/criteo_time_series.py", f"--config.data.days={days}"]
    given += [f"--config.directory={folder}", f"--config.data.train_days={TRAIN_DAYS}"]
    given += [f"--config.data.vocabularies={SIZES}", "--config.hidden=(4,)"]
    given += ["--config.training.batch_size=80", "--config.training.epochs=2.0"]
    return [sys.executable, "-m", "pipelines.criteo.time_series", *given, *more]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_at_the_epsilon_of_an_undisturbed_one(
    days: str, tmp_path: Path
) -> None:
    """SIGKILL in every period, once it has a checkpoint or soon after the last one ended."""
    folder, more = tmp_path / "run", ["--config.checkpoint_seconds=0.01"]
    more.append(f"--config.export={tmp_path / 'exports'}")
    resume: list[str] = []
    for number in range(TRAIN_DAYS):
        process = subprocess.Popen(
            command(days, folder, *more, *resume), cwd=ROOT, env=environment()
        )
        until = time.monotonic() + HANG
        while not list(folder.glob(f"period-{number:03d}/checkpoints/*")):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
        time.sleep(0.3 * number)
        process.send_signal(signal.SIGKILL)
        process.wait(HANG)
        resume = ["--resume"]
    ended = subprocess.run(
        command(days, folder, *more, "--resume"),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads((folder / "result.json").read_text())
    plans = plans_in(folder)
    assert result["steps"] == sum(plan.sampling.steps for plan in plans.values())
    assert result["epsilon"] == max(p.spent(p.sampling.steps).epsilon for p in plans.values())
    assert dp_sparse.check_export(tmp_path / "exports/period-001").statement == result["statement"]


@pytest.mark.slow
def test_command_line(days: str, tmp_path: Path) -> None:
    """From its files to its result; a second run is refused without --resume."""
    folder = tmp_path / "run"
    for expected, more in ((0, []), (1, []), (1, ["--resume", "--config.seed=3"])):
        done = subprocess.run(
            command(days, folder, "--config.period=2", *more),
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        assert done.returncode == expected, done.stderr
        if not expected:
            assert "after days 0 to 1: AUC" in done.stdout
            assert "A person with an example in every part pays in each" in done.stdout
    assert "Expected the config with which the run" in done.stderr
