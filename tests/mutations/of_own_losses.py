"""Faults of losses that models compute by themselves."""

from tests.mutations.fault import Fault

_OWN_LOSS = "dp_sparse/step/own_loss.py"
_TESTS = "tests/training/test_own_loss.py"

FAULTS = (
    Fault(
        "a_mean_is_taken_for_a_sum",
        _OWN_LOSS,
        "            return given * size\n",
        "            return given\n",
        (f"{_TESTS}::test_trains_as_the_same_loss_of_compile[DPSGDOptimizer-arguments0-mean]",),
    ),
    Fault(
        "a_weighted_mean_is_taken_for_a_mean",
        "dp_sparse/step/loss_kind.py",
        "MEAN: -1.0, WEIGHTED: -2.0}",
        "WEIGHTED: -1.0, MEAN: -2.0}",
        (
            f"{_TESTS}::test_trains_as_the_same_loss_of_compile"
            "[DPSGDOptimizer-arguments0-divided by all weights]",
        ),
    ),
    Fault(
        "an_own_loss_that_no_check_has_seen_is_trained",
        _OWN_LOSS,
        "kind = kind_of(self._model)\n",
        "kind = kind_of(self._model) or MEAN\n",
        (f"{_TESTS}::test_a_step_that_no_check_has_seen_is_refused",),
    ),
    Fault(
        "the_kind_of_a_loss_outlives_compile",
        _OWN_LOSS,
        "    _KINDS.pop(model, None)\n",
        "    del model\n",
        (f"{_TESTS}::test_the_kind_is_measured_anew_after_compile",),
    ),
    Fault(
        "one_loss_that_is_not_finite_drops_the_batch",
        _OWN_LOSS,
        "return nothing, present",
        "return given + nothing, present",
        (f"{_TESTS}::test_an_example_without_a_finite_loss_does_not_train_and_leaves_the_others",),
    ),
    Fault(
        "padding_is_told_by_its_weight",
        _OWN_LOSS,
        "& (weights >= 0), weights, 1.0)",
        "& (weights >= 0), weights, weights)",
        (f"{_TESTS}::test_a_loss_cannot_tell_padding_by_its_weight",),
    ),
    Fault(
        "no_check_sees_other_weights",
        "dp_sparse/step/preflight_checks.py",
        "weights_too=has_own_loss(model)",
        "weights_too=False",
        (f"{_TESTS}::test_weights_decide_for_none_of_the_others",),
    ),
    Fault(
        "no_outputs_are_replaced",
        "dp_sparse/step/loss_kind.py",
        "    return tf.where(whose, leaf, tf.cast(value, leaf.dtype))\n",
        "    return tf.where(whose, leaf, leaf)\n",
        (f"{_TESTS}::test_what_mixes_examples_is_refused_before_a_step[flooding]",),
    ),
    Fault(
        "a_loss_may_take_gradients",
        _OWN_LOSS,
        "own, tf.GradientTape.__enter__ = tf.GradientTape.__enter__, enter",
        "own = tf.GradientTape.__enter__",
        (f"{_TESTS}::test_what_mixes_examples_is_refused_before_a_step[a gradient of its own]",),
    ),
    Fault(
        "layers_of_the_loss_are_built_after_the_optimizer",
        "dp_sparse/step/building.py",
        "            own_loss.build_layers(model, examples)\n",
        "            pass\n",
        (f"{_TESTS}::test_layers_that_the_loss_alone_calls_are_clipped_and_train",),
    ),
)
