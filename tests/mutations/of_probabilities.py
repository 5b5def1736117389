"""Faults of the histogram of scores, and of what keeps it from being drawn twice."""

from tests.mutations.fault import Fault

_HISTOGRAM = "dp_sparse/probabilities/score_histogram.py"
_CALIBRATION = "dp_sparse/probabilities/calibration.py"
_PREDICTIONS = "dp_sparse/probabilities/predictions.py"
_GUARD = "dp_sparse/guards/predictions.py"
_EXPORT = "dp_sparse/export/full.py"
_RUN_FOLDER = "dp_sparse/runs/run_folder.py"

_OF_HISTOGRAM = "tests/probabilities/test_score_histogram.py"
_OF_CALIBRATION = "tests/probabilities/test_calibration.py"
_OF_ATTACKS = "tests/attacks/test_scores.py"

FAULTS = (
    Fault(
        "weights_of_scores_beyond_the_cap",
        _HISTOGRAM,
        "np.minimum(weights, self._cap) / self._cap",
        "weights / self._cap",
        (f"{_OF_HISTOGRAM}::test_one_example_changes_the_counts_by_one_at_most",),
    ),
    Fault(
        "noise_of_scores_in_units_in_place_of_counts",
        _HISTOGRAM,
        "gaussian_values(self._counts.size) * UNITS * noise_multiplier",
        "gaussian_values(self._counts.size) * noise_multiplier",
        (f"{_OF_HISTOGRAM}::test_noise_has_the_deviation_that_is_paid",),
    ),
    Fault(
        "scores_rounded_up",
        _HISTOGRAM,
        "np.floor(UNITS * share * part)",
        "np.ceil(UNITS * share * part)",
        (f"{_OF_HISTOGRAM}::test_one_example_changes_the_counts_by_one_at_most",),
    ),
    Fault(
        "a_second_histogram_of_scores",
        _CALIBRATION,
        "            _DRAWN[payer] = _Drawn(histogram, weakref.ref(model))",
        "            pass",
        (f"{_OF_ATTACKS}::test_a_second_histogram_of_one_plan_is_refused_or_the_same",),
    ),
    Fault(
        "predictions_that_mix_are_counted",
        _PREDICTIONS,
        "            compared = refuse_mixed_predictions(model, predict, x)",
        "            pass",
        (f"{_OF_ATTACKS}::test_predictions_that_mix_examples_are_refused",),
    ),
    Fault(
        "predictions_beside_the_data_alone",
        _GUARD,
        "        others += rebatching.of_other_values(places, present, takes_nan)",
        "        pass",
        (f"{_OF_ATTACKS}::test_predictions_that_mix_examples_are_refused",),
    ),
    Fault(
        "labels_out_of_range_are_counted",
        _PREDICTIONS,
        "bad = np.flatnonzero(~((labels >= 0) & (labels <= 1)))",
        "bad = np.flatnonzero(labels < -np.inf)",
        (f"{_OF_CALIBRATION}::test_bad_examples_are_told_before_anything_is_drawn",),
    ),
    Fault(
        "a_calibration_of_another_plan_is_exported",
        _EXPORT,
        "if any(made.paid_by is not None and made.paid_by not in counted for made in found):",
        "if False:",
        (f"{_OF_ATTACKS}::test_the_histogram_of_another_plan_does_not_leave_with_a_model",),
    ),
    Fault(
        "an_export_without_the_budget_of_its_calibration",
        _EXPORT,
        "return [made.statement for made in found if made.statement]",
        "return []",
        (f"{_OF_CALIBRATION}::test_examples_apart_have_a_budget_of_their_own_which_exports_state",),
    ),
    Fault(
        "a_lost_histogram_of_a_run_is_drawn_again",
        _RUN_FOLDER,
        "        self._refuse_lost(name)\n        self.begin()\n        made = make()\n",
        "        self.begin()\n        made = make()\n",
        (f"{_OF_ATTACKS}::test_the_histogram_of_a_run_is_drawn_once",),
    ),
    Fault(
        "a_histogram_of_a_run_beside_its_folder",
        _CALIBRATION,
        "    if budget is None and has_folder(optimizer.plan.run_id) and not kept:",
        "    if False:",
        (f"{_OF_ATTACKS}::test_the_histogram_of_a_run_is_drawn_once",),
    ),
    Fault(
        "sources_of_scores_that_mix",
        _PREDICTIONS,
        "        check_source(examples)",
        "        pass",
        (f"{_OF_ATTACKS}::test_sources_that_mix_or_repeat_are_refused",),
    ),
    Fault(
        "scores_of_more_examples_than_the_plans",
        _PREDICTIONS,
        "if of_plan is not None and given not in (None, of_plan):",
        "if False:",
        (f"{_OF_ATTACKS}::test_examples_of_other_days_are_not_those_of_the_plan_that_pays",),
    ),
    Fault(
        "integers_of_others_stay_as_they_are",
        _GUARD,
        "                made[other.replaced] = extreme(data)",
        "                pass",
        (f"{_OF_ATTACKS}::test_mixing_that_long_rows_of_ids_show_is_refused",),
    ),
    Fault(
        "a_first_chunk_of_one_example_counts_as_compared",
        _GUARD,
        "        return False",
        "        return True",
        (f"{_OF_ATTACKS}::test_a_first_chunk_of_one_example_does_not_hide_mixing",),
    ),
    Fault(
        "a_run_draws_under_a_copy_of_its_plan",
        "dp_sparse/runs/run_checkpoint.py",
        "own.run_id != self.plan.run_id",
        "own.plan_id != self.plan.plan_id",
        (f"{_OF_ATTACKS}::test_a_run_draws_nothing_that_its_plan_does_not_pay",),
    ),
)
