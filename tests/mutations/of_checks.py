"""Faults of what refuses: the ledger, isolation, the graph guard."""

from tests.mutations.fault import Fault

_LEDGER = "dp_sparse/optimizers/ledger.py"
_TURN = "dp_sparse/optimizers/batch_order.py"
_ISOLATION = "dp_sparse/guards/isolation.py"
_REBATCHING = "dp_sparse/guards/rebatching.py"
_PREFLIGHT = "dp_sparse/step/preflight_checks.py"
_GUARD = "dp_sparse/clipping/graph_guard.py"
_UPDATES = "dp_sparse/clipping/graph_guard.py"
_INPUT = "dp_sparse/sampling/input_guard.py"
_ROWS = "dp_sparse/sampling/row_check.py"
_AUGMENTATION = "dp_sparse/sampling/augmentation.py"

_OF_LEDGER = "tests/optimizers/test_ledger.py"
_OF_FINGERPRINTS = "tests/accounting/test_plan.py"
_OF_PLANS = "tests/optimizers/test_plan_fingerprint.py"
_OF_ISOLATION = "tests/guards/test_isolation.py"
_OF_PREFLIGHT = "tests/guards/test_preflight.py"
_OF_BYPASS = "tests/training/test_bypass.py"
_OF_GUARD = "tests/clipping/test_graph_guard.py"
_OF_UPDATES = "tests/clipping/test_update_guard.py"
_OF_INPUT = "tests/sampling/test_input_guard.py"
_OF_ROWS = "tests/sampling/test_row_check.py"
_OF_AUGMENTATION = "tests/sampling/test_augmentation.py"

_COMPARED = (_OF_ISOLATION,)
_REBATCHED = ("tests/guards/test_rebatching.py",)

FAULTS = (
    Fault(
        "a_step_not_counted",
        _LEDGER,
        "tf.stack([fields.nonce, fields.position]), step + 1",
        "tf.stack([fields.nonce, fields.position]), step",
        (f"{_OF_LEDGER}::test_every_batch_is_one_step",),
    ),
    Fault(
        "one_step_more_than_the_plan_has",
        _LEDGER,
        "progress.spent < steps,",
        "progress.spent <= steps,",
        (f"{_OF_LEDGER}::test_every_batch_is_one_step", _OF_LEDGER),
    ),
    Fault(
        "sampler_of_the_marker_not_compared",
        _LEDGER,
        "tf.equal(marker.fingerprint, self._plan.sampling.fingerprint),",
        "tf.equal(marker.fingerprint, marker.fingerprint),",
        (f"{_OF_LEDGER}::test_seeded_and_foreign_batches",),
    ),
    Fault(
        "rows_of_the_marker_not_compared",
        _LEDGER,
        "tf.equal(size, capacity) & whole,",
        "tf.equal(size, capacity),",
        (f"{_OF_LEDGER}::test_a_batch_that_is_not_whole",),
    ),
    Fault(
        "a_part_of_a_batch_accepted",
        _LEDGER,
        "tf.equal(size, capacity) & whole,",
        "tf.less_equal(size, capacity) & whole,",
        (f"{_OF_LEDGER}::test_a_batch_that_is_not_whole",),
    ),
    Fault(
        "seeded_batches_accepted",
        _LEDGER,
        "tf.not_equal(marker.nonce, SEEDED) | repeats_itself,",
        "tf.equal(marker.nonce, marker.nonce) | repeats_itself,",
        (f"{_OF_LEDGER}::test_seeded_and_foreign_batches",),
    ),
    Fault(
        "seal_not_checked",
        _LEDGER,
        "return tf.equal(steps, 0) | tf.equal(seal, seal_of(plan, steps))",
        "return tf.equal(seal, seal) | tf.equal(seal, seal_of(plan, steps))",
        (_OF_PLANS,),
    ),
    Fault(
        "saved_file_of_another_plan_accepted",
        _LEDGER,
        "if steps and seal != int(seal_of(plan, steps)):",
        "if steps and seal == -1:",
        (
            f"{_OF_PLANS}::test_weights_of_another_plan_are_refused",
            f"{_OF_PLANS}::test_a_refusal_that_keras_passes_over_stands",
        ),
    ),
    Fault(
        "plan_of_another_noise_accepted",
        "dp_sparse/accounting/plan.py",
        'if k not in ("plan_id", "budget")',
        'if k not in ("plan_id", "budget", "noise_multiplier")',
        (f"{_OF_PLANS}::test_a_run_of_another_plan_goes_on_in_no_way",),
    ),
    Fault(
        "plan_of_other_releases_accepted",
        "dp_sparse/accounting/plan.py",
        'if k not in ("plan_id", "budget")',
        'if k not in ("plan_id", "budget", "releases")',
        (f"{_OF_FINGERPRINTS}::test_plans_of_other_guarantees_have_other_fingerprints",),
    ),
    Fault(
        "saved_steps_forgotten",
        _LEDGER,
        "return batch_order.Progress(tf.maximum(spent, steps), nonce, position, own)",
        "return batch_order.Progress(spent, nonce, position, own)",
        (f"{_OF_LEDGER}::test_the_larger_of_the_saved_and_the_counted_steps_holds",),
    ),
    Fault(
        "counted_steps_forgotten",
        _LEDGER,
        "return batch_order.Progress(tf.maximum(spent, steps), nonce, position, own)",
        "return batch_order.Progress(steps, nonce, position, own)",
        (
            f"{_OF_LEDGER}::test_the_larger_of_the_saved_and_the_counted_steps_holds",
            f"{_OF_LEDGER}::test_two_ledgers_of_a_plan_share_its_steps",
        ),
    ),
    Fault(
        "a_batch_accepted_twice",
        _TURN,
        "return same & tf.equal(marker.position, self.last_position + 1)",
        "return same & (marker.position >= self.last_position)",
        (f"{_OF_LEDGER}::test_each_batch_once_and_in_order",),
    ),
    Fault(
        "a_pass_accepted_again",
        _TURN,
        "first = (marker.nonce > progress.last_nonce) & tf.equal(marker.position, 0)",
        "first = tf.equal(marker.position, 0)",
        (f"{_OF_LEDGER}::test_each_batch_once_and_in_order",),
    ),
    Fault(
        "a_stream_from_another_iterator_goes_on",
        _TURN,
        "known = progress.continues(marker) | ("
        "tf.equal(marker.nonce, OWN_ORDER) & progress.own_order)",
        "known = tf.equal(marker.position, progress.spent)",
        (f"{_OF_LEDGER}::test_whose_turn_it_is",),
    ),
    Fault(
        "a_half_is_replaced_by_itself",
        _REBATCHING,
        "filled = np.where(kept | (present <= 0), own, copied)",
        "filled = own",
        _REBATCHED,
    ),
    Fault(
        "one_half_compared_twice",
        _REBATCHING,
        "return rank < half if first else (rank >= half) & (rank < count)",
        "return rank < half",
        _REBATCHED,
    ),
    Fault(
        "a_few_in_the_same_order",
        _REBATCHING,
        "places[:few][::-1]",
        "places[:few]",
        _REBATCHED,
    ),
    Fault(
        "one_alone_never_compared",
        _REBATCHING,
        "    yield _one_alone(places, random, looser)\n",
        "    yield _few(places, present, random, looser)\n",
        _REBATCHED,
    ),
    Fault(
        "others_never_hold_nan",
        _REBATCHING,
        '(float("nan"), True, "once other examples hold NaN"),',
        '(0.0, True, "once other examples hold NaN"),',
        _REBATCHED,
    ),
    Fault(
        "others_are_never_extreme",
        _REBATCHING,
        '(_TIMES, False, "once others are 10,000 times as large"),',
        '(1.0, False, "once others are 10,000 times as large"),',
        _REBATCHED,
    ),
    Fault(
        "the_other_examples_are_not_changed",
        _REBATCHING,
        "own[replaced] = _altered(own[replaced], rebatching.value)",
        "pass",
        _REBATCHED,
    ),
    Fault(
        "other_values_never_compared",
        _ISOLATION,
        "found = trial.coupled(trial.of_other_values())",
        "found = trial.coupled(iter([]))",
        (
            f"{_OF_ISOLATION}::test_a_whole_check_takes_the_batch_and_another_one_a_share",
            f"{_OF_ISOLATION}::test_what_one_example_would_switch_on_is_found_before_it_comes",
        ),
    ),
    Fault(
        "examples_with_holes_never_compared",
        _ISOLATION,
        "return found or (self._of_holes(trial, setting) if trial.sketcher.takes_nan else None)",
        "return found",
        (f"{_OF_ISOLATION}::test_a_whole_check_takes_the_batch_and_another_one_a_share",),
    ),
    Fault(
        "weights_of_zero_stay_zero",
        _ISOLATION,
        "for fill in (False, True):",
        "for fill in (False,):",
        (f"{_OF_ISOLATION}::test_what_a_zero_hides_is_found_before_the_first_step",),
    ),
    Fault(
        "tables_of_zeros_stay_zero",
        "dp_sparse/clipping/rules/embedding.py",
        "rows = filled_rows(layer._embeddings, row_ids, rows)",
        "del filled_rows",
        (f"{_OF_ISOLATION}::test_what_a_table_of_zeros_hides_is_found_before_the_first_step",),
    ),
    Fault(
        "zeros_stay_zero_beside_extremes",
        _REBATCHING,
        "made = value * (numbers + np.where(numbers < 0, -1.0, 1.0))",
        "made = value * numbers",
        _REBATCHED,
    ),
    Fault(
        "integer_ids_are_altered",
        "dp_sparse/guards/restricted_arguments.py",
        "found = _computed_from(integers, callers, _is_integer_or_bool)",
        "found = _computed_from([], callers, _is_integer_or_bool)",
        ("tests/guards/test_restricted_arguments.py",),
    ),
    Fault(
        "ids_that_come_as_floats_are_altered",
        "dp_sparse/guards/sketches.py",
        "and argument.ref() not in found",
        "and argument is not found",
        (f"{_OF_ISOLATION}::test_what_needs_its_values_as_they_are_keeps_them",),
    ),
    Fault(
        "batches_of_training_s_own_size_never_compared",
        _ISOLATION,
        "if found is not None or not self._own_size:",
        "if found is not None or self._own_size:",
        (f"{_OF_ISOLATION}::test_what_only_a_known_size_shows_is_found",),
    ),
    Fault(
        "tolerance_of_isolation_a_hundred_times_larger",
        _REBATCHING,
        "_SAME_SHAPE, _OTHER_SHAPE, _ALONE = 2.0**-16, 2.0**-6, 2.0**-3",
        "_SAME_SHAPE, _OTHER_SHAPE, _ALONE = 100 * 2.0**-16, 100 * 2.0**-6, 100 * 2.0**-3",
        _COMPARED,
    ),
    Fault(
        "tolerance_of_a_few_a_hundred_times_larger",
        _REBATCHING,
        "_SAME_SHAPE, _OTHER_SHAPE, _ALONE = 2.0**-16, 2.0**-6, 2.0**-3",
        "_SAME_SHAPE, _OTHER_SHAPE, _ALONE = 2.0**-16, 100 * 2.0**-6, 2.0**-3",
        (f"{_REBATCHED[0]}::test_the_tolerance_of_each_batch",),
    ),
    Fault(
        "ids_never_compared",
        "dp_sparse/guards/sketches.py",
        "other_ids = reference.ids[places] != found.ids",
        "other_ids = found.ids != found.ids",
        (f"{_OF_ISOLATION}::test_ids_of_others_are_found_where_they_train_nothing",),
    ),
    Fault(
        "first_batch_not_checked",
        _PREFLIGHT,
        "if self.schedule.due() or _signature(data) not in self._signatures:",
        "if self.schedule.batches > 0 and self.schedule.due():",
        (f"{_OF_ISOLATION}::test_mixing_is_refused[mean]",),
    ),
    Fault(
        "only_the_first_batch_checked",
        _PREFLIGHT,
        "self._due_at = self.batches + 1 if self.checks < _FIRST else later",
        "self._due_at = later",
        (f"{_OF_PREFLIGHT}::test_each_of_the_first_batches_is_checked",),
    ),
    Fault(
        "another_signature_not_checked",
        _PREFLIGHT,
        "if self.schedule.due() or _signature(data) not in self._signatures:",
        "if self.schedule.due():",
        (f"{_OF_PREFLIGHT}::test_a_step_traced_anew_is_checked_anew",),
    ),
    Fault(
        "a_step_traced_without_a_check",
        "dp_sparse/training/compile_hook.py",
        "            preflight.require(data)\n",
        "            pass\n",
        (f"{_OF_PREFLIGHT}::test_a_loop_of_ones_own_looks_first",),
    ),
    Fault(
        "a_batch_looked_at_trains_nothing",
        _PREFLIGHT,
        "            yield batch\n",
        "            yield next(batches)\n",
        (f"{_OF_PREFLIGHT}::test_no_batch_is_lost_and_each_trains_once",),
    ),
    Fault(
        "assignments_allowed_in_the_graph",
        _GUARD,
        "return not _HARMLESS.fullmatch(op.type)",
        "return not (_HARMLESS.fullmatch(op.type) or _ASSIGNMENTS.fullmatch(op.type))",
        (f"{_OF_GUARD}::test_an_operation_that_outlives_the_step_is_refused_with_its_layer",),
    ),
    Fault(
        "a_recorded_layer_may_use_any_weight",
        _GUARD,
        "if key not in covered]",
        "if not covered]",
        (f"{_OF_GUARD}::test_a_recorded_layer_uses_no_weight_of_another",),
    ),
    Fault(
        "functions_that_the_graph_calls_not_read",
        _GUARD,
        "in graphs.reachable(operations, writable):",
        "in graphs.reachable(operations, writable, enters=lambda op: False):",
        (f"{_OF_GUARD}::test_an_operation_that_outlives_the_step_is_refused_with_its_layer",),
    ),
    Fault(
        "known_random_numbers_allowed",
        _GUARD,
        "harmful = _is_harmful(op) or (trains and each.seeds.is_known_of(op))",
        "harmful = _is_harmful(op)",
        (f"{_OF_BYPASS}::test_constant_seeds_of_masks", _OF_GUARD),
    ),
    Fault(
        "an_update_may_use_anything",
        _UPDATES,
        "lines = readings(made) + _python(made) + _foreign(made, every, leaving)",
        "lines: list[str] = []",
        (_OF_UPDATES,),
    ),
    Fault(
        "an_update_may_follow_the_graph_back",
        _UPDATES,
        "lines = readings(made) + _python(made) + _foreign(made, every, leaving)",
        "lines = readings(made) + _python(made)",
        (f"{_OF_UPDATES}::test_an_update_may_use_nothing_else",),
    ),
    Fault(
        "an_update_may_read_rows_by_the_ids_of_the_batch",
        _UPDATES,
        "return path is not None or any(map(is_data, of_ids))",
        "return path is not None",
        (f"{_OF_UPDATES}::test_looked_up_rows_are_data",),
    ),
    Fault(
        "what_leaves_an_update_may_use_anything",
        _UPDATES,
        "used += [(tensor.name, tensor) for tensor in leaving if tf.is_symbolic_tensor(tensor)]",
        "used += [(tensor.name, tensor) for tensor in leaving if tensor is None]",
        (f"{_OF_UPDATES}::test_what_is_used_elsewhere_is_checked_as_what_is_assigned",),
    ),
    Fault(
        "ids_that_a_float_rounds",
        "dp_sparse/clipping/named_inputs.py",
        "if found and exact < weights[path].shape[0]:",
        "if found and exact < 1:",
        ("tests/clipping/test_float_ids.py",),
    ),
    Fault(
        "ids_beyond_their_input_wrap",
        "dp_sparse/step/train_step.py",
        "        examples = unsupported.refuse_wrapped(model, examples)\n",
        "",
        (
            "tests/reports/test_inputs.py"
            "::test_an_id_that_an_input_is_too_narrow_for_is_found_in_a_late_batch",
        ),
    ),
    Fault(
        "a_column_more_is_paired_by_its_place",
        "dp_sparse/clipping/named_inputs.py",
        "if isinstance(given, Mapping) and (names",
        "if not isinstance(given, Mapping) and (names",
        ("tests/clipping/test_named_inputs.py",),
    ),
    Fault(
        "the_second_of_two_seeds_not_seen",
        "dp_sparse/core/graphs.py",
        'for name in ("seed", "seed2") if name in there]',
        'for name in ("seed",) if name in there]',
        (f"{_OF_INPUT}::test_one_seed_of_two_is_enough",),
    ),
    Fault(
        "elements_as_secret_seeds",
        "dp_sparse/core/graphs.py",
        "return argument.ref() not in self.secret",
        "return False",
        (f"{_OF_INPUT}::test_refused_behind_the_sampler[a counter]",),
    ),
    Fault(
        "batches_on_their_way_to_fit_not_read",
        "dp_sparse/training/compile_hook.py",
        "                check_batches(dataset)\n",
        "",
        (f"{_OF_INPUT}::test_fit_reads_before_a_step_is_paid",),
    ),
    Fault(
        "captured_datasets_not_read",
        _INPUT,
        "            if outside.dtype == tf.variant:",
        "            if False:",
        (f"{_OF_INPUT}::test_refused_behind_the_sampler[a captured dataset]",),
    ),
    Fault(
        "maps_over_batches_of_a_source_not_tried",
        _INPUT,
        "            _try(each, None)\n",
        "            pass\n",
        (f"{_OF_INPUT}::test_a_stream_of_examples_that_are_mixed_is_refused",),
    ),
    Fault(
        "a_dataset_beside_itself_in_another_order",
        _INPUT,
        "if shared and shared[0][0] != shared[0][1]:",
        "if shared and shared[0][0] is None:",
        (f"{_OF_INPUT}::test_a_stream_of_examples_that_are_mixed_is_refused[neighbours]",),
    ),
    Fault(
        "rows_compared_in_the_same_company",
        _ROWS,
        "        again = gather(indices[part])\n",
        "        again = tuple(None if r is None else r[part] for r in gather(indices))\n",
        (f"{_OF_ROWS}::test_refused[MixUp]",),
    ),
    Fault(
        "halves_of_neighbours_compared",
        _ROWS,
        "first = rng.permutation(count) < count // 2",
        "first = places < count // 2",
        (f"{_OF_ROWS}::test_pairs_are_parted",),
    ),
    Fault(
        "every_callback_sees_training_metrics",
        "dp_sparse/training/callback_guard.py",
        "each if _sees_all(each) else _OfReleased(each) for each in callbacks",
        "each for each in callbacks",
        ("tests/training/test_released_logs.py::test_a_logger_gets_released_values",),
    ),
    Fault(
        "training_metrics_in_the_logs_of_epochs",
        "dp_sparse/training/callback_guard.py",
        '_WITH_METRICS = ("on_batch_end", "on_train_batch_end", "on_epoch_end", "on_train_end")',
        '_WITH_METRICS = ("on_batch_end", "on_train_batch_end", "on_train_end")',
        (
            "tests/training/test_released_logs.py::test_a_logger_gets_released_values",
            "tests/training/test_released_logs.py::test_each_hook_that_gets_training_metrics_is_known",
        ),
    ),
    Fault(
        "one_seed_for_all_examples",
        _AUGMENTATION,
        "yield rng.integers(-(2**31), 2**31, (capacity, 2), np.int32)",
        "yield np.tile(rng.integers(-(2**31), 2**31, 2, np.int32), (capacity, 1))",
        (f"{_OF_AUGMENTATION}::test_each_example_has_numbers_of_its_own_in_each_reading",),
    ),
    Fault(
        "one_key_for_all_readings",
        _AUGMENTATION,
        'key=int.from_bytes(fresh(16), "little")',
        "key=3",
        (f"{_OF_AUGMENTATION}::test_each_example_has_numbers_of_its_own_in_each_reading",),
    ),
    Fault(
        "augment_is_not_read",
        _AUGMENTATION,
        '    input_guard.check_function(traced.graph, "augment", secret=traced.inputs[-1:])\n',
        "",
        (f"{_OF_AUGMENTATION}::test_other_seeds_are_refused",),
    ),
)
