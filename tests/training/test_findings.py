"""What a report says of gradients and their noise: of noise alone, learning, wrong settings."""

import secrets
import warnings
from typing import Any

import keras
import numpy as np
import pytest

import dp_sparse
from dp_sparse.reports.preflight_warnings import noise_drift
from dp_sparse.reports.run_diagnosis import Signal

N, V, STEPS = 2000, 20, 60
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, V, (N, 2)).astype(np.int32)
X = {"ids": IDS, "values": RNG.normal(size=(N, 4)).astype(np.float32)}
Y = ((IDS.sum(axis=1) % 2) + X["values"][:, 0]).astype(np.float32)
SAMPLING = dp_sparse.PoissonSampling(num_examples=N, expected_batch_size=400, steps=STEPS)


def plan_of(sigma: float, *releases: dp_sparse.Release) -> dp_sparse.PrivacyPlan:
    budget = dp_sparse.PrivacyBudget(8.0, 1e-3)
    own = secrets.token_hex(16)
    return dp_sparse.PrivacyPlan(
        budget, SAMPLING, releases=releases, noise_multiplier=sigma, plan_id=own
    )


def model(scale: float = 1.0) -> keras.Model:
    """With scale 0 no gradient reaches a weight."""
    inputs = {
        "ids": keras.Input((2,), dtype="int32", name="ids"),
        "values": keras.Input((4,), name="values"),
    }
    rows = keras.layers.Embedding(V, 4, name="table")(inputs["ids"])
    both = keras.layers.Concatenate()([keras.layers.Flatten()(rows), inputs["values"]])
    hidden = keras.layers.Dense(32, activation="tanh", name="hidden")(both)
    score = keras.layers.Dense(1, name="score")(hidden)
    return keras.Model(inputs, keras.layers.Rescaling(scale)(score))


def optimizer(name: str, sigma: float, wrapped: Any = None, **options: Any) -> Any:
    wrapped = keras.optimizers.SGD(0.1) if wrapped is None else wrapped
    if name == "DPFESTOptimizer":
        options["rows"] = dp_sparse.SelectedRows.public({"table": range(8)}, {"table": V})
    return getattr(dp_sparse, name)(wrapped, plan_of(sigma), **{"clip_norm": 1.0, **options})


def run(
    own: Any, scale: float = 1.0, diagnostics: str = "private", **options: Any
) -> dp_sparse.PrivacyReport:
    keras.utils.set_random_seed(0)
    trained = model(scale)
    trained.compile(own, loss="mse", **options)
    batches, report = own.plan.sampling.batches((X, Y)), dp_sparse.PrivacyReport(None, diagnostics)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained.fit(batches, callbacks=[report], verbose=0)
    told = [str(w.message) for w in caught if "Of this run" in str(w.message)]
    assert bool(told) == bool(report.history.findings)
    return report


def said(report: dp_sparse.PrivacyReport, words: str) -> bool:
    return any(words in line for line in report.history.findings)


WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "DP-SGD": ("DPSGDOptimizer", {}, {}),
    "DP-AdaFEST": ("DPAdaFESTOptimizer", {"threshold": 0.0}, {}),
    "DP-FEST": ("DPFESTOptimizer", {}, {}),
    "a clip norm that moves": (
        "DPSGDOptimizer",
        {"clipping": dp_sparse.QuantileClipping(0.5, learning_rate=1.0)},
        {},
    ),
    "micro-batches": ("DPSGDOptimizer", {"microbatch_size": 16}, {}),
    "XLA": ("DPAdaFESTOptimizer", {"threshold": 0.0}, {"jit_compile": True}),
    "LazyDP": ("LazyDPSGDOptimizer", {}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_noise_alone_has_the_energy_of_noise(way: str) -> None:
    """Σ (mean/deviation)² is χ² of as many degrees of freedom as entries; the mean of each is 1."""
    name, options, of_compile = WAYS[way]
    own = optimizer(name, 2.0, **options)
    report = run(own, scale=0.0, **of_compile)
    sizes = np.array([float(s.entries) * STEPS for s in report.history.signals])
    energies = own.diagnostics.energies.numpy()
    paths = [s.path for s in report.history.signals]
    assert ("table/embeddings" in paths) == (way != "LazyDP") and "hidden/kernel" in paths
    assert np.all(np.abs(energies - sizes) < 5 * np.sqrt(2 * sizes))
    kernel = paths.index("hidden/kernel")  # and another σ would be seen
    for wrong in (2 / 3, 3 / 2):
        assert abs(energies[kernel] * wrong**2 - sizes[kernel]) > 20 * np.sqrt(2 * sizes[kernel])
    assert said(report, "Nothing but noise") and not any(
        s.stands_out for s in report.history.signals
    )


@pytest.mark.slow
def test_entries_are_those_that_got_noise() -> None:
    by_path = {s.path: s.entries for s in run(optimizer("DPFESTOptimizer", 2.0)).history.signals}
    assert by_path == {
        "table/embeddings": 8 * 4,
        "hidden/kernel": 12 * 32,
        "hidden/bias": 32,
        "score/kernel": 32,
        "score/bias": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DPSGDOptimizer", "DPFESTOptimizer"])
def test_what_learns_is_not_blamed(name: str) -> None:
    report = run(optimizer(name, 1.0))
    seen = {s.path for s in report.history.signals if s.stands_out}
    dense = {"hidden/kernel", "hidden/bias", "score/kernel", "score/bias"}
    assert seen >= dense and ("table/embeddings" in seen or name == "DPFESTOptimizer")
    assert not any(path in line for path in seen for line in report.history.findings)
    ratios = {s.path: s.signal_of_step for s in report.history.signals}
    assert ratios["score/kernel"] > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapped", "drowned"),
    [
        (keras.optimizers.SGD(0.1), False),
        (keras.optimizers.SGD(200.0), True),
        (keras.optimizers.SGD(20.0, momentum=0.9), True),
        (keras.optimizers.Adam(0.001), False),
        (keras.optimizers.Adam(0.5), True),
        (keras.optimizers.Adagrad(0.01), False),
        (keras.optimizers.Adagrad(2.0, initial_accumulator_value=1e-7), True),
        (keras.optimizers.Lion(5.0), False),  # not known of it
    ],
    ids=lambda value: None if isinstance(value, bool) else f"{value.name} {value.learning_rate}",
)
def test_a_learning_rate_that_noise_dominates_is_told(wrapped: Any, drowned: bool) -> None:
    wrapped = type(wrapped).from_config(wrapped.get_config())
    report = run(optimizer("DPSGDOptimizer", 20.0, wrapped))
    assert said(report, "lower the learning rate") == drowned
    if drowned:
        assert said(report, "each weight of") and said(report, "hidden/kernel")
        lines = [line for line in report.history.findings if "each weight of" in line]
        assert not any("bias" in line for line in lines)


WALKS = {
    "SGD": keras.optimizers.SGD(0.1),
    "momentum": keras.optimizers.SGD(0.1, momentum=0.9),
    "Nesterov": keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": keras.optimizers.Adam(0.01),
    "Adam with a large epsilon": keras.optimizers.Adam(0.01, epsilon=1e-3),
    "Adagrad": keras.optimizers.Adagrad(0.01),
    "Adagrad from 0": keras.optimizers.Adagrad(0.01, initial_accumulator_value=1e-7),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("deviation", [0.03, 7e-5])
@pytest.mark.parametrize(("before", "steps"), [(0, 400), (300, 100), (0, 20)])
@pytest.mark.parametrize("name", WALKS)
def test_the_walk_of_noise_is_that_of_the_optimizer(
    name: str, before: int, steps: int, deviation: float
) -> None:
    """Against Keras' own optimizers on noise alone, also after steps before the run.

    Momentum carries a part of the steps before into the run, and Adam's means begin at 0.
    """
    wrapped = type(WALKS[name]).from_config(WALKS[name].get_config())
    rng, variable = np.random.default_rng(1), keras.Variable(np.zeros(2000, np.float32))
    wrapped.build([variable])
    noise = rng.normal(0, deviation, (before + steps, 2000)).astype(np.float32)
    for index, gradient in enumerate(noise):
        if index == before:
            begin = keras.ops.convert_to_numpy(variable).copy()
        wrapped.apply([keras.ops.convert_to_tensor(gradient)])
    found = float(np.var(keras.ops.convert_to_numpy(variable) - begin))
    rate = float(wrapped.learning_rate)
    walk = noise_drift(wrapped, rate, steps, deviation, deviation**2, before)
    assert walk == pytest.approx(found, rel=0.25 if steps > 20 and not before else 0.5)
    wrong = noise_drift(wrapped, 1.5 * rate, steps, deviation, deviation**2, before)
    assert wrong != pytest.approx(found, rel=0.5)


def test_no_walk_is_known_of_other_optimizers() -> None:
    for unknown in (
        keras.optimizers.RMSprop(),
        keras.optimizers.SGD(clipnorm=1.0),
        keras.optimizers.Adam(weight_decay=0.1),
        keras.optimizers.Adam(amsgrad=True),
    ):
        assert noise_drift(unknown, 0.1, 10, 1.0, 1.0) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clip_norm", "words"),
    [(1000.0, "so a lower one has less noise"), (1e-4, "only the direction counts"), (8.0, "")],
)
def test_a_clip_norm_that_clips_nothing_or_all_is_told(clip_norm: float, words: str) -> None:
    """Under diagnostics, since no ε covers the number of clipped examples."""
    told = [
        run(
            optimizer("DPSGDOptimizer", 1.0, keras.optimizers.SGD(1e-6), clip_norm=clip_norm),
            diagnostics=diagnostics,
        )
        for diagnostics in ("non_private", "private")
    ]
    assert [said(report, "The clip norm clipped") for report in told] == [
        bool(words),
        False,
    ]
    assert not words or (said(told[0], words) and said(told[0], "no epsilon covers this count"))


@pytest.mark.slow
@pytest.mark.parametrize(("begin", "words"), [(1e5, "a lower one"), (1e-5, "only the direction")])
def test_a_clip_norm_that_moves_tells_by_its_noisy_count(begin: float, words: str) -> None:
    """It hardly moves here, so it never comes to the norms of the gradients."""
    style = dp_sparse.QuantileClipping(0.5, learning_rate=0.01, noise_ratio=2.0)
    own = optimizer("DPSGDOptimizer", 1.0, keras.optimizers.SGD(1e-9), clip_norm=begin)
    assert not said(run(own), "clip norm clipped")
    moving = optimizer(
        "DPSGDOptimizer", 1.0, keras.optimizers.SGD(1e-9), clip_norm=begin, clipping=style
    )
    report = run(moving)
    assert said(report, words) and not said(report, "no epsilon")


@pytest.mark.slow
def test_automatic_clipping_has_no_clip_norm_to_lower() -> None:
    style = dp_sparse.AutomaticClipping()
    own = optimizer("DPSGDOptimizer", 1.0, clip_norm=1e4, clipping=style)
    assert not said(run(own, diagnostics="non_private"), "clip norm clipped")


@pytest.mark.slow
@pytest.mark.parametrize("clipping", [None, "as recommended"])
def test_what_is_recommended_is_not_blamed_for_its_learning_rate(clipping: str | None) -> None:
    """With the clip norm that it takes, and with one that stays, of which more is known."""
    keras.utils.set_random_seed(0)
    trained = model()
    own = dp_sparse.recommend(trained, plan_of(3.0)).optimizer()
    if clipping is None:
        own = dp_sparse.DPSGDOptimizer(own.optimizer, own.plan, clip_norm=1.0)
    report = dp_sparse.PrivacyReport(None)
    trained.compile(own, loss="mse")
    trained.fit(own.plan.sampling.batches((X, Y)), callbacks=[report], verbose=0)
    assert not said(report, "learning rate")
    walks = [s.walk for s in report.history.signals if s.walk is not None]
    assert len(walks) == (5 if clipping is None else 0) and max(walks, default=0.0) < 0.15


@pytest.mark.slow
def test_a_regulariser_moves_weights_but_teaches_nothing() -> None:
    inputs = keras.Input((4,), name="values")
    layer = keras.layers.Dense(64, kernel_regularizer=keras.regularizers.L2(0.1), name="hidden")
    hidden = keras.layers.Dense(1)(keras.layers.Rescaling(0.0)(layer(inputs)))
    trained, report = keras.Model(inputs, hidden), dp_sparse.PrivacyReport(None)
    own = optimizer("DPSGDOptimizer", 2.0, clip_norm=1e-3)
    trained.compile(own, loss="mse")
    trained.fit(own.plan.sampling.batches((X["values"], Y)), callbacks=[report], verbose=0)
    (kernel,) = [s for s in report.history.signals if s.path == "hidden/kernel"]
    assert not kernel.stands_out and kernel.walk is None


@pytest.mark.slow
def test_a_restored_run_is_judged_from_where_it_goes_on() -> None:
    """A callback after the report in the list restores weights: the run begins with these."""

    class Restoring(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            kernel = self.model.get_layer("hidden").kernel
            kernel.assign(kernel + 100.0)

    keras.utils.set_random_seed(0)
    trained, report = model(0.0), dp_sparse.PrivacyReport(None)
    trained.compile(optimizer("DPSGDOptimizer", 2.0), loss="mse")
    batches = trained.optimizer.plan.sampling.batches((X, Y))
    trained.fit(batches, callbacks=[report, Restoring()], verbose=0)
    (kernel,) = [s for s in report.history.signals if s.path == "hidden/kernel"]
    assert not kernel.stands_out


@pytest.mark.slow
def test_a_second_run_is_judged_by_its_own_steps() -> None:
    own = optimizer("DPSGDOptimizer", 1.0)
    keras.utils.set_random_seed(0)
    trained = model()
    trained.compile(own, loss="mse")
    batches = own.plan.sampling.batches((X, Y))
    trained.fit(batches, steps_per_epoch=20, verbose=0)
    before = own.diagnostics.energies.numpy()
    report = dp_sparse.PrivacyReport(None)
    trained.fit(batches, steps_per_epoch=30, callbacks=[report], verbose=0)
    after = own.diagnostics.energies.numpy()
    [kernel] = [i for i, s in enumerate(report.history.signals) if s.path == "hidden/kernel"]
    signal = report.history.signals[kernel]
    part = (after - before)[kernel] / (30 * 12 * 32)
    assert signal.entries == 12 * 32 and signal.signal_of_step == pytest.approx(
        np.sqrt(part - 1), rel=1e-6
    )


@pytest.mark.slow
def test_the_page_has_a_line_for_each_variable() -> None:
    report = run(optimizer("DPSGDOptimizer", 1.0))
    page, heading = report.page(), "What went wrong"
    assert "Gradients and their noise" in page
    assert (heading in page) == bool(report.history.findings)
    report.history.findings = []
    assert heading not in report.page()
    assert all(s.path in page for s in report.history.signals)
    report.history.signals = [Signal("some/kernel", 10.0, 0.25, False)]
    assert "<td>some/kernel</td><td>10</td><td>0.25</td><td>no</td>" in report.page()
