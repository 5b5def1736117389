"""The study of settings: seven tasks at three budgets, some hours on 2 cores in all."""

import ml_collections

from pipelines.defaults.tasks import NAMES


def get_config() -> ml_collections.ConfigDict:
    """All tasks, each with its own share of settings."""
    config = ml_collections.ConfigDict()
    config.data = ml_collections.ConfigDict(
        {
            "criteo": "",  # a Criteo TSV or .gz
            "movielens": "",  # `user item` in each line, in the order of time for each user
            "mnist": "",  # an .npz of x_train, y_train, x_test and y_test
        }
    )
    config.directory = "runs/defaults"  # of prepared data
    config.results = "docs/results/defaults.jsonl"  # a line for each finished run
    config.page = "docs/results/defaults.md"
    config.tasks = NAMES
    config.epsilons = (1.0, 3.0, 8.0)
    config.draws = 6  # settings of each method and optimizer
    config.workers = 2
    return config
