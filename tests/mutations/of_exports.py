"""Faults of what leaves training: exports and their deltas."""

from tests.mutations.fault import Fault

_FULL = "dp_sparse/export/full.py"
_DELTA = "dp_sparse/export/delta.py"
_KERAS = "dp_sparse/export/keras_folder.py"
_CARD = "dp_sparse/runs/card.py"
_OF_CARD = "tests/runs/test_card.py"
_OF_FULL = "tests/export/test_full.py"
_OF_DELTA = "tests/export/test_delta.py"
_OF_PUBLISHING = "tests/export/test_publishing.py"

_MADE = "dp_sparse/runs/make_private.py"
_OF_MADE = "tests/runs/test_make_private.py"

FAULTS = (
    Fault(
        "copied_weights_forget_what_trained_them",
        "dp_sparse/runs/normalisation.py",
        "        take_over([*zip(kept, after.weights, strict=True)])\n",
        "",
        (f"{_OF_MADE}::test_copied_weights_keep_what_trained_them",),
    ),
    Fault(
        "a_statement_of_a_plan_that_did_not_train",
        _MADE,
        "        if plan is None or plan.run_id != self.plan.run_id:\n",
        "        if plan is None:\n",
        (f"{_OF_MADE}::test_an_optimizer_of_another_plan_has_no_statement",),
    ),
    Fault(
        "an_export_that_no_checkpoint_covers",
        _FULL,
        "    optimizer.before_publishing()\n",
        "",
        (_OF_PUBLISHING,),
    ),
    Fault(
        "an_export_amid_steps",
        _FULL,
        "        check()\n",
        "",
        (f"{_OF_PUBLISHING}::test_what_another_thread_trains_meanwhile_is_not_written[export]",),
    ),
    Fault(
        "a_delta_amid_steps",
        _DELTA,
        "        check()\n",
        "",
        (f"{_OF_PUBLISHING}::test_what_another_thread_trains_meanwhile_is_not_written[delta]",),
    ),
    Fault(
        "a_saved_model_amid_steps",
        "dp_sparse/training/compile_hook.py",
        "        check()\n",
        "",
        (f"{_OF_PUBLISHING}::test_what_another_thread_trains_meanwhile_is_not_written[save]",),
    ),
    Fault(
        "a_checkpoint_amid_steps",
        "dp_sparse/training/checkpoint_files.py",
        "            check()\n",
        "",
        (
            f"{_OF_PUBLISHING}::"
            "test_what_another_thread_trains_meanwhile_is_not_written[checkpoint]",
        ),
    ),
    Fault(
        "steps_between_two_runs_count_as_saved",
        "dp_sparse/training/checkpoint.py",
        "        self._sigterm.wait()\n",
        "        self._sigterm.wait()\n        self._covered.step = self._step()\n",
        (f"{_OF_PUBLISHING}::test_steps_that_no_callback_saved_are_saved_before_the_next_run",),
    ),
    Fault(
        "optimizer_and_metrics_travel_with_an_export",
        _KERAS,
        "    return {id(each) for each in given if each is not None}\n",
        "    return {id(each) for each in given if each is None}\n",
        (f"{_OF_FULL}::test_statistics_without_noise_and_the_optimizer_stay_behind",),
    ),
    Fault(
        "a_layers_metric_travels_with_an_export",
        _KERAS,
        "        if id(value) in self._unnoised:",
        "        if id(value) in self._unnoised and not self.found:",
        (f"{_OF_FULL}::test_statistics_without_noise_and_the_optimizer_stay_behind",),
    ),
    Fault(
        "a_delta_of_delayed_noise",
        _DELTA,
        "    if optimizer.delays_noise:\n",
        "    if not optimizer.replicable and not optimizer.delays_noise:\n",
        (f"{_OF_DELTA}::TestRefused::test_lazy_dp",),
    ),
    Fault(
        "the_statement_of_the_whole_plan",
        _FULL,
        "optimizer.plan.statement(steps)",
        "optimizer.plan.statement()",
        (f"{_OF_FULL}::test_the_statement_is_of_the_steps_so_far",),
    ),
    Fault(
        "an_earlier_plan_forgotten",
        "dp_sparse/optimizers/training_history.py",
        "if plan is None or plan.run_id not in counted]",
        "if plan is None]",
        (f"{_OF_FULL}::test_a_second_plan_does_not_hide_the_first",),
    ),
    Fault(
        "training_without_privacy_forgotten",
        "dp_sparse/optimizers/training_history.py",
        "optimizer.steps_spent if private else optimizer._iterations,",
        "optimizer.steps_spent if private else keras.Variable(0),",
        (f"{_OF_FULL}::test_training_without_privacy_is_said",),
    ),
    Fault(
        "copies_owe_no_frequencies",
        "dp_sparse/layers/variance_layers.py",
        "owed = None if self.release is None or self.is_paid else self.release.get_config()",
        "owed = None",
        ("tests/layers/test_re_attention.py::test_a_copy_owes_what_its_model_owed",),
    ),
    Fault(
        "exports_do_not_ask_who_pays_for_frequencies",
        "dp_sparse/export/full.py",
        "        if isinstance(layer, RestsOnRelease):\n",
        "        if layer is None:\n",
        ("tests/layers/test_re_attention.py::test_an_export_asks_who_pays",),
    ),
    Fault(
        "a_refused_fit_pays_for_frequencies",
        "dp_sparse/layers/paid.py",
        "self._steps_paid() > 0",
        "self._steps_paid() >= 0",
        ("tests/layers/test_re_attention.py::test_a_plan_pays_with_its_first_step",),
    ),
    Fault(
        "a_delta_over_any_base",
        "dp_sparse/export/delta.py",
        "        if delta.base != digest:\n",
        "        if delta.base == delta.digest != digest:\n",
        (f"{_OF_DELTA}::TestRefused::test_a_delta_of_another_base",),
    ),
    Fault(
        "a_card_with_a_histogram_that_nobody_pays_for",
        _CARD,
        "    if histogram.budget is None and not histogram.is_paid_in(export.statement):\n",
        "    if histogram.budget is not None and not histogram.is_paid_in(export.statement):\n",
        (f"{_OF_CARD}::test_calibrations_that_the_statement_leaves_out_are_rejected",),
    ),
    Fault(
        "a_card_with_a_histogram_of_other_steps",
        _CARD,
        "    if histogram.steps != export.steps:\n",
        "    if histogram.steps > export.steps:\n",
        (f"{_OF_CARD}::test_calibrations_that_the_statement_leaves_out_are_rejected",),
    ),
    Fault(
        "values_without_noise_stand_unmarked_on_a_card",
        _CARD,
        "        parts += [[_NOT_COVERED], _table(",
        "        parts += [_table(",
        (f"{_OF_CARD}::test_released_measures_stand_apart_from_those_that_no_epsilon_covers",),
    ),
)
