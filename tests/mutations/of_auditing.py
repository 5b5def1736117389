"""Faults of audits: bounds that say too much, and runs that nobody pays for."""

from tests.mutations.fault import Fault

_AUDIT = "dp_sparse/auditing/audit.py"
_ESTIMATORS = "dp_sparse/auditing/estimators.py"
_OF_AUDIT = "tests/auditing/test_audit.py"
_OF_ESTIMATORS = "tests/auditing/test_estimators.py"

FAULTS = (
    Fault(
        "a_threshold_chosen_on_the_judged_canaries",
        _AUDIT,
        "for attack, scores in pilot.items()}",
        "for attack, scores in judged.items()}",
        (f"{_OF_AUDIT}::test_thresholds_come_from_the_first_run",),
    ),
    Fault(
        "each_bound_at_the_confidence_of_all",
        _AUDIT,
        "confidence = 1 - (1 - self.confidence) / len(estimators)",
        "confidence = self.confidence",
        (f"{_OF_AUDIT}::test_all_bounds_hold_together",),
    ),
    Fault(
        "only_the_first_run_is_charged",
        _AUDIT,
        "if self.account is not None:",
        "if self.account is not None and not runs:",
        (f"{_OF_AUDIT}::test_each_run_is_charged_before_it_begins",),
    ),
    Fault(
        "an_interval_that_fails_on_either_side",
        _ESTIMATORS,
        'side = (1 - validate.probability("confidence", confidence)) / 2',
        'side = 1 - validate.probability("confidence", confidence)',
        (f"{_OF_ESTIMATORS}::test_clopper_pearson_is_the_inverse_of_the_binomial_tail",),
    ),
    Fault(
        "half_of_delta_in_one_run",
        _ESTIMATORS,
        "tail + 2 * canaries * delta",
        "tail + canaries * delta",
        (f"{_OF_ESTIMATORS}::test_one_run_bound_is_where_the_p_value_of_the_paper_is_met",),
    ),
    Fault(
        "a_wrong_claim_ends_as_a_right_one",
        "dp_sparse/__main__.py",
        "return _EXCEEDS if result.exceeds else 0",
        "return 0",
        ("tests/auditing/test_command.py::test_it_exits_with_3_if_the_claim_is_wrong",),
    ),
)
