"""The README's example runs as printed."""

import re
from pathlib import Path
from typing import Any

import keras
import numpy as np

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_as_printed(capsys: Any) -> None:
    example = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example is not None
    rng = np.random.default_rng(0)
    num_examples = 4000
    ids = rng.integers(0, 1000, (num_examples, 3)).astype(np.int32)
    inputs = keras.Input((3,), dtype="int32")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(1000, 8)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    names = {
        "num_examples": num_examples,
        "dataset": (ids, (ids[:, 0] < 300).astype(np.float32)),
        "model": model,
    }
    shorter = example[1].replace("steps=20_000", "steps=20")
    assert shorter != example[1]
    exec(shorter, names)
    assert "differential privacy after 20 of 20 steps" in capsys.readouterr().out
