"""Faults of Re-Attention and of the frequencies that it needs."""

from tests.mutations.fault import Fault

_RE_ATTENTION = "dp_sparse/layers/re_attention.py"
_HISTOGRAMS = "dp_sparse/selection/top_k/histograms.py"
_DETACHED = "dp_sparse/clipping/tap.py"

_OF_RE_ATTENTION = "tests/layers/test_re_attention.py"
_OF_FREQUENCIES = "tests/selection/top_k/test_frequencies.py"

FAULTS = (
    Fault(
        "gradient_through_the_correction",
        _RE_ATTENTION,
        "return tf.stop_gradient(excess)",
        "return excess",
        (f"{_OF_RE_ATTENTION}::test_no_gradient_flows_through_the_correction",),
    ),
    Fault(
        "correction_by_the_whole_variance",
        _RE_ATTENTION,
        "halves = 0.5 * tf.square(",
        "halves = tf.square(",
        (f"{_OF_RE_ATTENTION}::test_expected_exponentials_are_those_of_the_means",),
    ),
    Fault(
        "gradient_through_detached_weights",
        _DETACHED,
        "return tf.stop_gradient(tf.cast(value, tf.float32))",
        "return tf.cast(value, tf.float32)",
        (f"{_OF_RE_ATTENTION}::test_detached_weights_have_no_gradient_and_others_stay_refused",),
    ),
    Fault(
        "frequencies_without_a_release_accepted",
        "dp_sparse/layers/error_propagation.py",
        "if frequencies.costs and frequencies.release not in plan.releases:",
        "if False:",
        (f"{_OF_RE_ATTENTION}::test_frequencies_of_private_data_must_be_paid_for",),
    ),
    Fault(
        "frequencies_paid_by_another_plan_accepted",
        "dp_sparse/step/building.py",
        "        layer.require_paid(optimizer.plan.releases, fix)\n",
        "",
        (
            f"{_OF_RE_ATTENTION}::"
            "test_a_model_with_private_frequencies_trains_under_the_plan_that_pays_alone",
        ),
    ),
    Fault(
        "histogram_noise_of_one_lookup",
        _HISTOGRAMS,
        "source.scale_of(lookups), rng",
        "source.scale_of(1), rng",
        (f"{_OF_FREQUENCIES}::test_the_noise_is_that_of_its_source_and_rejects_others",),
    ),
    Fault(
        "a_sum_in_a_kernel_that_two_threads_may_run",
        "dp_sparse/layers/error_propagation.py",
        "    return variance + tf.square(mean)\n",
        "    return variance + tf.square(mean) + 0.0 * _average(mean)\n",
        ("tests/core/test_kernels.py",),
    ),
)
