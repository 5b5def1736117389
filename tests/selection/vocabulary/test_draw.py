"""What a plan pays for is drawn once: values as the reference has them, noise as it is paid."""

import concurrent.futures
import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import scipy.stats

import dp_sparse
from dp_sparse.accounting import note_folder
from dp_sparse.core import BadExampleError, PrivacyError
from dp_sparse.selection.vocabulary.counting import ValueCounts
from dp_sparse.selection.vocabulary.draw import released
from dp_sparse.selection.vocabulary.threshold import VocabularyNoise, noise_paid_by
from dp_sparse.selection.vocabulary.vocabulary import VocabularyDraw
from tests.reference import vocabulary as reference
from tests.selection.vocabulary.cases import (
    NOISE,
    drawn,
    paying_plan,
    recorded_noise,
    without_noise,
)
from tests.training_cases import plan_for

N = 600


def data(seed: int = 0) -> dict[str, np.ndarray]:
    """Few values that many have, many values that few have, in two columns of text and one of
    integers."""
    rng = np.random.default_rng(seed)
    cities = [f"city {min(c, 60)}" for c in rng.zipf(1.5, N)]
    words = np.array([f"w{min(w, 90)}" for w in rng.zipf(1.4, 3 * N)]).reshape(N, 3)
    return {"city": np.array(cities), "words": words, "item": np.minimum(rng.zipf(1.5, N), 60)}


def votes(x: dict[str, np.ndarray], cap: int) -> dict[tuple[str, Any], int]:
    examples = [{name: np.ravel(v[i]).tolist() for name, v in x.items()} for i in range(N)]
    return reference.counts(examples, cap)


def pairs(found: dp_sparse.PrivateVocabulary) -> dict[str, list[tuple[Any, int]]]:
    return {
        name: list(zip(found[name], found.noisy_counts[name].tolist(), strict=True))
        for name in found.values
    }


@pytest.mark.parametrize("cap", [3, 4, 5])
def test_without_noise_it_is_the_reference(cap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    without_noise(monkeypatch)
    total, x = votes(data(), cap), data()
    expected = reference.released(total, [0.0] * len(total), NOISE.threshold(cap))
    found = pairs(drawn(x, max_values=cap))
    assert found == expected and all(3 < len(each) < 60 for each in found.values())


@pytest.mark.parametrize("seed", range(3))
def test_with_recorded_noise_it_is_the_reference(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise, x, cap = recorded_noise(monkeypatch), data(seed), 5
    found = pairs(drawn(x, max_values=cap))
    total = votes(x, cap)
    by_column = {key: total[key] for name in x for key in total if key[0] == name}
    scaled = [value * 2.0 * cap**0.5 for value in noise]
    assert found == reference.released(by_column, scaled, NOISE.threshold(cap))


class TestNoise:
    VALUES, CAP, LARGE = 40_000, 9, 10**6

    def noise(self, sigma: float) -> np.ndarray:
        """Of values that all are released."""
        counts = ValueCounts([*range(self.VALUES)], np.full(self.VALUES, self.LARGE))
        draw = VocabularyDraw(VocabularyNoise(sigma, 1e-3), self.CAP, "run", "draw")
        return released({"c": counts}, draw).noisy_counts["c"] - self.LARGE

    def p_value(self, noise: np.ndarray, sigma: float) -> float:
        """Of its variance: σ²·m, and 1/12 of rounding."""
        statistic = np.sum(noise.astype(float) ** 2) / (sigma**2 * self.CAP + 1 / 12)
        tails = (
            scipy.stats.chi2(len(noise)).cdf(statistic),
            scipy.stats.chi2(len(noise)).sf(statistic),
        )
        return float(2 * min(tails))

    def test_it_has_the_deviation_that_is_paid(self) -> None:
        noise = self.noise(4.0)
        assert noise.dtype == np.int64 and len(noise) == self.VALUES
        assert self.p_value(noise, 4.0) > 1e-6
        spread = noise + np.random.default_rng(0).uniform(-0.5, 0.5, len(noise))
        assert scipy.stats.kstest(spread / 12.0, "norm").pvalue > 1e-6

    @pytest.mark.parametrize("factor", [2 / 3, 3 / 2, 1.05, 1 / 3])
    def test_another_deviation_is_seen(self, factor: float) -> None:
        assert self.p_value(self.noise(factor * 4.0), 4.0) < 1e-6

    def test_each_draw_and_each_column_has_its_own(self) -> None:
        counts = ValueCounts([*range(2000)], np.full(2000, self.LARGE))
        draw = VocabularyDraw(NOISE, 1, "run", "draw")
        found = [released({"a": counts, "b": counts}, draw) for _ in range(2)]
        noise = []
        for name in ("a", "b"):
            for each in found:
                noise.append(each.noisy_counts[name][np.argsort(each[name])])
        assert np.all(np.abs(np.corrcoef(noise)[np.triu_indices(4, 1)]) < 6 / 2000**0.5)


class TestReserve:
    SAMPLING = dp_sparse.StreamSampling(2000, 500)
    PLAN = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(2.0, 1e-4), SAMPLING)

    def test_training_and_vocabulary_together_meet_the_budget(self) -> None:
        reserved = dp_sparse.reserve_vocabulary(self.PLAN, share=0.1)
        noise = noise_paid_by(reserved.releases)
        assert noise is not None and noise.delta == pytest.approx(1e-5)
        plan = reserved.calibrate()
        assert 1.99 < plan.spent(4).epsilon <= 2.0
        alone = dataclasses.replace(plan, releases=()).spent(4).epsilon
        assert alone == pytest.approx(0.9 * 2.0, rel=2e-3)
        cities = np.repeat(["Rome", "Oslo", "Bonn"], [1200, 799, 1])
        found = dp_sparse.private_vocabulary({"city": cities}, "city", plan, progress=False)
        assert found["city"] == ["Rome", "Oslo"] and found.release in plan.releases

    @pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 2, float("nan"), "half"])
    def test_a_share_out_of_range(self, share: Any) -> None:
        with pytest.raises(ValueError, match="Expected 0 < share < 1, got share="):
            dp_sparse.reserve_vocabulary(self.PLAN, share=share)

    def test_a_plan_that_pays_already(self) -> None:
        with pytest.raises(ValueError, match="Expected a plan without a private vocabulary"):
            dp_sparse.reserve_vocabulary(paying_plan(N))

    def test_no_plan(self) -> None:
        with pytest.raises(ValueError, match="Expected a PrivacyPlan, got plan=0.5"):
            dp_sparse.reserve_vocabulary(0.5)  # type: ignore[arg-type]


class TestPayment:
    def test_a_plan_that_does_not_pay(self) -> None:
        with pytest.raises(ValueError, match=r"pays for a vocabulary, got .*\[\].*\nReserve it"):
            dp_sparse.private_vocabulary(data(), "city", plan_for(N), progress=False)

    def test_a_plan_without_noise(self) -> None:
        plan = dataclasses.replace(paying_plan(N), noise_multiplier=None)
        with pytest.raises(ValueError, match="Expected a calibrated plan, got one without noise"):
            dp_sparse.private_vocabulary(data(), "city", plan, progress=False)

    def test_no_plan(self) -> None:
        with pytest.raises(ValueError, match="Expected a PrivacyPlan, got plan=None"):
            dp_sparse.private_vocabulary(data(), "city", None, progress=False)  # type: ignore[arg-type]

    def test_the_second_call_gets_the_same(self) -> None:
        plan, x = paying_plan(N), data()

        def ask(columns: Any, **options: Any) -> dp_sparse.PrivateVocabulary:
            return dp_sparse.private_vocabulary(x, columns, plan, progress=False, **options)

        first = ask("city")
        assert ask("city") is first and ask(["city"], max_values=1) is first
        for columns, options, told in [
            (["city", "item"], {}, r"columns=\('city',\), got columns=\('city', 'item'\)"),
            ("city", {"max_values": 2}, "max_values=1, got max_values=2"),
            ("city", {"padding_value": 0}, "padding_value=None, got padding_value=0"),
        ]:
            with pytest.raises(PrivacyError, match=f"was drawn with {told}"):
                ask(columns, **options)

    def test_of_several_threads_one_draws(self) -> None:
        plan, x = paying_plan(N), data()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = pool.map(
                lambda _: dp_sparse.private_vocabulary(x, "city", plan, progress=False), range(4)
            )
        assert len({each.draws[0].draw_id for each in found}) == 1

    def test_what_is_refused_draws_nothing(self) -> None:
        """A plan still pays after an error of its user."""
        plan, x = paying_plan(N), data()
        mixed = np.array([*x["city"][:-1].tolist(), 7], object)
        with pytest.raises(BadExampleError):
            dp_sparse.private_vocabulary({"city": mixed}, "city", plan, progress=False)
        assert dp_sparse.private_vocabulary(x, "item", plan, progress=False)["item"]

    def test_the_plan_of_a_run_with_a_folder(self) -> None:
        plan = paying_plan(N)
        note_folder(plan.run_id)
        with pytest.raises(PrivacyError, match=r"Call run.private_vocabulary\(examples, columns\)"):
            dp_sparse.private_vocabulary(data(), "city", plan, progress=False)


@pytest.mark.parametrize("columns", [[], ["city", "city"], [3], ""])
def test_bad_columns(columns: Any) -> None:
    with pytest.raises(ValueError, match="Expected columns"):
        dp_sparse.private_vocabulary(data(), columns, paying_plan(N), progress=False)


@pytest.mark.parametrize("cap", [0, -1, 1.5, float("nan"), "two"])
def test_a_cap_that_is_no_whole_number(cap: Any) -> None:
    with pytest.raises(ValueError, match="Expected max_values to be a whole number > 0, got max"):
        drawn({"city": data()["city"]}, max_values=cap)


def test_a_cap_below_the_number_of_columns() -> None:
    with pytest.raises(ValueError, match="Expected max_values of at least 3, the number of col"):
        drawn(data(), max_values=2)


@pytest.mark.parametrize("padding", [1.0, "", True])
def test_padding_that_is_no_integer(padding: Any) -> None:
    with pytest.raises(ValueError, match="Expected padding_value to be an int"):
        drawn({"item": data()["item"]}, padding_value=padding)


def test_keras_looks_values_up() -> None:
    found = drawn(data(), max_values=5)
    cities = keras.layers.StringLookup(vocabulary=found["city"])
    items = keras.layers.IntegerLookup(vocabulary=found["item"])
    np.testing.assert_array_equal(
        cities(np.array(found["city"])), 1 + np.arange(len(found["city"]))
    )
    np.testing.assert_array_equal(items(np.array(found["item"])), 1 + np.arange(len(found["item"])))
    assert np.ravel(cities(np.array(["city of one"]))) == 0 and np.ravel(items([10**6])) == 0


def test_no_value_that_enough_examples_have() -> None:
    assert drawn({"user": np.arange(50), "text": np.full(50, "")})["text"] == []


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    dp_sparse.private_vocabulary(data(), "city", paying_plan(N))
    assert "examples" in capsys.readouterr().err
