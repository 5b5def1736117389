"""Interactions that the tests of next-item jobs read, and a small config for them."""

from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

from configs import movielens_small

USERS, ITEMS, TAKEN = 40, 12, 9


def circles(folder: Path) -> Path:
    """Each user takes items in a circle from a random one on: the next one can be learned."""
    rng = np.random.default_rng(0)
    lines = [
        f"{user} {(start + i) % ITEMS + 1}"
        for user, start in enumerate(rng.integers(0, ITEMS, USERS), 1)
        for i in range(TAKEN)
    ]
    file = folder / "interactions.txt"
    file.write_text("\n".join(lines) + "\n")
    return file


def small(file: Path, **data: Any) -> ml_collections.ConfigDict:
    """Two epochs of two steps, each with a score; nothing is kept."""
    config = movielens_small.get_config()
    sizes = {"num_items": ITEMS, "length": 4, "predicted": 3, "filter_items": 0}
    config.data.update({"path": str(file), **sizes, **data})
    config.model.width, config.model.blocks = 4, 1
    config.training.update({"epochs": 2, "batch_size": 20, "microbatch_size": 0, "score_every": 1})
    config.report.directory = ""
    return config
