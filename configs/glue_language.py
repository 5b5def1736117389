"""The study of the word table: MiniLM with LoRA on SST-2, rows held out by sentence.

Settings are chosen at ε = 3 by the validation rows of the first seed, and used at ε = 1 and 8 as
they are. Every run keeps checkpoints, so what is killed goes on.
"""

from typing import Any

import ml_collections

from configs import glue_sst2_minilm

SEEDS = (0, 1, 2)
RATES = (2e-3, 5e-3, 1e-2, 2e-2, 4e-2)  # of Adam


def get_config() -> ml_collections.ConfigDict:
    """The study."""
    config = ml_collections.ConfigDict()
    config.directory = ""  # of checkpoints and tokens
    config.data = ml_collections.ConfigDict({"path": ""})
    config.seeds = SEEDS
    config.epsilons = (3.0, 1.0, 8.0)  # the first of them chooses settings
    config.base = base()
    config.methods = ml_collections.ConfigDict({name: _settings(name) for name in _METHODS})
    return config


def base() -> ml_collections.ConfigDict:
    """The run that every method changes."""
    config = glue_sst2_minilm.get_config()
    config.data.update({"held_out": 7_000, "validation": 3_000, "judge": "validation"})
    config.training.update({"evaluations": 1, "epochs": 0.5})  # 27 steps of 1,024 rows
    config.selection.update({"rows": 3000, "share": 0.02})
    config.report.update({"verbose": 0})
    return config


_METHODS: dict[str, dict[str, Any]] = {
    "DP-SGD": {"method": "dp_sgd"},
    "DP-AdaFEST": {"method": "dp_adafest"},
    "frozen words": {"method": "dp_sgd", "model.words": "frozen"},
    "DP-FEST": {"method": "dp_fest"},
    "without privacy": {"method": "non_private", "training.batch_size": 128},
}


def _settings(name: str) -> tuple[dict[str, Any], ...]:
    """The settings among which one is chosen."""
    changes = _METHODS[name]
    rates = RATES[:1] if changes["method"] == "non_private" else RATES
    return tuple(
        {**changes, "optimizer.learning_rate": rate, "table_optimizer.learning_rate": rate}
        for rate in rates
    )
