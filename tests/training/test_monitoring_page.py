"""The examples of docs/monitoring.md run as printed, and its line is one."""

import json
import re
import shlex
from pathlib import Path

import keras
import numpy as np
import pytest

import dp_sparse

PAGE = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()


def model_of(plan: dp_sparse.PrivacyPlan) -> keras.Model:
    ids = keras.Input((3,), dtype="int32")
    rows = keras.layers.Embedding(1000, 4, name="words")(ids)
    output = keras.layers.Dense(1, activation="sigmoid")(keras.layers.Flatten()(rows))
    model = keras.Model(ids, output)
    model.compile(dp_sparse.DPAdaFESTOptimizer("sgd", plan, clip_norm=1.0), "binary_crossentropy")
    return model


def lines_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    data, held_out = (
        (rng.integers(0, 1000, (300, 3)), rng.integers(0, 2, (300, 1)).astype(np.float32))
        for _ in range(2)
    )
    sampling = dp_sparse.PoissonSampling(num_examples=300, expected_batch_size=100, steps=4)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-5), sampling).calibrate()
    private, non_private = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {"dp_sparse": dp_sparse, "dataset": data, "held_out": held_out}
    for code in (private, non_private):
        own = plan.calibrate()
        exec(code, {**names, "plan": own, "model": model_of(own)})
    (printed,) = map(json.loads, re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
    lines = lines_of(tmp_path / "run" / "log")
    assert [line["step"] for line in lines] == [2, 4, 4]
    assert set(lines[0]) == set(printed) and set(lines[-1]) == {"step", "validation"}
    for name in ("delta", "expected_examples", "expected_false_rows"):
        assert lines[0][name] == pytest.approx(printed[name])
    assert lines[0]["epsilon"] == pytest.approx(printed["epsilon"], abs=0.005)
    assert all(lines[0][name].keys() == printed[name].keys() for name in ("survivors",))
    for line in lines_of(tmp_path / "other" / "log"):
        for name in re.findall(r"`(expected_examples_per_second|input_wait_share)`", PAGE):
            assert name in line["non_private"] or "epoch_metrics" in line["non_private"]


def test_the_flags_are_those_of_the_commands() -> None:
    for command in re.findall(r"^python -m pipelines\.(?:criteo) (--.*)$", PAGE, re.M):
        config, data, *flags = shlex.split(command)[1:]
        assert config.endswith(".py") and "data.path" in data
        assert set(flags) <= {"--monitor=100", "--resume"}
