"""Blocks that several configs share."""

import ml_collections
from ml_collections.config_dict import placeholder


def adafest(noise_ratio: float = 2.0, false_rows: float = 10.0) -> ml_collections.ConfigDict:
    """DP-AdaFEST's own settings, by default those of `dp_sparse.recommend` for large tables."""
    return ml_collections.ConfigDict(
        {
            "contribution_clip_norm": 1.0,
            "noise_ratio": noise_ratio,
            "expected_false_rows": false_rows,
            "threshold": placeholder(float),  # absolute, in its place
        }
    )


def adafest_of_words() -> ml_collections.ConfigDict:
    """Those of a table of words, the best of the grid on docs/results/bag.md."""
    return adafest(noise_ratio=1.0, false_rows=1000.0)


def adafest_of_a_bag() -> ml_collections.ConfigDict:
    """For a model that is nearly all word table; `dp_sparse.recommend` gives the same.

    The best of docs/results/windowed_selection.md.
    """
    settings = adafest(noise_ratio=1.0, false_rows=100.0)
    settings.window = 64
    return settings


def adagrad() -> ml_collections.ConfigDict:
    """Adagrad for click models.

    Noisy mean gradients are small: with Keras' 0.1 the accumulator would never grow.
    """
    options = {"learning_rate": 0.05, "initial_accumulator_value": 1e-4}
    return ml_collections.ConfigDict({"name": "Adagrad", "options": options})


def sequence_model(
    width: int, heads: int, blocks: int, dropout: float
) -> ml_collections.ConfigDict:
    """A Transformer with Re-Attention over items or characters."""
    return ml_collections.ConfigDict(
        {
            "kind": "re_attention",  # or vanilla, gru, lstm
            "width": width,
            "heads": heads,
            "blocks": blocks,
            "dropout": dropout,
            "tied": True,
            "correction": "before_softmax",
        }
    )


def sequence_privacy() -> ml_collections.ConfigDict:
    """DP-SGD at ε = 8; an example is a user or a window."""
    return ml_collections.ConfigDict(
        {
            "method": "dp_sgd",  # or none
            "epsilon": 8.0,
            "delta": 0.0,  # 0 is 1 / examples
            "clip_norm": 1.0,
            # A public file, a fraction of examples in each line; or noisy counts.
            "frequencies": "",
            "frequency_share": 0.02,  # of ε, for the noisy counts
        }
    )
