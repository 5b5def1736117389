"""Faults of norms and of clip factors."""

from tests.mutations.fault import Fault

_LOOKUPS = "dp_sparse/clipping/gradient_terms/lookups.py"
_SCORES = "dp_sparse/clipping/gradient_terms/scores.py"
_PRODUCT = "dp_sparse/clipping/gradient_terms/product.py"
_TIED = "dp_sparse/clipping/gradient_terms/lookups.py"
_NUMERICS = "dp_sparse/clipping/gradient_terms/numerics.py"
_STYLES = "dp_sparse/clipping/styles.py"
_SCALING = "dp_sparse/clipping/clipped_sums.py"
_DEVICE_STEP = "dp_sparse/distribution/embedding_layers/device_step.py"

_OF_USES = "tests/clipping/test_gradient_terms.py"
_OF_NUMERICS = "tests/clipping/test_numerics.py"
_OF_STYLES = "tests/clipping/test_styles.py"
_OF_SCALING = "tests/clipping/test_scaling.py"
_OF_TIED = "tests/clipping/rules/test_reversible_embedding.py"
_OF_DENSE = "tests/clipping/rules/test_dense.py"
_OF_EMBEDDING = "tests/clipping/rules/test_embedding.py"
_OF_LORA = "tests/clipping/rules/test_lora.py"
_OF_GRID = "tests/distribution/embedding_layers/test_rounding_grid.py"

FAULTS = (
    Fault(
        "duplicate_ids_of_an_example_not_summed",
        _SCORES,
        "sums = tf.math.unsorted_segment_sum(flat(cotangents), groups.places, tf.size(pairs))",
        "sums = tf.sqrt(tf.math.unsorted_segment_sum("
        "tf.square(flat(cotangents)), groups.places, tf.size(pairs)))",
        (f"{_OF_USES}::test_repeated_rows_add_before_squaring",),
    ),
    Fault(
        "rows_of_two_examples_taken_for_one",
        _SCORES,
        "groups = grouped(example * num_rows + tf.reshape(row_ids, [-1]), -1)",
        "groups = grouped(example + tf.reshape(row_ids, [-1]), -1)",
        (f"{_OF_USES}::test_repeated_rows_add_before_squaring",),
    ),
    Fault(
        "masked_lookups_train_an_adapter",
        "dp_sparse/clipping/rules/embedding.py",
        "Product(tf.gather(replicas.own_copy(a.value), ids) * trained, scaled)",
        "Product(tf.gather(replicas.own_copy(a.value), ids) * trained**0, scaled)",
        (f"{_OF_LORA}::test_masked_lookups_train_neither_adapter_of_a_table",),
    ),
    Fault(
        "masked_lookups_train_rows_of_an_adapter",
        "dp_sparse/clipping/rules/embedding.py",
        'Rows(ids, valid, tf.einsum("bld,rd->blr", scaled, b.value))',
        'Rows(ids, valid | True, tf.einsum("bld,rd->blr", scaled, b.value))',
        (f"{_OF_LORA}::test_masked_lookups_train_neither_adapter_of_a_table",),
    ),
    Fault(
        "a_device_clips_as_if_it_did_not_round",
        _DEVICE_STEP,
        "tables.grid.clip_norm_before_rounding, optimizer.clipping",
        "tables.grid.clip_norm, optimizer.clipping",
        (f"{_OF_GRID}::test_a_step_clips_to_what_leaves_room_for_rounding",),
    ),
    Fault(
        "a_device_hands_over_a_row_twice",
        _DEVICE_STEP,
        '            shares = _once_a_row(shares, batch["first"][table.path])\n',
        "            assert table.path\n",
        (f"{_OF_GRID}::test_what_a_step_hands_over_is_on_the_grid_and_once_a_row",),
    ),
    Fault(
        "a_device_hands_over_gradients_off_the_grid",
        _DEVICE_STEP,
        'shares = tables.grid.rounded(shares, _seeds(draw)(_ROUNDING + number, "int32"))',
        "assert number >= 0",
        (f"{_OF_GRID}::test_what_a_step_hands_over_is_on_the_grid_and_once_a_row",),
    ),
    Fault(
        "a_device_trains_although_a_check_failed",
        _DEVICE_STEP,
        "{name: tf.where(good, gradient, 0.0) for name, gradient in sent.items()}",
        "{name: tf.where(good | True, gradient, 0.0) for name, gradient in sent.items()}",
        (f"{_OF_GRID}::test_what_a_step_hands_over_is_on_the_grid_and_once_a_row",),
    ),
    Fault(
        "masked_lookups_train_their_row",
        _LOOKUPS,
        "own = tf.where(self.valid, places, -1)",
        "own = places",
        (f"{_OF_EMBEDDING}::test_masked_lookups_do_not_train_row_0",),
    ),
    Fault(
        "rows_restricted_after_clipping",
        _LOOKUPS,
        "self.valid if self.places is None else self.places >= 0, tf.float32",
        "self.valid, tf.float32",
        (f"{_OF_EMBEDDING}::test_rows_outside_the_choice_are_zeroed_before_clipping",),
    ),
    Fault(
        "cross_terms_of_a_tied_table_dropped",
        _TIED,
        "squared = tf.reduce_sum(tf.square(sums + as_output), axis=1)",
        "squared = tf.reduce_sum(tf.square(sums) + tf.square(as_output), axis=1)",
        (f"{_OF_TIED}::test_norms_and_clipped_sum",),
    ),
    Fault(
        "cross_terms_of_a_tied_table_dropped_at_several_positions",
        _TIED,
        "return numerics.squares(tf.tensor_scatter_nd_add(gradients, pairs[own] - first, given))",
        "rows = tf.tensor_scatter_nd_add(0 * gradients, pairs[own] - first, given)\n"
        "            return numerics.squares(gradients) + numerics.squares(rows)",
        (f"{_OF_TIED}::test_norms_and_clipped_sum",),
    ),
    Fault(
        "bias_squared_before_the_sum_over_the_sequence",
        "dp_sparse/clipping/rules/dense.py",
        "terms.append((layer.bias, Explicit(_over_positions(dz))))",
        "axes = list(range(1, dz.shape.rank))\n"
        "            early = {'squared_norms': lambda _: tf.reduce_sum(tf.square(dz), axis=axes)}\n"
        "            kind = type('Early', (Explicit,), early)\n"
        "            terms.append((layer.bias, kind(_over_positions(dz))))",
        (f"{_OF_DENSE}::test_random_dense_layers",),
    ),
    Fault(
        "norms_of_two_calls_added",
        _PRODUCT,
        "return type(self)(tf.concat(inputs, axis=-2), tf.concat(cotangents, axis=-2))",
        "norms = tf.add_n([use.squared_norms() for use in uses])\n"
        "        kind = type('Added', (Product,), {'squared_norms': lambda _: norms})\n"
        "        return kind(tf.concat(inputs, axis=-2), tf.concat(cotangents, axis=-2))",
        (f"{_OF_DENSE}::test_shared_layer_called_twice_adds_before_squaring",),
    ),
    Fault(
        "positions_squared_before_their_sum",
        _PRODUCT,
        "return tf.cast(tf.reduce_sum(inner * outer, axis=[1, 2]), tf.float32)",
        "return tf.cast(tf.linalg.trace(inner * outer), tf.float32)",
        (f"{_OF_USES}::test_both_formulas_for_a_product_agree",),
    ),
    Fault(
        "last_columns_left_out_of_the_norm",
        _PRODUCT,
        "for start in range(0, wide.shape[2], columns):",
        "for start in range(0, max(1, wide.shape[2] - columns), columns):",
        (_OF_USES,),
    ),
    Fault(
        "a_variable_left_out_of_the_norm",
        _STYLES,
        "return [_bounded(total(squared), clip_norm)] * len(variables)",
        "return [_bounded(total(squared[1:] or squared), clip_norm)] * len(variables)",
        (f"{_OF_STYLES}::test_one_example_adds_at_most_c",),
    ),
    Fault(
        "guard_against_cancellation_off",
        _NUMERICS,
        "tf.maximum(squared_norms, tf.square(masses / 1000.0))",
        "squared_norms",
        (f"{_OF_NUMERICS}::test_rows_that_cancel", f"{_OF_NUMERICS}::test_positions_that_cancel"),
    ),
    Fault(
        "gram_products_in_float32",
        _PRODUCT,
        "x, dz = tf.cast(self.inputs, tf.float64), tf.cast(self.cotangents, tf.float64)",
        "x, dz = self.inputs, self.cotangents",
        (_OF_NUMERICS, _OF_USES),
    ),
    Fault(
        "squares_of_tiny_numbers_vanish",
        _NUMERICS,
        "return tf.square(tf.math.reduce_euclidean_norm(values, axis=axes)) + floor",
        "return tf.square(tf.math.reduce_euclidean_norm(values, axis=axes))",
        (f"{_OF_NUMERICS}::test_tiny_inputs_times_huge_cotangents",),
    ),
    Fault(
        "sums_over_the_batch_in_float32",
        _LOOKUPS,
        "scaled = exact(cotangents * factors[:, tf.newaxis])",
        "scaled = cotangents * factors[:, tf.newaxis]",
        (f"{_OF_USES}::test_large_sums_are_not_rounded_by_more_than_an_example_may_move_them",),
    ),
    Fault(
        "mean_of_the_losses_in_place_of_their_sum",
        "dp_sparse/step/forward_backward.py",
        "of_outputs, tf.reduce_sum(losses))",
        "of_outputs, tf.reduce_mean(losses))",
        ("tests/training/test_train_step.py::test_noise_free_dpsgd_is_clip_sum_divide",),
    ),
    Fault(
        "small_gradients_blown_up_to_c",
        _STYLES,
        "return tf.minimum(1.0, below * tf.math.rsqrt(tf.maximum(squared, _TINY)))",
        "return below * tf.math.rsqrt(tf.maximum(squared, _TINY))",
        (f"{_OF_SCALING}::test_random_models",),
    ),
    Fault(
        "square_root_of_the_norm_left_out",
        _STYLES,
        "below * tf.math.rsqrt(tf.maximum(squared, _TINY))",
        "below / tf.maximum(squared, _TINY)",
        (f"{_OF_STYLES}::test_one_example_adds_at_most_c",),
    ),
    Fault(
        "no_room_for_the_rounding_of_factors",
        _STYLES,
        "_BELOW = 1 - 2.0**-20",
        "_BELOW = 1.0",
        (_OF_STYLES, _OF_SCALING),
    ),
    Fault(
        "c_for_each_layer",
        _STYLES,
        "clip_norm * shares[name] ** 0.5",
        "clip_norm",
        (f"{_OF_STYLES}::test_per_layer_clipping_splits_the_square_of_c",),
    ),
    Fault(
        "shares_of_c_in_place_of_its_square",
        _STYLES,
        "clip_norm * shares[name] ** 0.5",
        "clip_norm * shares[name] ** 0.25",
        (f"{_OF_STYLES}::test_one_example_adds_at_most_c",),
    ),
    Fault(
        "count_of_unclipped_examples_moves_by_one",
        _STYLES,
        "counts = tf.clip_by_value(below / _RAMP, -0.5, 0.5)",
        "counts = tf.clip_by_value(below / _RAMP, -0.5, 1.0)",
        (
            "tests/training/test_quantile_clipping.py"
            "::test_one_example_moves_the_statistic_by_half_at_most",
        ),
    ),
    Fault(
        "padding_counts_as_unclipped",
        _STYLES,
        "return tf.reduce_sum(tf.where(present > 0, counts, 0.0))",
        "return tf.reduce_sum(counts)",
        (
            "tests/training/test_quantile_clipping.py"
            "::test_padding_and_examples_that_are_not_finite",
        ),
    ),
    Fault(
        "padding_in_the_sums",
        _SCALING,
        "kept = tf.cast(real > 0, tf.float32) * _overflow_ramp(sizes)",
        "kept = _overflow_ramp(sizes)",
        (f"{_OF_SCALING}::test_no_real_example_gives_exact_zeros",),
    ),
    Fault(
        "examples_that_are_not_finite_kept",
        _SCALING,
        "tf.where(finite, f * kept, 0.0)",
        "f * kept",
        (f"{_OF_SCALING}::test_a_non_finite_example_is_zeroed_exactly",),
    ),
    Fault(
        "records_that_are_not_finite_kept",
        _SCALING,
        "zip(_sanitised(terms, finite), factors, strict=True)",
        "zip(terms, factors, strict=True)",
        (f"{_OF_SCALING}::test_a_non_finite_example_is_zeroed_exactly",),
    ),
    Fault(
        "losses_that_are_not_finite_kept",
        _SCALING,
        "finite = tf.math.is_finite(total) & tf.math.is_finite(losses)",
        "finite = tf.math.is_finite(total)",
        (f"{_OF_SCALING}::test_a_loss_that_is_not_finite_zeroes_an_example_whose_gradient_is",),
    ),
    Fault(
        "a_last_bit_switches_an_example_off",
        _SCALING,
        "return tf.clip_by_value(2.0 - sizes, 0.0, 1.0)",
        "return tf.cast(sizes < 1.0, tf.float32)",
        (f"{_OF_NUMERICS}::test_a_last_bit_near_overflow_switches_no_example_on_or_off",),
    ),
    Fault(
        "weights_applied_after_clipping",
        "dp_sparse/step/forward_backward.py",
        "    return run, clipped_sums(optimizer, run, choice, real)\n",
        "    import types\n\n"
        "    weights = tf.nest.flatten(examples.sample_weight)[0]\n"
        "    names = 'clipping', 'dense_variables', 'tables', 'diagnostics'\n"
        "    other = types.SimpleNamespace(**{name: getattr(optimizer, name) for name in names})\n"
        "    other.current_clip_norm = optimizer.current_clip_norm * weights\n"
        "    return run, clipped_sums(other, run, choice, real)\n",
        ("tests/training/test_train_step.py::test_class_weights_scale_the_loss_before_clipping",),
    ),
    Fault(
        "regulariser_divided_by_the_batch_size",
        "dp_sparse/optimizers/keras_wrapper.py",
        "return gradient + tape.gradient(penalty, value)",
        "return gradient + tape.gradient(penalty, value) / 4.0",
        (
            "tests/training/test_train_step.py"
            "::test_dense_regulariser_gradient_is_added_after_the_noise",
        ),
    ),
    Fault(
        "a_metric_in_the_loss",
        "dp_sparse/step/losses.py",
        "refused = [*model.trainable_variables, *metric_variables(model)]",
        "refused = [*model.trainable_variables]",
        ("tests/training/test_losses.py::test_a_loss_that_reads_a_metric_is_refused",),
    ),
    Fault(
        "mean_over_all_examples_with_a_mask",
        "dp_sparse/step/losses.py",
        "tf.math.divide_no_nan(total, count)",
        "tf.math.divide_no_nan(total, tf.reduce_mean(count))",
        ("tests/training/test_losses.py::test_a_mask_counts_within_the_example_alone",),
    ),
    Fault(
        "an_ignored_class_drops_the_mask_of_the_outputs",
        "dp_sparse/step/losses.py",
        "mask = own if mask is None else mask if own is None else mask & own",
        "mask = mask if own is None else own",
        (
            "tests/training/test_losses.py"
            "::test_an_ignored_class_and_the_mask_of_the_outputs_hold_together",
        ),
    ),
)
