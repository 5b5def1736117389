"""Faults of the noise: its size, its shape, and streams that are used twice."""

from tests.mutations.fault import Fault

_GAUSSIAN = "dp_sparse/noise/gaussian.py"
_STREAMS = "dp_sparse/noise/streams.py"
_RELEASE = "dp_sparse/optimizers/release.py"
_MOVING = "dp_sparse/optimizers/release.py"
_LAZY = "dp_sparse/optimizers/lazy.py"
_DELAYED = "dp_sparse/optimizers/lazy_noise.py"

_OF_GAUSSIAN = "tests/noise/test_gaussian.py"
_OF_STEP = "tests/optimizers/test_noise_of_a_step.py"
_OF_LAZY = "tests/optimizers/test_lazy.py"
_OF_LOCK = "tests/optimizers/test_table_lock.py"

FAULTS = (
    Fault(
        "noise_of_rows_too_small",
        _RELEASE,
        "noise.noisy_mean(flat, deviation,",
        "noise.noisy_mean(flat, 0.9 * deviation,",
        (f"{_OF_STEP}::test_noise[fest-graph]",),
    ),
    Fault(
        "noise_of_dense_variables_too_small",
        _RELEASE,
        "noise.noisy_means(totals, deviation,",
        "noise.noisy_means(totals, 0.9 * deviation,",
        (f"{_OF_STEP}::test_noise[fest-graph]",),
    ),
    Fault(
        "noise_of_the_contribution_map_too_small",
        "dp_sparse/selection/threshold.py",
        "noisy = values + deviation * noise.normal(",
        "noisy = values + 0.9 * deviation * noise.normal(",
        ("tests/selection/test_threshold.py::test_survivors_have_the_right_frequency",),
    ),
    Fault(
        "noise_added_after_the_division",
        _GAUSSIAN,
        "tf.round((tf.cast(total, tf.float64) + numbers[0] * noise) / numbers[1])",
        "tf.round((tf.cast(total, tf.float64) + numbers[0] * numbers[2] * noise) / numbers[1])",
        (f"{_OF_GAUSSIAN}::test_noisy_mean_adds_noise_then_divides",),
    ),
    Fault(
        "one_normal_for_the_rows_of_two_blocks",
        _GAUSSIAN,
        "lambda block: _noisy(block[0], numbers, draw.key, _skipped(start, block[1])),",
        "lambda block: _noisy(block[0], numbers, draw.key, start),",
        (f"{_OF_GAUSSIAN}::test_noise_is_the_same_whether_the_size_is_known_or_not",),
    ),
    Fault(
        "one_normal_for_two_values_of_the_map",
        _GAUSSIAN,
        "lambda index: _normals(draw.key, _skipped(start, index), _BLOCK),",
        "lambda index: _normals(draw.key, start, _BLOCK),",
        (_OF_GAUSSIAN,),
    ),
    Fault(
        "blocks_that_overlap_by_half",
        _GAUSSIAN,
        "tf.cast(blocks, tf.uint64) * (_BLOCK // 2)",
        "tf.cast(blocks, tf.uint64) * (_BLOCK // 4)",
        (_OF_GAUSSIAN,),
    ),
    Fault(
        "one_stream_for_two_tables",
        _RELEASE,
        "    parts = tf.split(noisy, tf.stack([tf.size(rows.values) for rows in slices]))\n",
        "    parts = [\n"
        "        noise.noisy_mean(rows.values, deviation, batch_size, draw, noise.Purpose.ROWS)\n"
        "        for rows in slices\n"
        "    ]\n",
        (f"{_OF_STEP}::test_noise[fest-graph]",),
    ),
    Fault(
        "one_stream_for_two_dense_variables",
        _GAUSSIAN,
        "draw.counter(purpose + index)",
        "draw.counter(purpose)",
        (f"{_OF_GAUSSIAN}::test_means_of_many_take_each_value_of_a_stream_once",),
    ),
    Fault(
        "one_stream_for_two_steps",
        _STREAMS,
        "return Draw(self._key.read_value(), draw, self._offset.read_value()[0])",
        "return Draw(self._key.read_value(), 0 * draw, self._offset.read_value()[0])",
        (_OF_GAUSSIAN,),
    ),
    Fault(
        "one_stream_for_rows_and_dense_variables",
        _STREAMS,
        "    DENSE = 6  #",
        "    DENSE = 2  #",
        (f"{_OF_STEP}::test_noise[fest-graph]",),
    ),
    Fault(
        "streams_of_two_draws_overlap",
        _STREAMS,
        "tf.bitcast(number * 2**_PURPOSE_BITS, tf.uint64)",
        "tf.bitcast(number * 2, tf.uint64)",
        (_OF_GAUSSIAN,),
    ),
    Fault(
        "skips_take_the_bits_of_the_map",
        "dp_sparse/selection/threshold.py",
        "noise.uniform(draw, noise.Purpose.SKIPS, chunk, drawn)",
        "noise.uniform(draw, noise.Purpose.CONTRIBUTION, chunk, drawn)",
        ("tests/selection/test_threshold.py", "tests/selection/test_geometric_skips.py"),
    ),
    Fault(
        "picks_take_the_bits_of_the_scores",
        "dp_sparse/selection/exponential.py",
        "gaps = _exponential(draw, noise.Purpose.SKIPS, count)",
        "gaps = _exponential(draw, noise.Purpose.CONTRIBUTION, count)",
        ("tests/selection/test_exponential.py",),
    ),
    Fault(
        "sign_of_the_quantile_lost",
        _GAUSSIAN,
        "sign = tf.bitwise.bitwise_and(signed, tf.constant(-(2**63), tf.int64))",
        "sign = tf.bitwise.bitwise_and(signed, tf.constant(0, tf.int64))",
        (f"{_OF_GAUSSIAN}::test_transform_is_the_inverse_of_the_normal_distribution",),
    ),
    Fault(
        "sign_of_the_quantile_from_a_bit_of_its_size",
        _GAUSSIAN,
        "sign = tf.bitwise.bitwise_and(signed, tf",
        "sign = tf.bitwise.bitwise_and(tf.bitwise.left_shift(signed, tf.ones([], tf.int64)), tf",
        (f"{_OF_GAUSSIAN}::test_transform_is_the_inverse_of_the_normal_distribution",),
    ),
    Fault(
        "tails_cut_at_six_deviations",
        _GAUSSIAN,
        "size = normal_quantile((tf.cast(lower, tf.float64) + 0.5) * 2.0**-63)",
        "size = normal_quantile((tf.cast(lower, tf.float64) + 2.0**33) * 2.0**-63)",
        (_OF_GAUSSIAN,),
    ),
    Fault(
        "rounding_to_the_grid_left_out",
        _GAUSSIAN,
        "on_grid = tf.round((tf.cast(total, tf.float64) + numbers[0] * noise) / numbers[1])",
        "on_grid = (tf.cast(total, tf.float64) + numbers[0] * noise) / numbers[1]",
        (f"{_OF_GAUSSIAN}::test_released_values_lie_on_one_grid_whatever_the_sum",),
    ),
    Fault(
        "uniforms_of_32_bits",
        _GAUSSIAN,
        "return (tf.cast(tf.bitcast(bits, tf.int64), tf.float64) + 0.5) * 2.0**-53",
        "return (tf.cast(tf.bitcast(bits, tf.int64) // 2**21, tf.float64) + 0.5) * 2.0**-32",
        (_OF_GAUSSIAN,),
    ),
    Fault(
        "count_of_draws_not_advanced",
        _STREAMS,
        "draw = tf.raw_ops.ResourceCountUpTo(\n"
        "            resource=self._draws.handle, limit=_MOST_DRAWS, T=tf.int64\n"
        "        )",
        "draw = self._draws.read_value()",
        (_OF_GAUSSIAN,),
    ),
    Fault(
        "a_copy_has_the_same_key",
        _STREAMS,
        '-> "NoiseKey":\n        return NoiseKey(self._seed)',
        '-> "NoiseKey":\n        return self',
        (f"{_OF_GAUSSIAN}::test_copies_get_keys_of_their_own",),
    ),
    Fault(
        "one_mask_for_all_parts_of_a_batch",
        _GAUSSIAN,
        "number = tf.cast(part, tf.uint64) * 2**16 +",
        "number = tf.cast(part, tf.uint64) * 0 +",
        ("tests/training/test_microbatches.py::test_each_part_draws_its_own_dropout",),
    ),
    Fault(
        "statistic_of_the_moving_clip_norm_without_noise",
        _MOVING,
        "return noise.noisy_mean(\n"
        "            statistic, self._deviation, self._expected_batch_size, draw, "
        "noise.Purpose.UNCLIPPED\n"
        "        )",
        "return tf.cast(statistic / self._expected_batch_size, tf.float32)",
        (f"{_OF_STEP}::test_noise_of_the_quantile_count",),
    ),
    Fault(
        "statistic_of_the_moving_clip_norm_with_half_its_noise",
        _MOVING,
        "self._deviation = 0.5 * noise_multiplier",
        "self._deviation = 0.25 * noise_multiplier",
        (f"{_OF_STEP}::test_noise_of_the_quantile_count",),
    ),
    Fault(
        "late_noise_of_the_last_step_alone",
        _DELAYED,
        "self._variance.assign_add(tf.square(deviation), read_value=True)",
        "self._variance.assign(tf.square(deviation), read_value=True)",
        (f"{_OF_LAZY}::test_an_untouched_row_gets_the_noise_of_all_steps_and_their_rates",),
    ),
    Fault(
        "late_noise_marked_as_added_before_it_is",
        _DELAYED,
        "        settled, variance = self._settled[id(table)], self._variance.read_value()\n",
        "        settled, variance = self._settled[id(table)], self._variance.read_value()\n"
        "        self._mark_settled(table, row_ids, variance)\n",
        (f"{_OF_LAZY}::test_an_untouched_row_gets_the_noise_of_all_steps_and_their_rates",),
    ),
    Fault(
        "a_step_takes_the_noise_of_another_thread_from_its_rows",
        "dp_sparse/optimizers/lazy_noise.py",
        "tf.minimum(before + own, variance)",
        "tf.fill(tf.shape(before), tf.identity(variance))",
        (
            "tests/optimizers/test_lazy.py"
            "::test_a_step_takes_no_other_step_s_noise_from_the_rows_it_gives_theirs",
        ),
    ),
    Fault(
        "late_noise_of_half_the_variance",
        _DELAYED,
        "deviations = tf.sqrt(tf.maximum(variance - settled.sparse_read(row_ids), 0.0))",
        "deviations = tf.sqrt(variance - settled.sparse_read(row_ids)) * 0.5**0.5",
        (f"{_OF_LAZY}::test_an_untouched_row_gets_the_noise_of_all_steps_and_their_rates",),
    ),
    Fault(
        "late_noise_of_two_lookups_from_one_stream",
        _LAZY,
        "self._delayed.settle(table, unique, draw, next(lookups))",
        "self._delayed.settle(table, unique, draw, noise.Purpose.DELAYED)",
        (f"{_OF_STEP}::test_noise_that_was_delayed",),
    ),
    Fault(
        "late_noise_released_finer_than_its_sum",
        _DELAYED,
        "tf.round(values / step) * step",
        "values + 0 * step",
        (f"{_OF_LAZY}::test_weights_are_released_on_a_grid_of_the_smallest_noise_that_is_due",),
    ),
    Fault(
        "a_bound_on_weights_from_before_they_were_set",
        _DELAYED,
        "self._largest.assign(np.inf)  # who asked for it may change weights",
        "assert self._largest is not None",
        (f"{_OF_LAZY}::test_weights_that_were_set_after_a_flush_are_measured",),
    ),
    Fault(
        "the_child_of_a_fork_has_the_key",
        _STREAMS,
        "os.register_at_fork(after_in_child=_renew_all)",
        "assert os.register_at_fork is not _renew_all",
        (f"{_OF_GAUSSIAN}::test_the_child_of_a_fork_draws_other_noise",),
    ),
    Fault(
        "the_child_of_a_fork_has_a_key_that_was_refreshed",
        _STREAMS,
        "self._offset.assign(self._fresh_word())\n        self._hold()\n",
        "self._offset.assign(self._fresh_word())\n",
        (f"{_OF_GAUSSIAN}::test_the_child_of_a_fork_draws_other_noise",),
    ),
    Fault(
        "a_release_that_was_paid_for_is_not_on_the_disk",
        "dp_sparse/core/files.py",
        "            os.fsync(file.fileno())\n        unfinished.replace(path)\n",
        "        unfinished.replace(path)\n",
        (
            "tests/core/test_files.py::test_a_file_is_on_the_disk_before_its_name_and_the_name_before_the_end",
        ),
    ),
    Fault(
        "the_name_of_a_release_is_not_on_the_disk",
        "dp_sparse/core/files.py",
        "        unfinished.replace(path)\n        synced(path.parent)\n",
        "        unfinished.replace(path)\n",
        (
            "tests/core/test_files.py::test_a_file_is_on_the_disk_before_its_name_and_the_name_before_the_end",
        ),
    ),
    Fault(
        "flush_left_out",
        _LAZY,
        "self._delayed.settle_all(self._account.noise_key)",
        "pass",
        (f"{_OF_LAZY}::test_every_way_out_settles_first",),
    ),
    Fault(
        "a_flush_forgets_what_a_step_beside_it_adds",
        "dp_sparse/optimizers/lazy_noise.py",
        "self._held = tf.raw_ops.MutexLock(mutex=self._mutex)",
        "self._held = None",
        (f"{_OF_LOCK}::test_a_flush_forgets_no_noise_of_a_step_of_another_thread",),
    ),
    Fault(
        "a_step_writes_while_a_model_is_read",
        "dp_sparse/step/flush_hooks.py",
        "        with optimizer.settled():\n            return method(*args, **kwargs)\n",
        "        optimizer.flush()\n        return method(*args, **kwargs)\n",
        (f"{_OF_LOCK}::test_a_step_of_another_thread_waits_until_a_reader_is_done",),
    ),
)
