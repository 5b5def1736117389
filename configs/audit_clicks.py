"""An audit of DP-AdaFEST on a small click model of made-up rows; a pattern for a model of your own.

`python -m dp_sparse audit --config configs/audit_clicks.py --plot=audit.png`, some seconds. Made-up
rows cost nobody any privacy; on rows of people give `Audit` an account, which both runs charge.
"""

import keras
import numpy as np

import dp_sparse

EXAMPLES, USERS = 4000, 5000


def model() -> keras.Model:
    """Clicks from one table."""
    user = keras.Input((), dtype="int32")
    rows = keras.layers.Embedding(USERS, 8, name="users")(user)
    return keras.Model(user, keras.layers.Dense(1, activation="sigmoid")(rows))


def optimizer(plan: dp_sparse.PrivacyPlan) -> dp_sparse.DPAdaFESTOptimizer:
    """As the training to be audited makes it."""
    return dp_sparse.DPAdaFESTOptimizer(
        keras.optimizers.Adagrad(0.1), plan, clip_norm=0.5, noise_ratio=1.0
    )


def get_audit() -> dp_sparse.Audit:
    """What the command runs."""
    rng = np.random.default_rng(0)
    users = rng.integers(0, USERS, EXAMPLES).astype("int32")
    clicks = (users % 7 == 0).astype("float32")
    sampling = dp_sparse.PoissonSampling(EXAMPLES, expected_batch_size=400, epochs=1)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(3.0, 1e-4), sampling).calibrate()
    return dp_sparse.Audit(
        model,
        (users, clicks),
        "binary_crossentropy",
        plan,
        optimizer,
        canaries=dp_sparse.GradientCanaries(count=1000),
    )
