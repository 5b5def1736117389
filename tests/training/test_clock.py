"""A clock that is set back or forward neither stops a run nor lets a batch be used twice."""

import pathlib

import pytest

from tests.subprocesses import run_python

# In a process of its own, since nonces begin with the time at which the package is imported.
_RUN = """
import sys, time
import keras, numpy as np
import dp_sparse
from dp_sparse import PrivacyError

begun, jumps = time.time_ns(), iter(eval(sys.argv[2]))
time.time_ns = lambda: begun + int(3600e9) * next(jumps)
time.time = lambda: time.time_ns() / 1e9

sampling = dp_sparse.PoissonSampling(num_examples=8, expected_batch_size=4, steps=4)
plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-3), sampling).with_noise(2.0)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(dp_sparse.DPSGDOptimizer("sgd", plan, clip_norm=1.0), loss="mse")
checkpoint = dp_sparse.PrivateCheckpoint(sys.argv[1], every_seconds=1000.0)
checkpoint.restore(model)
batches = plan.sampling.batches((np.ones((8, 1)), np.ones(8)))
old = batches.take(1).cache()
list(old)  # keeps it
for steps in (1, 1, 2):  # a new pass over the sampler each
    model.fit(batches, steps_per_epoch=steps, epochs=1, callbacks=[checkpoint], verbose=0)
    if steps == 1:
        try:
            model.fit(old, callbacks=[checkpoint], verbose=0)
        except PrivacyError as error:
            print("refused:", error)
print("steps left:", model.optimizer.steps_left, "saved:", checkpoint.steps)
"""


@pytest.mark.parametrize("hours", ["[-1] * 99", "[5, -5] * 50", "range(0, -99, -1)"])
@pytest.mark.cases(1)
def test_a_run_goes_on(tmp_path: pathlib.Path, hours: str) -> None:
    printed = run_python(_RUN, str(tmp_path), hours)
    assert "steps left: 0 saved: [1, 2, 4]" in printed
    assert printed.count("refused: Expected each batch once") == 2
