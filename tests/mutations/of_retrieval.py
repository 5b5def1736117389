"""Faults of rows that a step draws without its batch."""

from tests.mutations.fault import Fault

_LOOKUPS = "dp_sparse/clipping/gradient_terms/lookups.py"
_SCORED = "tests/clipping/rules/test_scored_lookups.py"
_STEPS = "tests/training/test_sampled_softmax.py"
_NORMS = f"{_SCORED}::test_norms_and_sums_on_the_chosen_rows[False-chosen0-1]"

FAULTS = (
    Fault(
        "negatives_vote",
        _LOOKUPS,
        "        votes = tf.zeros_like(self.valid)\n",
        "        votes = tf.ones_like(self.valid)\n",
        (f"{_SCORED}::test_lookups_of_scores_do_not_vote_and_others_do",),
    ),
    Fault(
        "scores_of_rows_that_are_not_looked_up_have_no_norm",
        _LOOKUPS,
        "whole.squared_norms() + exact(others.squared_norms())",
        "own.plus(scored).squared_norms()",
        (_NORMS,),
    ),
    Fault(
        "a_row_that_is_looked_up_and_scored_counts_as_two",
        _LOOKUPS,
        "whole.squared_norms() + exact(others.squared_norms())",
        "own.squared_norms() + exact(scored.squared_norms())",
        (_NORMS,),
    ),
    Fault(
        "scores_have_no_clip_factor",
        _LOOKUPS,
        "hidden = flat(self.hidden * numerics.expanded(factors, self.hidden))",
        "hidden = flat(self.hidden)",
        (_NORMS,),
    ),
    Fault(
        "scores_of_rows_outside_the_step_count_in_norms",
        _LOOKUPS,
        "        chosen = self.scored_places >= 0\n",
        "        chosen = self.scored_places >= -1\n",
        (f"{_SCORED}::test_norms_and_sums_on_the_chosen_rows[False-chosen1-1]",),
    ),
    Fault(
        "negatives_get_no_noise_of_their_own",
        "dp_sparse/optimizers/replica_rows.py",
        "rows if ids is None else",
        "rows if ids is None or True else",
        (f"{_STEPS}::test_negatives_get_noise_and_have_no_vote[False]",),
    ),
    Fault(
        "negatives_beyond_the_selected_rows_train",
        "dp_sparse/optimizers/sparse_base.py",
        "return among_selected(row_ids, ",
        "return row_ids; (row_ids, ",
        (f"{_STEPS}::test_of_selected_rows_only_those_are_drawn[fest]",),
    ),
    Fault(
        "negatives_of_a_tower_may_be_those_of_each_example",
        "dp_sparse/clipping/rules/embedding.py",
        "same = require(tf.reduce_all(tf.equal(row_ids, row_ids[:1])), PrivacyError, message)",
        "same = require(tf.reduce_all(tf.equal(row_ids, row_ids)), PrivacyError, message)",
        (f"{_STEPS}::test_negatives_of_a_tower_that_differ_by_example_are_refused",),
    ),
    Fault(
        "nobody_pays_for_noisy_frequencies_of_negatives",
        "dp_sparse/layers/losses.py",
        "return None if own is None or not own.costs else own.release",
        "return None if own is None or own.costs else own.release",
        (f"{_STEPS}::test_noisy_frequencies_are_paid_by_the_plan",),
    ),
)
