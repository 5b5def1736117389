"""Faults of a step as a whole: division, replicas, micro-batches, checkpoints, logs."""

from tests.mutations.fault import Fault

_SPARSE = "dp_sparse/optimizers/sparse_base.py"
_TRAIN_STEP = "dp_sparse/step/train_step.py"
_MICROBATCHES = "dp_sparse/step/train_step.py"
_REPLICAS = "dp_sparse/core/replicas.py"
_ACCOUNT = "dp_sparse/optimizers/step_account.py"

_OF_TRAIN_STEP = "tests/training/test_train_step.py"
_OF_MIRRORED = "tests/distribution/test_mirrored.py"
_OF_MICROBATCHES = "tests/training/test_microbatches.py"
_MONITOR = "dp_sparse/reports/monitor.py"
_OF_MONITOR = "tests/training/test_monitor.py"
_OF_CHECKPOINT = "tests/training/test_checkpoint.py"
_OF_RESUME = "tests/training/test_resume.py"

_OF_MOVIELENS = "tests/pipelines/test_movielens.py"
_OF_OFFLINE = "tests/sampling/test_offline.py"

FAULTS = (
    Fault(
        "records_of_a_part_not_checked",
        "dp_sparse/step/forward_backward.py",
        "losses = led_by_batch(used, found.of_examples, examples.present)",
        "losses = found.of_examples",
        (f"{_OF_MICROBATCHES}::test_records_of_a_part_must_lead_with_the_part",),
    ),
    Fault(
        "a_loss_without_its_call_is_trained",
        "dp_sparse/step/unsupported.py",
        'if issubclass(kind, keras.losses.Loss) and is_own(kind, "__call__")',
        'if issubclass(kind, keras.losses.Loss) and is_own(kind, "get_config")',
        ("tests/training/test_losses.py::test_a_loss_with_a_call_of_its_own_is_refused_by_class",),
    ),
    Fault(
        "nan_under_bfloat16_not_refused",
        "dp_sparse/step/environment.py",
        "lost |= present & tf.reduce_any(~tf.math.is_finite(flat), axis=1)",
        "del flat",
        ("tests/guards/test_isolation.py::test_nan_is_told_where_products_let_it_through",),
    ),
    Fault(
        "ties_in_the_order_of_the_dataset",
        "pipelines/movielens/interactions.py",
        'np.lexsort((items, columns["timestamp"]))',
        'np.argsort(columns["timestamp"], kind="stable")',
        ("tests/pipelines/test_movielens.py::test_the_order_of_a_dataset_changes_no_user",),
    ),
    Fault(
        "users_of_too_few_interactions_train",
        "pipelines/movielens/users.py",
        "least = max(config.min_interactions, 3)",
        "least = config.min_interactions",
        (f"{_OF_MOVIELENS}::test_the_filter_keeps_the_users_whose_items_judge",),
    ),
    Fault(
        "a_filter_of_other_users_than_those_whose_items_judge",
        "pipelines/movielens/users.py",
        "(number[each] for each in users.earlier)",
        "(number[each] for each in users.earlier if len(each) > 2)",
        (f"{_OF_MOVIELENS}::test_the_filter_keeps_the_users_whose_items_judge",),
    ),
    Fault(
        "weights_of_a_source_of_another_length",
        "dp_sparse/sampling/base.py",
        '{"x": x, "y": y, "sample_weight": weights}',
        '{"x": x, "y": y}',
        ("tests/sampling/test_data_source.py::test_weights_of_another_length_are_refused",),
    ),
    Fault(
        "weights_of_prepared_batches_of_another_length",
        "dp_sparse/sampling/offline/batches.py",
        "_row_checks((x, y, weights), manifest.capacity)",
        "_row_checks((x, y), manifest.capacity)",
        (f"{_OF_OFFLINE}::test_weights_of_another_length_are_refused",),
    ),
    Fault(
        "steps_whose_weights_were_lost_are_not_stated",
        "pipelines/steps.py",
        "optimizer.steps_spent if private else optimizer.iterations",
        "optimizer.iterations",
        ("tests/pipelines/test_steps.py::test_steps_whose_weights_were_lost_count",),
    ),
    Fault(
        "a_fit_without_the_checkpoint_that_restored_it",
        "dp_sparse/training/callback_guard.py",
        "if checkpointed_steps_of(optimizer) is not None:",
        "if checkpointed_steps_of(optimizer) is True:",
        (f"{_OF_CHECKPOINT}::TestRefused::test_a_fit_without_it",),
    ),
    Fault(
        "a_second_checkpoint_of_a_run",
        "dp_sparse/training/checkpoint.py",
        "if checkpointed_steps_of(optimizer) not in (None, self._covered):",
        "if checkpointed_steps_of(optimizer) is True:",
        (f"{_OF_CHECKPOINT}::TestRefused::test_a_second_one_of_the_same_run",),
    ),
    Fault(
        "a_run_that_lost_its_config_begins_again",
        "dp_sparse/runs/run_folder.py",
        "        if remains:\n",
        "        if False:\n",
        (
            "tests/pipelines/test_runs.py::TestDirectory::"
            "test_a_run_that_lost_its_config_is_not_begun_again",
        ),
    ),
    Fault(
        "a_paid_release_is_made_again",
        "dp_sparse/runs/run_folder.py",
        "if self.has_checkpoints or (self.resumes and (self.path / _PLAN).exists()):",
        "if False:",
        ("tests/runs/test_run.py::test_a_run_that_has_begun_makes_no_further_release",),
    ),
    Fault(
        "a_run_forgets_that_it_has_checkpoints",
        "dp_sparse/runs/run_checkpoint.py",
        "        self._of.note_checkpoints()\n",
        "",
        ("tests/runs/test_run.py::test_lost_checkpoints_are_an_error",),
    ),
    Fault(
        "a_run_trains_under_another_plan",
        "dp_sparse/runs/run_checkpoint.py",
        "        self.refuse_other_plan(model)\n",
        "",
        ("tests/runs/test_run.py::test_an_optimizer_with_another_plan",),
    ),
    Fault(
        "steps_of_a_run_without_its_checkpoint",
        "dp_sparse/training/compile_hook.py",
        "        checkpointed_steps.refuse_without_checkpoint(optimizer)\n",
        "",
        ("tests/runs/test_run.py::test_steps_without_the_callbacks_are_refused",),
    ),
    Fault(
        "a_closed_run_publishes",
        "dp_sparse/training/checkpoint_files.py",
        "        if step < before:\n",
        "        if False:\n",
        ("tests/runs/test_run.py::test_a_closed_run_trains_no_more",),
    ),
    Fault(
        "rows_are_selected_beyond_the_account",
        "dp_sparse/runs/run.py",
        "if self._account is not None and not self._folder.has_plan:",
        "if False:",
        ("tests/runs/test_run.py::test_rows_are_not_selected_beyond_the_account",),
    ),
    Fault(
        "one_charge_pays_for_two_folders",
        "dp_sparse/runs/run.py",
        "                self._refuse_charged(plan)\n",
        "",
        ("tests/runs/test_seen_steps.py::test_one_charge_pays_for_one_folder",),
    ),
    Fault(
        "metrics_are_seen_before_a_checkpoint",
        "dp_sparse/training/compile_hook.py",
        "        setattr(model, name, _saved_first(optimizer, taking))\n",
        "        setattr(model, name, taking)\n",
        ("tests/runs/test_seen_steps.py::test_validation_is_seen_after_its_steps_are_saved",),
    ),
    Fault(
        "a_process_ends_without_saving_its_run",
        "dp_sparse/training/checkpoint.py",
        "            checkpoint.save_at_exit()\n",
        "            pass\n",
        ("tests/runs/test_seen_steps.py::test_what_shows_weights_is_saved_before",),
    ),
    Fault(
        "a_second_model_forgets_the_steps_of_the_first",
        "dp_sparse/training/checkpoint.py",
        "        self._settle()\n        self._folder.lock()\n",
        "        self._folder.lock()\n",
        ("tests/runs/test_seen_steps.py::test_another_model_of_the_run_goes_on_behind_the_first",),
    ),
    Fault(
        "a_lost_release_is_made_again",
        "dp_sparse/runs/run_folder.py",
        "        if name in self._releases():\n",
        "        if False:\n",
        ("tests/runs/test_seen_steps.py::test_a_release_that_is_lost_is_not_made_again",),
    ),
    Fault(
        "parts_of_an_odd_capacity_not_checked",
        "dp_sparse/step/preflight_checks.py",
        "self._passed.update(map(_signature, parts))",
        "self._passed.add(_signature(parts[0]))",
        ("tests/training/test_monitor.py::test_on_two_replicas",),
    ),
    Fault(
        "an_example_twice_in_a_batch",
        "dp_sparse/sampling/base.py",
        "if len(np.unique(indices)) != len(indices):",
        "if False:",
        ("tests/sampling/test_padding.py::test_an_example_twice_in_a_batch_is_refused",),
    ),
    Fault(
        "a_variable_without_a_gradient_term_trains_on_noise",
        "dp_sparse/clipping/recording.py",
        "        if missing:\n",
        "        if False:\n",
        ("tests/clipping/test_recording.py::test_a_rule_that_leaves_a_variable_out",),
    ),
    Fault(
        "a_run_calibrates_its_plan_again",
        "dp_sparse/runs/run_folder.py",
        "if not self.resumes or not path.exists():",
        "if True:",
        ("tests/runs/test_run.py::test_the_same_lines_resume_a_run",),
    ),
    Fault(
        "a_time_series_counts_before_it_checks",
        "pipelines/criteo/time_series/train.py",
        "        _check_private(config)\n",
        "        pass\n",
        ("tests/pipelines/test_criteo_time_series.py::TestRefused::test_settings",),
    ),
    Fault(
        "a_report_is_checked_after_rows_are_selected",
        "pipelines/glue/train.py",
        "report = _report(config)  # may refuse settings: before rows are selected\n"
        "        optimizer = _private_optimizer(config, model, data, tokenizer, steps, run)\n",
        "optimizer = _private_optimizer(config, model, data, tokenizer, steps, run)\n"
        "        report = _report(config)\n",
        (
            "tests/pipelines/test_glue_train.py::"
            "test_what_is_refused_before_training_has_selected_nothing",
        ),
    ),
    Fault(
        "unpublished_weights_stay_on_the_machine",
        "dp_sparse/training/checkpoint_files.py",
        "                shutil.rmtree(folder)\n",
        "                assert folder\n",
        (f"{_OF_CHECKPOINT}::test_a_remote_folder",),
    ),
    Fault(
        "the_claim_of_another_run_is_taken_away",
        "pipelines/criteo/time_series/reading.py",
        "if path.exists() and path.read_text() == claim:",
        "if path.exists():",
        ("tests/pipelines/test_criteo_time_series.py::test_a_claim_of_another_run_stays",),
    ),
    Fault(
        "records_of_any_dtype_are_written",
        "dp_sparse/sampling/offline/files.py",
        "if records.dtype != manifest.dtype:",
        "if records.dtype.itemsize < manifest.dtype.itemsize:",
        ("tests/sampling/test_offline.py::TestRefused::test_records_of_another_dtype",),
    ),
    Fault(
        "weights_of_a_step_that_was_not_published_get_their_names",
        "dp_sparse/training/checkpoint_files.py",
        "tf.io.gfile.exists(self._unfinished(_about(published))):\n"
        "            self._name_both(published)",
        "self.path:\n"
        "            for step in range(99):\n"
        "                if tf.io.gfile.exists(self._unfinished(_about(step))):\n"
        "                    self._name_both(step)",
        (f"{_OF_CHECKPOINT}::TestPublished::test_weights_of_a_step_that_was_not_published_go",),
    ),
    Fault(
        "another_keys_batches_are_taken",
        "pipelines/criteo/prepare/run.py",
        "        if job.owns_key():\n            return job.key()\n",
        "        return job.key()\n",
        (
            "tests/pipelines/test_criteo_prepare.py"
            "::TestKey::test_of_another_preparation_that_began_meanwhile",
        ),
    ),
    Fault(
        "two_plans_on_one_pass",
        "dp_sparse/optimizers/ledger.py",
        "tf.equal(owner, 0) | tf.equal(owner, self._number)",
        "tf.greater_equal(owner, 0)",
        (
            "tests/attacks/test_attacks.py"
            "::test_on_its_own_ways[batches: one cached pass for two plans: graph]",
        ),
    ),
    Fault(
        "validation_on_the_rows_of_training",
        "dp_sparse/training/fit_arguments.py",
        "            _refuse_training_rows(given.arguments)\n",
        "",
        ("tests/reports/test_errors.py::test_validation_on_the_rows_of_training_is_no_validation",),
    ),
    Fault(
        "two_plans_on_one_prepared_draw",
        "dp_sparse/optimizers/ledger.py",
        "drawn = self._prepared is not None or plan.sampling.steps_per_pass is None",
        "drawn = plan.sampling.steps_per_pass is None",
        ("tests/optimizers/test_ledger.py::TestAPreparedDraw::test_serves_one_plan",),
    ),
    Fault(
        "a_changed_copy_of_a_plan_passes_for_it",
        "dp_sparse/accounting/plan.py",
        'return f"{self.plan_id}-{self.fingerprint:016x}"',
        "return str(self.plan_id)",
        (
            "tests/optimizers/test_ledger.py::test_a_changed_copy_of_a_plan_is_another_plan",
            "tests/accounting/test_budget_account.py::test_a_changed_copy_of_a_plan_is_charged",
        ),
    ),
    Fault(
        "division_by_the_size_of_the_batch",
        _SPARSE,
        "            noisy_dense(dense, deviation, batch_size, draw),\n",
        "            [\n"
        "                (v, mean * tf.cast(batch_size / sums.amounts.counts[0], tf.float32))\n"
        "                for v, mean in noisy_dense(dense, deviation, batch_size, draw)\n"
        "            ],\n",
        (f"{_OF_TRAIN_STEP}::test_division_is_by_the_expected_batch_size",),
    ),
    Fault(
        "noise_of_the_plan_for_another_clip_norm",
        _SPARSE,
        "deviation = self.current_clip_norm * self.gradient_noise_multiplier",
        "deviation = self.gradient_noise_multiplier",
        (f"{_OF_TRAIN_STEP}::test_adafest_noise_on_dense_parameters_and_on_every_survivor",),
    ),
    Fault(
        "noise_only_on_rows_that_were_looked_up",
        "dp_sparse/optimizers/fest.py",
        "StepRows(own, restricted(table, own).places)",
        "StepRows(own[1:], restricted(table, own[1:]).places)",
        ("tests/optimizers/test_fest.py::test_every_selected_row_is_noised_and_no_other",),
    ),
    Fault(
        "noise_divided_by_the_number_of_replicas",
        "dp_sparse/optimizers/release.py",
        "noise.noisy_mean(flat, deviation,",
        "noise.noisy_mean(\n"
        "        flat, deviation / tf.distribute.get_strategy().num_replicas_in_sync,",
        (f"{_OF_MIRRORED}::test_noise_and_rows_are_drawn_once[adafest]",),
    ),
    Fault(
        "sums_of_replicas_not_added",
        _TRAIN_STEP,
        "    sums = sums.over_replicas()\n",
        "",
        (f"{_OF_MIRRORED}::test_without_noise_as_on_one_device[dpsgd-2]",),
    ),
    Fault(
        "rows_of_one_replica",
        "dp_sparse/optimizers/replica_rows.py",
        "of_tables = [tf.split(replicas.gathered(signed_ids), widths, axis=1, num=len(widths))]",
        "of_first = tf.distribute.get_strategy().experimental_local_results(signed_ids)[0]\n"
        "        of_tables = [tf.split(of_first, widths, axis=1, num=len(widths))]",
        (f"{_OF_MIRRORED}::test_without_noise_as_on_one_device[adafest-2]",),
    ),
    Fault(
        "every_replica_hands_over_the_whole_gradient",
        _REPLICAS,
        "[value / count() for value in values]",
        "[value / 1 for value in values]",
        (f"{_OF_MIRRORED}::test_without_noise_as_on_one_device[dpsgd-2]",),
    ),
    Fault(
        "replicas_may_meet_in_the_model",
        _REPLICAS,
        "context.merge_call = refuse",
        "context.merge_call = context.merge_call if refuse else None",
        ("tests/clipping/test_graph_guard.py::test_replicas_that_meet_in_the_model_are_refused",),
    ),
    Fault(
        "noise_once_a_part",
        _MICROBATCHES,
        "        return sums.amounts\n",
        "        size, sigma = optimizer.plan.sampling.batch_capacity, optimizer.noise_multiplier\n"
        "        given = optimizer.clip_norm * sigma, 1.0, self.draw, noise.Purpose.UNCLIPPED\n"
        "        dense = [noise.noisy_mean(total, *given) for total in sums.amounts.dense]\n"
        "        return sums.amounts._replace(dense=dense if size else [])\n",
        ("tests/optimizers/test_noise_of_a_step.py::test_noise[dpsgd-microbatches]",),
    ),
    Fault(
        "last_part_of_a_batch_lost",
        _MICROBATCHES,
        "lambda begin, _: begin < count,",
        "lambda begin, _: begin + size <= count,",
        (
            f"{_OF_MICROBATCHES}::test_the_same_weights_metrics_and_counts_as_the_whole_batch[DPSGDOptimizer-3]",
        ),
    ),
    Fault(
        "rows_of_a_part_not_compared",
        _MICROBATCHES,
        "require(tf.reduce_all(tf.equal(own[id(table)], row_ids)), PrivacyError, message)",
        "require(tf.reduce_all(tf.equal(row_ids, row_ids)), PrivacyError, message)",
        (f"{_OF_MICROBATCHES}::test_ids_that_depend_on_random_layers_are_refused",),
    ),
    Fault(
        "padding_kept_between_examples",
        _TRAIN_STEP,
        "last = tf.reduce_max(tf.where(present > 0, tf.range(1, capacity + 1), 0))",
        "last = tf.math.count_nonzero(present > 0, dtype=tf.int32) - 1",
        (f"{_OF_TRAIN_STEP}::test_noise_free_dpsgd_is_clip_sum_divide",),
    ),
    Fault(
        "the_key_is_saved",
        "dp_sparse/optimizers/base.py",
        "self._account = StepAccount(plan, self.steps_spent, seal, order)\n",
        "self._account = StepAccount(plan, self.steps_spent, seal, order)\n"
        '        kept = self.add_variable((), "zeros", "int64", name="secret")\n'
        "        word = self._account.noise_key.words()[0, 0]\n"
        "        kept.assign(word)\n",
        (f"{_OF_RESUME}::test_no_file_holds_a_key",),
    ),
    Fault(
        "steps_not_restored",
        _ACCOUNT,
        "self._saved.write(self._plan, *(before if before[0] > after[0] else after))",
        "self._saved.write(self._plan, *(before if after else before))",
        (f"{_OF_RESUME}::test_save_load_fit_stays_private_and_within_budget",),
    ),
    Fault(
        "steps_given_back_by_a_loaded_file",
        _ACCOUNT,
        "self._saved.write(self._plan, *(before if before[0] > after[0] else after))",
        "self._saved.write(self._plan, *(after if before else after))",
        (f"{_OF_RESUME}::test_a_loaded_file_never_gives_steps_back",),
    ),
    Fault(
        "noise_goes_on_with_the_same_key_after_loading",
        _ACCOUNT,
        "        self.noise_key.refresh(max(before[0], after[0]))\n",
        "        assert self.noise_key\n",
        (_OF_RESUME,),
    ),
    Fault(
        "steps_count_as_covered_before_the_checkpoint_is_written",
        "dp_sparse/training/checkpoint.py",
        "self._saving = True  # which calls save_weights, before which it would save\n",
        "self._saving = True\n                self._covered.step = step\n",
        (f"{_OF_CHECKPOINT}::TestPublished::test_only_once_a_checkpoint_holds_it",),
    ),
    Fault(
        "a_checkpoint_that_failed_is_the_last_one",
        "dp_sparse/training/checkpoint.py",
        "                finally:\n                    self._saving = False\n",
        "                finally:\n                    assert self._saving\n",
        (f"{_OF_CHECKPOINT}::TestPublished::test_only_once_a_checkpoint_holds_it",),
    ),
    Fault(
        "every_step_is_saved_as_of_its_own_order",
        "dp_sparse/optimizers/ledger.py",
        "saved.write(self._plan, after, tf.equal(fields.nonce, OWN_ORDER))",
        "saved.write(self._plan, after, 1)",
        ("tests/optimizers/test_ledger.py::test_in_which_order_the_last_batch_came_is_saved",),
    ),
    Fault(
        "no_step_is_saved_as_of_its_own_order",
        "dp_sparse/optimizers/ledger.py",
        "saved.write(self._plan, after, tf.equal(fields.nonce, OWN_ORDER))",
        "saved.write(self._plan, after, 0)",
        ("tests/optimizers/test_ledger.py::test_in_which_order_the_last_batch_came_is_saved",),
    ),
    Fault(
        "the_learning_rate_goes_along_with_the_slots",
        "dp_sparse/optimizers/row_updates.py",
        "return [variable for variable in optimizer.variables if variable is not rate]",
        "return [variable for variable in optimizer.variables if variable is not None or rate]",
        ("tests/optimizers/test_slots.py::test_each_learning_rate_stays_the_own_one",),
    ),
    Fault(
        "the_noise_of_a_period_whatever_it_releases",
        "pipelines/criteo/time_series/periods.py",
        "key = (*_size(plan.sampling), *(str(release.event) for release in plan.releases))",
        "key = _size(plan.sampling)",
        (
            "tests/pipelines/test_criteo_time_series.py::"
            "test_periods_of_one_size_share_the_noise_of_what_they_release",
        ),
    ),
    Fault(
        "log_lines_of_steps_that_may_run_again",
        _MONITOR,
        'self._pending[0]["step"] <= self._may_be_seen()',
        "True",
        (
            f"{_OF_MONITOR}::test_lines_wait_for_the_checkpoint_that_covers_them",
            f"{_OF_MONITOR}::test_goes_on_behind_the_restored_step",
        ),
    ),
    Fault(
        "training_metrics_in_the_log",
        _MONITOR,
        "_number(value) for n, value in (logs or {}).items() if _is_validation(n)",
        "_number(value) for n, value in (logs or {}).items()",
        (f"{_OF_MONITOR}::test_nothing_that_no_epsilon_covers",),
    ),
    Fault(
        "times_in_the_log",
        "dp_sparse/reports/monitor.py",
        "when = float(step) if time is None else time",
        "when = tf.timestamp().numpy()",
        (f"{_OF_MONITOR}::test_nothing_that_no_epsilon_covers",),
    ),
    Fault(
        "an_optimizer_goes_on_with_variables_that_changed",
        "dp_sparse/step/building.py",
        "    _refuse_other_variables(model, optimizer)\n    for layer",
        "    for layer",
        (
            "tests/training/test_changes.py::"
            "test_the_same_optimizer_does_not_train_other_variables[built-freeze]",
        ),
    ),
    Fault(
        "an_optimizer_does_not_learn_of_new_variables",
        "dp_sparse/step/building.py",
        '(trained, built, "was not trained then"),',
        '(built, built, "was not trained then"),',
        (
            "tests/training/test_changes.py::"
            "test_the_same_optimizer_does_not_train_other_variables[built-unfreeze]",
        ),
    ),
)
