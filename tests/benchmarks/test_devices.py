"""The three comparisons have their lines and metrics, on two devices."""

import functools
from collections.abc import Callable

import pytest
import tensorflow as tf

from benchmarks import devices, one_table, pctr_step


@pytest.mark.slow
def test_the_quick_run_has_every_metric(
    monkeypatch: pytest.MonkeyPatch, quick_run: Callable[..., tuple[list[str], dict[str, float]]]
) -> None:
    for module in (one_table, pctr_step):
        monkeypatch.setattr(module, "BATCH", 16)
    monkeypatch.setattr(pctr_step, "TABLE3_VOCABULARIES", (40, 60))
    monkeypatch.setattr(pctr_step, "pctr", functools.partial(pctr_step.pctr, hidden=(8,)))
    monkeypatch.setattr(devices, "PCTR_ROWS", 100)
    monkeypatch.setattr(devices, "TABLE_ROWS", {"1e5": 50, "1e7": 70})
    monkeypatch.setattr(devices, "QUICK_ROUNDS", 1)
    asked = []  # this process has its devices already
    monkeypatch.setattr(
        tf.config, "set_logical_device_configuration", lambda _, wanted: asked.append(len(wanted))
    )
    lines, metrics = quick_run(devices)
    assert asked == [2] and devices.strategy().num_replicas_in_sync == 2
    assert metrics.keys() == {
        "xla_over_graph_pctr",
        "xla_flatness_1e7_over_1e5",
        "replica_overhead",
    }
    steps = [line.rsplit(maxsplit=2)[0].strip() for line in lines[1:]]
    assert steps == [
        "pctr, graph mode",
        "pctr, XLA",
        "one table of 1e5 rows, XLA",
        "one table of 1e7 rows, XLA",
        *(f"pctr, {who}{where}" for where in (", 2 replicas", "") for who in ("stock", "private")),
    ]
