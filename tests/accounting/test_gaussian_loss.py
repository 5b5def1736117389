"""Losses of a sampled Gaussian mechanism against dp-accounting's own, one ε after the other."""

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dp_sparse.accounting import gaussian_loss


@given(st.floats(0.2, 20), st.floats(1e-6, 1), st.sampled_from([1e-2, 1e-3]))
@example(0.05, 0.3, 1e-2)  # losses beyond 200
@example(50.0, 1.0, 1e-4)
@example(0.7, 1 - 1e-12, 1e-3)
@settings(max_examples=20, deadline=None)
def test_losses_are_those_of_dp_accounting(sigma: float, q: float, interval: float) -> None:
    ours = gaussian_loss.loss_of(sigma, q, interval)
    theirs = pld.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=interval
    )
    for name in ("_pmf_remove", "_pmf_add"):
        found, wanted = (getattr(each, name).to_dense_pmf() for each in (ours, theirs))
        assert found._lower_loss == wanted._lower_loss
        assert found._infinity_mass == pytest.approx(wanted._infinity_mass, rel=1e-9, abs=1e-21)
        np.testing.assert_allclose(found._probs, wanted._probs, rtol=1e-6, atol=1e-12)


def test_no_loss_overflows() -> None:
    """δ at ε = 800, beyond what e^ε can be; the probability of a loss of 1,250 is a half."""
    loss = gaussian_loss.loss_of(0.02, 0.5, 1.0)
    assert loss._pmf_remove.get_delta_for_epsilon(800.0) == pytest.approx(0.5, rel=1e-6)
