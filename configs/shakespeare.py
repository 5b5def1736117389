"""The character model of Ding et al. (ICML 2024), D.7, on tiny Shakespeare, at ε = 8.

Six blocks of width 384 for 2,000 epochs are days on 2 cores; smaller sizes are options:
`--config.model.width=64 --config.model.blocks=2 --config.training.epochs=20`. The paper gives
neither the length of a window nor ε; its learning rate and batch were searched.
"""

import ml_collections

from configs import common


def get_config() -> ml_collections.ConfigDict:
    """The defaults of the character model."""
    config = ml_collections.ConfigDict()
    config.seed = 0  # of the initial weights
    config.data = ml_collections.ConfigDict(
        {"path": "", "length": 128, "held_out_fraction": 0.1}  # a text; characters of a window
    )
    config.model = common.sequence_model(width=384, heads=6, blocks=6, dropout=0.2)
    config.training = ml_collections.ConfigDict(
        {"epochs": 2000, "batch_size": 2048, "microbatch_size": 128, "score_every": 50}
    )
    config.optimizer = ml_collections.ConfigDict(
        {"learning_rate": 1e-3, "weight_decay": 0.0, "warm_up": 0.2}
    )
    config.privacy = common.sequence_privacy()
    config.report = ml_collections.ConfigDict({"directory": "runs/shakespeare", "verbose": 0})
    return config
