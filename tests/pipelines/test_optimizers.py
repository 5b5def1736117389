"""The optimizer that a config names."""

from typing import Any

import ml_collections
import pytest

from configs import criteo_sample, criteo_time_series
from dp_sparse.reports import recommendation
from pipelines.optimizers import optimizer_of


def config(name: str, **options: Any) -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict({"optimizer": {"name": name, "options": options}})


def test_options_go_before_defaults() -> None:
    optimizer = optimizer_of(config("SGD", momentum=0.5), momentum=0.9, learning_rate=0.25)
    assert optimizer.momentum == 0.5
    assert float(optimizer.learning_rate) == 0.25


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (config("Nowhere"), ".name to be an optimizer of .* got OF.name='Nowhere'"),
        (config("serialize"), ".name to be an optimizer of .* got OF.name='serialize'"),
        (config("Adam", momentum=0.9), ".options that Adam has, got OF.options={'momentum': 0.9}"),
        (config("SGD", momentum=7), ".options .* got OF.options={'momentum': 7}: `momentum` must"),
        (config("SGD", learning_rate=[1]), ".options .* got OF.options={'learning_rate'"),
    ],
)
def test_what_keras_does_not_have(given: Any, message: str) -> None:
    tables = ml_collections.ConfigDict({"table_optimizer": given.optimizer})
    for made, of in ((given, "optimizer"), (tables, "table_optimizer")):
        with pytest.raises(ValueError, match=f"Expected {of}{message.replace('OF', of)}"):
            optimizer_of(made, of)


def test_a_learning_rate_that_decays_is_0_after_all_steps() -> None:
    given = {"name": "Adam", "options": {"learning_rate": 0.02}, "decays": True}
    config = ml_collections.ConfigDict({"optimizer": given})
    falling = optimizer_of(config, steps=10)
    rates = []
    for step in (0, 5, 10):
        falling.iterations.assign(step)
        rates.append(float(falling.learning_rate))
    assert rates == pytest.approx([0.02, 0.01, 0.0])
    assert float(optimizer_of(config).learning_rate) == pytest.approx(0.02)
    config.optimizer.options = {}
    with pytest.raises(ValueError, match=r"Expected optimizer.options.learning_rate where it dec"):
        optimizer_of(config, steps=10)


def test_noise_lowers_the_rate_of_long_runs() -> None:
    """As `dp_sparse.recommend`: walk / √steps, if that is less."""
    given = {"name": "Adam", "options": {"learning_rate": 0.01}, "decays": True, "walk": 0.2}
    config = ml_collections.ConfigDict({"optimizer": given})
    for steps, noisy, wanted in ((390, True, 0.01), (6400, True, 0.0025), (6400, False, 0.01)):
        made = optimizer_of(config, steps=steps, noisy=noisy)
        assert float(made.learning_rate) == pytest.approx(wanted)
    for module in (criteo_sample, criteo_time_series):
        own = module.get_config().optimizer
        assert own.options.learning_rate == recommendation.RATE
        assert own.walk == recommendation.WALK
    config.optimizer.decays = False
    assert float(optimizer_of(config, steps=6400).learning_rate) == pytest.approx(0.0025)
    config.optimizer.walk = 0.0
    assert float(optimizer_of(config, steps=6400).learning_rate) == pytest.approx(0.01)
