"""Faults of private vocabularies: votes, noise, threshold, order, and what is paid once."""

from tests.mutations.fault import Fault

_THRESHOLD = "dp_sparse/selection/vocabulary/threshold.py"
_COUNTING = "dp_sparse/selection/vocabulary/counting.py"
_DRAW = "dp_sparse/selection/vocabulary/draw.py"
_VOCABULARY = "dp_sparse/selection/vocabulary/vocabulary.py"

_OF_THRESHOLD = "tests/selection/vocabulary/test_threshold.py"
_OF_COUNTING = "tests/selection/vocabulary/test_counting.py"
_OF_DRAW = "tests/selection/vocabulary/test_draw.py"
_OF_VOCABULARY = "tests/selection/vocabulary/test_vocabulary.py"
_OF_ATTACKS = "tests/attacks/test_vocabulary.py"

FAULTS = (
    Fault(
        "a_threshold_for_one_value_of_an_example",
        _THRESHOLD,
        "math.log1p(-self.delta) / max_values",
        "math.log1p(-self.delta)",
        (f"{_OF_THRESHOLD}::test_an_example_of_unique_values_is_seldom_seen",),
    ),
    Fault(
        "a_threshold_without_the_rounding_of_noise",
        _THRESHOLD,
        "math.ceil(0.5 + self.source",
        "math.floor(0.5 + self.source",
        (f"{_OF_THRESHOLD}::test_it_is_the_smallest_that_keeps_delta",),
    ),
    Fault(
        "a_threshold_that_nobody_pays",
        "dp_sparse/accounting/privacy_loss.py",
        "np.array([1 - delta]), delta, True)",
        "np.array([1.0]), 0.0, True)",
        (f"{_OF_THRESHOLD}::TestCost::test_the_plans_delta_includes_the_thresholds",),
    ),
    Fault(
        "noise_of_a_vocabulary_for_one_value",
        _DRAW,
        "source.scale_of(draw.max_values)",
        "source.scale_of(1)",
        (f"{_OF_DRAW}::TestNoise::test_it_has_the_deviation_that_is_paid",),
    ),
    Fault(
        "values_are_chosen_by_their_counts_without_noise",
        _DRAW,
        "np.flatnonzero(noisy > threshold)",
        "np.flatnonzero(column.counts > threshold)",
        (f"{_OF_DRAW}::test_with_recorded_noise_it_is_the_reference",),
    ),
    Fault(
        "equal_values_in_the_order_of_appearance",
        _DRAW,
        "        found.sort()\n",
        "        found.sort(key=lambda each: each[0])\n",
        (f"{_OF_ATTACKS}::test_places_do_not_tell_the_order_of_examples",),
    ),
    Fault(
        "values_without_a_vote_are_candidates",
        _COUNTING,
        "voted = np.flatnonzero(counts)",
        "voted = np.arange(len(counts))",
        (
            f"{_OF_ATTACKS}::"
            "test_countless_values_of_one_example_add_as_many_candidates_as_it_has_votes",
        ),
    ),
    Fault(
        "votes_for_a_vocabulary_beyond_the_cap",
        _COUNTING,
        "for at, c in order], axis=1), max_values)",
        "for at, c in order], axis=1), 2**31)",
        (f"{_OF_COUNTING}::test_one_example_changes_at_most_m_counts_by_one_each",),
    ),
    Fault(
        "padding_in_front_moves_votes",
        _COUNTING,
        '    order = np.argsort(keys < 0, axis=1, kind="stable")\n',
        '    order = np.argsort(0 * keys, axis=1, kind="stable")\n',
        (f"{_OF_ATTACKS}::test_the_longest_example_does_not_move_the_votes_of_the_others",),
    ),
    Fault(
        "a_list_becomes_values_of_one_kind",
        _COUNTING,
        'dtype=None if hasattr(values, "dtype") else object',
        "dtype=None",
        (f"{_OF_COUNTING}::test_one_value_of_a_list_does_not_change_the_others",),
    ),
    Fault(
        "one_text_has_two_votes",
        _COUNTING,
        "if kind is bytes and types != {bytes}:",
        "if kind is bytes and types == {str}:",
        (f"{_OF_COUNTING}::test_one_text_as_str_and_as_bytes_has_one_vote",),
    ),
    Fault(
        "examples_of_weight_0_vote_for_values",
        _COUNTING,
        "places = [np.where(present[:, None], each, 0) for each in places]",
        "pass",
        (f"{_OF_ATTACKS}::test_padding_adds_no_candidate",),
    ),
    Fault(
        "a_vocabulary_of_more_examples_than_the_plans",
        _COUNTING,
        "    if seen != num_examples:\n",
        "    if False:\n",
        (f"{_OF_COUNTING}::test_other_numbers_of_examples",),
    ),
    Fault(
        "values_of_a_dataset_that_mixes_examples",
        _COUNTING,
        "        check_source(examples)\n",
        "        pass\n",
        (f"{_OF_COUNTING}::test_a_dataset_that_mixes_examples",),
    ),
    Fault(
        "a_second_vocabulary_of_one_plan",
        _DRAW,
        "        _DRAWN[plan.run_id] = _Drawn(vocabulary, asked)\n",
        "        pass\n",
        (f"{_OF_ATTACKS}::test_a_second_vocabulary_of_one_plan_is_refused_or_the_same",),
    ),
    Fault(
        "a_vocabulary_of_a_run_beside_its_folder",
        _DRAW,
        "    if has_folder(plan.run_id) and not kept:\n",
        "    if False:\n",
        (f"{_OF_ATTACKS}::TestRun::test_it_is_drawn_once",),
    ),
    Fault(
        "a_run_takes_the_vocabulary_of_another",
        "dp_sparse/runs/run.py",
        "        if words.draws[-1].paid_by != run_plan.run_id:\n",
        "        if False:\n",
        (f"{_OF_ATTACKS}::TestRun::test_that_of_another_run",),
    ),
    Fault(
        "new_values_move_old_ids",
        _VOCABULARY,
        "(*own, *(newer.values[name][at] for at in added))",
        "(*(newer.values[name][at] for at in added), *own)",
        (f"{_OF_VOCABULARY}::test_new_values_stand_behind_the_old_ones",),
    ),
    Fault(
        "two_vocabularies_of_one_plan_are_joined",
        _VOCABULARY,
        "        if payers & {draw.paid_by for draw in newer.draws}:\n",
        "        if False:\n",
        (f"{_OF_VOCABULARY}::test_each_draw_has_a_plan_of_its_own",),
    ),
)
