"""Faults of selection over windows: noise, sums that live too long, and what is saved."""

from tests.mutations.fault import Fault

_WINDOW = "dp_sparse/optimizers/window.py"
_ADAFEST = "dp_sparse/optimizers/adafest.py"
_OF_WINDOW = "tests/optimizers/test_window.py"
_OF_RUNS = "tests/optimizers/test_windowed_adafest.py"
_OF_OTHERS = "tests/optimizers/test_windows_of_others.py"
_RESUMED = f"{_OF_RUNS}::test_a_resumed_run_keeps_survivors_and_begins_a_new_window"

FAULTS = (
    Fault(
        "a_window_with_the_noise_of_one_map",
        _WINDOW,
        "values = tf.cast(units, tf.float64) * (by.unit / tf.sqrt(rounds))",
        "values = tf.cast(units, tf.float64) * by.unit",
        (f"{_OF_WINDOW}::test_survivors_have_the_right_frequency[10]",),
    ),
    Fault(
        "a_pass_counts_once_for_a_window_of_several",
        _WINDOW,
        "is_new = tf.cast(tf.not_equal(progress[_LAST_ROUND], now + 1), tf.int64)",
        "is_new = tf.cast(tf.equal(progress[_STEPS], 0), tf.int64)",
        (f"{_OF_WINDOW}::test_a_pass_counts_as_one_round",),
    ),
    Fault(
        "every_batch_is_a_round_of_its_own_only_in_a_stream",
        _ADAFEST,
        "window.add(row_ids, units, step // self.plan.sampling.steps_per_round, draw, by)",
        "window.add(row_ids, units, 0 * step, draw, by)",
        ("tests/attacks/test_windows.py::test_a_run_shows_no_more_than_its_plan_accounts_for[4]",),
    ),
    Fault(
        "a_sum_that_outlives_its_window",
        _WINDOW,
        "            variable.assign(nothing, read_value=False)\n"
        "        self._progress.assign(tf.zeros([5], tf.int64), read_value=False)\n",
        "            del variable, nothing\n"
        "        self._progress.assign(progress * [0, 0, 0, 1, 1], read_value=False)\n",
        (f"{_OF_WINDOW}::test_the_sum_is_exact_and_gone_when_its_window_ends",),
    ),
    Fault(
        "a_sum_that_goes_on_under_another_key",
        _WINDOW,
        "return tf.where(is_same, self._progress.read_value(), 0)",
        "return self._progress.read_value()",
        (f"{_OF_WINDOW}::test_another_key_begins_a_new_window",),
    ),
    Fault(
        "a_window_that_ends_when_its_sum_is_full",
        _WINDOW,
        "ends = steps >= _length(self._ended.read_value(), self.longest)",
        "ends = (steps >= _length(self._ended.read_value(), self.longest)) | ~fits",
        (f"{_OF_WINDOW}::test_survivors_are_those_of_dense_vectors",),
    ),
    Fault(
        "maps_that_are_lost_when_they_are_merged",
        _WINDOW,
        "units = tf.concat([self._sum_units[:merged], self._new_units[:filled]], 0)",
        "units = tf.concat([0 * self._sum_units[:merged], self._new_units[:filled]], 0)",
        (f"{_OF_WINDOW}::test_survivors_are_those_of_dense_vectors",),
    ),
    Fault(
        "the_map_of_a_step_that_was_refused",
        "dp_sparse/step/train_step.py",
        "        replicas.merged(lambda: optimizer.remember(sums.to_remember, draw, spent - 1))\n",
        "        pass\n"
        "    replicas.merged(lambda: optimizer.remember(sums.to_remember, draw, spent - 1))\n"
        "    with tf.control_dependencies([sums.amounts.counts]):\n",
        (f"{_OF_RUNS}::test_a_refused_step_is_not_in_the_sum",),
    ),
    Fault(
        "the_sum_of_a_window_in_a_checkpoint",
        _ADAFEST,
        "            store[_SURVIVORS] =",
        "            store['sum'] = self._window._new_units.numpy()\n"
        "            store[_SURVIVORS] =",
        (_RESUMED,),
    ),
    Fault(
        "first_rows_that_nobody_paid_for",
        _ADAFEST,
        'checked_rows(first_rows, self.plan, "first_rows")',
        "pass",
        (f"{_OF_RUNS}::test_first_rows_are_paid_for",),
    ),
    Fault(
        "rows_of_a_window_that_rows_rule_out",
        _ADAFEST,
        "own = [np.flatnonzero(np.isin(rows, kept)) for rows, kept in among if len(rows)]",
        "own = [np.arange(len(rows)) for rows, kept in among if len(rows)]",
        (f"{_OF_RUNS}::test_rows_restrict_what_survives_and_first_rows_begin[graph]",),
    ),
    Fault(
        "units_that_float64_rounds",
        "dp_sparse/selection/contribution.py",
        "2 ** (_EXACT_BITS - math.ceil(math.log2(examples))) if examples > _FEW else _UNITS",
        "_UNITS",
        ("tests/selection/test_contribution.py::test_sums_over_a_window_are_exact",),
    ),
    Fault(
        "a_sum_that_training_code_may_read",
        _WINDOW,
        "return [self._progress, self._sum_ids, self._sum_units, self._new_ids, self._new_units]",
        "return []",
        (f"{_OF_RUNS}::test_a_schedule_cannot_read_the_sum",),
    ),
    Fault(
        "rounds_of_a_pipeline_count_from_its_first_batch",
        "dp_sparse/distribution/embedding_layers/host_step.py",
        "self._steps + draw.number,",
        "draw.number,",
        (
            "tests/distribution/embedding_layers/test_windows.py::"
            "test_rounds_are_counted_by_the_steps_of_the_run[True-2]",
        ),
    ),
    Fault(
        "two_threads_add_their_maps_at_once",
        _WINDOW,
        "self._section.execute(lambda: self._add(row_ids, units, now, draw, by))",
        "self._add(row_ids, units, now, draw, by)",
        (f"{_OF_OTHERS}::test_maps_of_two_threads_are_added_one_after_the_other",),
    ),
    Fault(
        "a_map_counts_under_the_number_of_another_thread",
        _ADAFEST,
        "self._add_to(self._window, of_step, draw, step)",
        "self._add_to(self._window, of_step, draw, self.steps_spent.value - 1)",
        (f"{_OF_OTHERS}::test_a_step_counts_under_its_own_number",),
    ),
    Fault(
        "workers_whose_windows_differ",
        _ADAFEST,
        "super().state_of_choice() if self._window is None else self._window.fingerprint()",
        "super().state_of_choice()",
        (f"{_OF_OTHERS}::test_the_state_of_a_choice_is_that_of_its_window",),
    ),
    Fault(
        "survivors_that_no_checkpoint_remembers",
        _ADAFEST,
        "        self.before_publishing()\n        return self._survivors_now()\n",
        "        return self._survivors_now()\n",
        (f"{_OF_OTHERS}::test_a_checkpoint_is_written_before_rows_are_shown",),
    ),
    Fault(
        "rows_for_which_there_is_room_are_the_first_ones",
        _WINDOW,
        "order = tf.argsort(noise.uniform(draw, noise.Purpose.PICKS, tf.size(row_ids)))",
        "order = tf.range(tf.size(row_ids))",
        (f"{_OF_WINDOW}::test_rows_for_which_there_is_room_are_drawn_evenly",),
    ),
    Fault(
        "first_rows_of_another_plan_in_a_file",
        _ADAFEST,
        "if not ended:  # the rows of a plan that may not be this one's",
        "if ended < 0:",
        (f"{_OF_OTHERS}::test_first_rows_of_another_plan_are_not_taken_over[load_weights]",),
    ),
    Fault(
        "survivors_that_are_taken_over_unsaved",
        "dp_sparse/optimizers/keras_wrapper.py",
        "        previous.before_publishing()  # what is taken over may be shown\n",
        "",
        (f"{_OF_OTHERS}::test_a_checkpoint_is_written_before_survivors_are_taken_over",),
    ),
    Fault(
        "copies_of_a_window_with_its_sum",
        _WINDOW,
        "        return SelectionWindow(self.longest)\n",
        "        return self\n",
        (f"{_OF_OTHERS}::test_a_copy_of_a_window_is_empty",),
    ),
    Fault(
        "windows_beyond_the_reach_of_their_noise",
        "dp_sparse/accounting/mechanisms.py",
        "        window //= 2\n",
        "        break\n",
        (f"{_OF_OTHERS}::test_windows_are_as_long_as_their_noise_reaches",),
    ),
)
