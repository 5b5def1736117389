"""Plans for debugging: the same run each time, with the same noise, and no privacy at all."""

from dp_sparse.accounting.plan import PrivacyPlan, identified
from dp_sparse.sampling import NotPrivateSampling


def not_private_plan(plan: PrivacyPlan, seed: int) -> PrivacyPlan:
    """A plan whose runs can be repeated, to find out why a model does not learn as it should.

    Batches and noise follow from `seed`, and are else those of `plan`, noise included. Set Keras'
    own seed, too (`keras.utils.set_random_seed`), from which the first weights follow. Take one
    such plan for each run.

    Args:
        plan: A calibrated plan; make its batches by the new one, `new.sampling.batches(dataset)`.
        seed: A whole number >= 0.

    Raises:
        ValueError: `plan` has no noise yet, or the seed is none.

    Examples:
        >>> import dp_sparse
        >>> sampling = dp_sparse.PoissonSampling(10_000, expected_batch_size=1000, steps=10)
        >>> plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-5), sampling).calibrate()
        >>> debugging = dp_sparse.not_private_plan(plan, seed=7)
        >>> print(debugging.statement())
        This run has no privacy: its batches and its noise follow from seed 7, for debugging.
        Anyone who knows the seed can tell which examples it was trained on: release nothing of it.
        >>> debugging.noise_multiplier == plan.noise_multiplier
        True

    ### Formal Guarantees
    None: anybody can draw the noise again and take it away. The plan has the budget (∞, 1); its
    statement, `PrivacyReport` and checkpoints show no ε. A plan that guarantees something refuses
    its batches, its state, and weights that it trained.
    """
    if not isinstance(plan, PrivacyPlan) or plan.noise_multiplier is None:
        raise ValueError(f"Expected a calibrated plan, got {plan!r}: use plan.calibrate() first.")
    base = plan.sampling
    if isinstance(base, NotPrivateSampling):
        base = base.sampling
    sampling = NotPrivateSampling(base.for_debugging(), seed)
    return identified(plan, sampling, plan.noise_multiplier)
