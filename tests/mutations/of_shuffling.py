"""Faults of shuffled DP-SGD: what is permuted, what is clipped, and what is said of a claim."""

from tests.mutations.fault import Fault

_OPTIMIZER = "dp_sparse/shuffling/optimizer.py"
_PERMUTE = "dp_sparse/shuffling/groups.py"
_GROUPS = "dp_sparse/shuffling/groups.py"
_HEURISTIC = "dp_sparse/shuffling/heuristic.py"
_OF_SHUFFLING = "tests/shuffling/test_shuffling.py"
_OF_HEURISTIC = "tests/shuffling/test_heuristic.py"
_INVARIANT = (
    "tests/shuffling/test_invariance.py::test_forward_and_backward_are_invariant_to_1e_6[mlp-False]"
)

FAULTS = (
    Fault(
        "a_sum_below_the_batch_norm_is_stretched",
        _OPTIMIZER,
        "tf.minimum(tf.constant(1.0, tf.float64), norm * tf.math.rsqrt(squared))",
        "norm * tf.math.rsqrt(squared)",
        ("tests/shuffling/test_saving.py::test_clipping_the_sum_moves_no_two_sums_apart",),
    ),
    Fault(
        "heads_keep_their_places",
        _PERMUTE,
        "size * order + within",
        "size * tf.sort(order, axis=0) + within",
        (f"{_OF_SHUFFLING}::test_permutations_are_uniform",),
    ),
    Fault(
        "heads_share_a_permutation_of_units",
        _PERMUTE,
        "within = tf.argsort(tf.reshape(units, [heads, size]), axis=1)",
        "within = tf.argsort(tf.reshape(units, [heads, size])[:1], axis=1)",
        (f"{_OF_SHUFFLING}::test_permutations_are_uniform",),
    ),
    Fault(
        "slots_stay_behind_their_units",
        _PERMUTE,
        "(member.variable, *followers(member.variable))",
        "(member.variable,)",
        (_INVARIANT,),
    ),
    Fault(
        "a_bias_stays_behind_its_units",
        _GROUPS,
        "vectors = [first.bias]",
        "vectors = [first.bias and None]",
        (_INVARIANT,),
    ),
    Fault(
        "units_that_leave_a_model_change_places",
        _GROUPS,
        " or id(layer) in outputs:",
        ":",
        (f"{_OF_SHUFFLING}::test_units_that_leave_a_model_stay",),
    ),
    Fault(
        "a_claim_is_taken_unasked",
        _OPTIMIZER,
        "if claim is not None and not self.heuristic:",
        "if claim is None and self.heuristic:",
        (f"{_OF_HEURISTIC}::test_it_must_be_asked_for",),
    ),
    Fault(
        "a_statement_without_what_is_not_guaranteed",
        "dp_sparse/accounting/statement.py",
        "lines = [] if claim is None else [beside(*claim, self.budget)]",
        "lines = []",
        (f"{_OF_HEURISTIC}::test_the_plan_guarantees_what_dp_sgd_does_at_this_noise",),
    ),
    Fault(
        "the_claimed_budget_as_what_is_guaranteed",
        _HEURISTIC,
        "return dataclasses.replace(plan, mechanism=mechanism).with_noise(sigma)",
        "found = dataclasses.replace(plan, mechanism=mechanism).with_noise(sigma)\n"
        "    return dataclasses.replace(found, budget=plan.budget)",
        (f"{_OF_HEURISTIC}::test_the_plan_guarantees_what_dp_sgd_does_at_this_noise",),
    ),
)
