"""Faults of the selection of rows: votes, thresholds, skips, tables, scores."""

from tests.mutations.fault import Fault

_CONTRIBUTION = "dp_sparse/selection/contribution.py"
_THRESHOLD = "dp_sparse/selection/threshold.py"
_SKIPS = "dp_sparse/selection/threshold.py"
_BY_TABLE = "dp_sparse/selection/step_rows.py"
_SCORES = "dp_sparse/selection/contribution.py"
_EXPONENTIAL = "dp_sparse/selection/exponential.py"

_OF_CONTRIBUTION = "tests/selection/test_contribution.py"
_OF_THRESHOLD = "tests/selection/test_threshold.py"
_OF_SKIPS = "tests/selection/test_geometric_skips.py"
_OF_BY_TABLE = "tests/selection/test_by_table.py"
_OF_EXPONENTIAL = "tests/selection/test_exponential.py"
_OF_ROWS = "tests/optimizers/test_rows_and_slots_of_a_step.py"

FAULTS = (
    Fault(
        "no_room_for_false_rows_of_a_table",
        _BY_TABLE,
        "spare = survivors.row_ids.shape[0] - contributions.row_ids.shape[0]  # for false rows",
        "spare = 0",
        (f"{_OF_BY_TABLE}::test_a_table_has_room_for_false_rows",),
    ),
    Fault(
        "count_in_place_of_presence",
        _CONTRIBUTION,
        "present *= _first_occurrence(flat, tf.reshape(valid, [-1]), valid, int(offsets[-1]))",
        "present *= 1",
        (f"{_OF_CONTRIBUTION}::test_map_equals_the_reference",),
    ),
    Fault(
        "contributions_clipped_for_each_table",
        _CONTRIBUTION,
        "distinct = tf.reduce_sum(present, axis=1, keepdims=True)  # n_i",
        "of_tables = tf.split(present, [_width(t) for t in tables], axis=1, num=len(tables))\n"
        "    distinct = tf.concat(\n"
        "        [tf.zeros_like(p) + tf.reduce_sum(p, 1, keepdims=True) for p in of_tables], 1\n"
        "    )",
        (f"{_OF_CONTRIBUTION}::test_one_example_moves_the_map_by_at_most_c1",),
    ),
    Fault(
        "invalid_lookups_vote",
        _CONTRIBUTION,
        "present = tf.reshape(tf.cast(valid, tf.int64), [-1])",
        "present = tf.reshape(tf.ones_like(valid, tf.int64), [-1])",
        (f"{_OF_CONTRIBUTION}::test_map_equals_the_reference",),
    ),
    Fault(
        "units_rounded_up",
        _CONTRIBUTION,
        "tf.cast(tf.floor(share / unit), tf.int64)",
        "tf.cast(tf.math.ceil(share / unit), tf.int64)",
        (f"{_OF_CONTRIBUTION}::test_sensitivity_holds_to_the_last_bit",),
    ),
    Fault(
        "contributions_not_clipped",
        _CONTRIBUTION,
        "share = tf.minimum(clip_norm / tf.sqrt(",
        "share = tf.maximum(clip_norm / tf.sqrt(",
        (f"{_OF_CONTRIBUTION}::test_map_equals_the_reference",),
    ),
    Fault(
        "examples_of_weight_0_vote",
        "dp_sparse/sampling/batch.py",
        "return examples.present * tf.cast(functools.reduce(tf.logical_or, used), tf.float32)",
        "del used, functools\n    return examples.present",
        ("tests/sampling/test_batch.py::test_what_is_padding_or_weighs_nothing_is_not_real",),
    ),
    Fault(
        "padding_votes",
        "dp_sparse/step/forward_backward.py",
        "term.voting & (real > 0)[:, tf.newaxis],",
        "term.voting,",
        (f"{_OF_ROWS}::test_examples_of_weight_0_have_no_vote[adafest-graph]",),
    ),
    Fault(
        "sigma_squared_in_the_chance_of_false_rows",
        _THRESHOLD,
        "probability = survival_probability(threshold, deviation)",
        "probability = survival_probability(threshold, deviation**2)",
        (f"{_OF_THRESHOLD}::test_survivors_have_the_right_frequency",),
    ),
    Fault(
        "chance_of_false_rows_of_another_threshold",
        _THRESHOLD,
        "probability = survival_probability(threshold, deviation)",
        "probability = survival_probability(1.1 * threshold, deviation)",
        (f"{_OF_THRESHOLD}::test_survivors_have_the_right_frequency",),
    ),
    Fault(
        "a_hit_on_a_looked_up_row_kept",
        _THRESHOLD,
        "false_rows = tf.unique(tf.concat([looked_up, hits], 0))[0][count:]",
        "false_rows = hits",
        (f"{_OF_THRESHOLD}::test_bookkeeping",),
    ),
    Fault(
        "a_hit_on_a_looked_up_row_kept_under_xla",
        _THRESHOLD,
        "kept = (hits < nowhere) & ~looked_up",
        "kept = (hits < nowhere) & (looked_up | True)",
        (
            f"{_OF_THRESHOLD}::test_bookkeeping",
            f"{_OF_THRESHOLD}::test_survivors_have_the_right_frequency",
        ),
    ),
    Fault(
        "last_chunk_of_skips_lost",
        _SKIPS,
        "return hits[-1] < num_trials",
        "return hits[-1] < 0",
        (f"{_OF_SKIPS}::test_a_short_chunk_is_continued",),
    ),
    Fault(
        "chunks_of_skips_take_the_same_bits",
        _SKIPS,
        "return tf.concat([hits, last + tf.cumsum(gaps)], 0), drawn + chunk",
        "return tf.concat([hits, last + tf.cumsum(gaps)], 0), drawn",
        (
            f"{_OF_SKIPS}::test_a_short_chunk_is_continued",
            f"{_OF_SKIPS}::test_continued_chunks_have_the_right_distribution",
        ),
    ),
    Fault(
        "skips_of_float32",
        _SKIPS,
        "skipped = tf.floor(tf.math.log(uniforms) / rate)",
        "shorter = tf.cast(tf.maximum(uniforms, 2.0**-24), tf.float64)\n"
        "    skipped = tf.floor(tf.math.log(shorter) / rate)",
        (_OF_SKIPS,),
    ),
    Fault(
        "the_first_row_of_a_table_goes_to_the_one_before",
        _THRESHOLD,
        "row_ids, tf.constant(contributions.offsets, tf.int64), out_type=tf.int64",
        "row_ids, tf.constant(contributions.offsets, tf.int64), 'right', tf.int64",
        (f"{_OF_THRESHOLD}::test_bookkeeping", _OF_BY_TABLE),
    ),
    Fault(
        "rows_of_a_table_under_the_numbers_of_the_next",
        _BY_TABLE,
        "own = row_ids - tf.repeat(tf.constant(offsets[:-1], tf.int64), sizes)",
        "own = tf.maximum(row_ids - tf.repeat(tf.constant(offsets[1:], tf.int64), sizes), 0)",
        (_OF_BY_TABLE,),
    ),
    Fault(
        "slots_of_a_table_among_those_of_all",
        _BY_TABLE,
        "within = places - _repeated(tf.cast(starts[:-1], tf.int32), widths)",
        "within = places",
        (_OF_BY_TABLE,),
    ),
    Fault(
        "lookups_of_rows_that_were_not_selected_vote",
        "dp_sparse/selection/step_rows.py",
        "lookups.valid & (places >= 0)",
        "lookups.valid",
        ("tests/optimizers/test_fest.py::test_adafest_plus_is_adafest_on_the_selected_rows",),
    ),
    Fault(
        "rows_that_the_plan_does_not_pay_for",
        "dp_sparse/optimizers/sparse_base.py",
        "if rows.costs and rows.release not in plan.releases:",
        "if rows.costs and False:",
        ("tests/optimizers/test_fest.py::test_rows_that_the_plan_does_not_pay_for_are_refused",),
    ),
    Fault(
        "exponential_selection_of_half_the_sensitivity",
        "dp_sparse/optimizers/exponential.py",
        "scale = self.row_clip_norm / mechanism.epsilon_per_row(sigma)",
        "scale = 0.5 * self.row_clip_norm / mechanism.epsilon_per_row(sigma)",
        (f"{_OF_ROWS}::test_picks_are_as_random_as_they_are_paid_for[graph]",),
    ),
    Fault(
        "scores_that_move_in_both_directions",
        _SCORES,
        "tf.floor(tf.minimum(share, _UNITS)), 0.0)",
        "tf.floor(tf.minimum(2 * share, 2 * _UNITS)) - _UNITS, 0.0)",
        (f"{_OF_EXPONENTIAL}::test_an_example_moves_each_score_by_at_most_c",),
    ),
    Fault(
        "scores_not_clipped",
        _SCORES,
        "share = norms * tf.minimum(_UNITS / largest, _UNITS / tf.constant(clip_norm, tf.float64))",
        "share = norms * tf.maximum(_UNITS / largest, _UNITS / tf.constant(clip_norm, tf.float64))",
        (f"{_OF_EXPONENTIAL}::test_scores_are_those_of_a_loop",),
    ),
    Fault(
        "rows_without_a_score_never_picked",
        _EXPONENTIAL,
        "tf.concat([noisy, scale * of_others], 0), count",
        "tf.concat([noisy, scale * of_others - 1e9], 0), count",
        (f"{_OF_EXPONENTIAL}::test_every_set_of_rows_has_its_probability",),
    ),
    Fault(
        "rows_picked_by_their_number",
        _EXPONENTIAL,
        "order = tf.argsort(tf.where(there, uniforms, math.inf))",
        "order = tf.argsort(tf.where(there, 0.0 * uniforms, math.inf), stable=True)",
        (f"{_OF_EXPONENTIAL}::test_distinct_numbers_are_in_uniformly_random_order",),
    ),
)
