"""Whose run a draw serves, when several processes begin at once or with one pickled plan."""

import errno
import json
import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import dp_sparse
from dp_sparse import OfflineBatches, PrivacyError, offline_sampling
from dp_sparse.sampling.offline import poisson
from tests.sampling.offline_folders import prepared, unpack
from tests.subprocesses import HANG

FORKED = multiprocessing.get_context("fork")
RACES, PROCESSES = 40, 4


def no_links(*_: Any) -> None:
    raise OSError(errno.EPERM, "no hard links on this file system")


def claim_all(folder: Path, barrier: Any, won: Any) -> None:
    """Takes part in every race."""
    for race in range(RACES):
        barrier.wait(60)
        try:
            poisson.claim_draw(
                str(folder / f"{race}"), 7, poisson.run_here("one plan"), begins=True
            )
        except PrivacyError:
            continue
        won.put(race)


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_of_processes_that_begin_at_once_one_has_the_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    for race in range(RACES):
        (tmp_path / f"{race}").mkdir()
    barrier, won = FORKED.Barrier(PROCESSES), FORKED.Queue()
    processes = [
        FORKED.Process(target=claim_all, args=(tmp_path, barrier, won)) for _ in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    winners = sorted(won.get(timeout=HANG) for _ in range(RACES))
    for process in processes:
        process.join(HANG)
        assert process.exitcode == 0
    assert winners == list(range(RACES))
    assert won.empty()
    assert not list(tmp_path.glob("*/.*"))  # nothing unfinished remains


def begin(plan: bytes, folder: Path, refused: Any) -> None:
    """A run from step 0 in a process of its own, with a plan that was handed to it."""
    try:
        source = OfflineBatches(str(folder), unpack)
        pickle.loads(plan).sampling.batches(source)
        refused.put("")
    except PrivacyError as error:
        refused.put(str(error))


def test_a_pickled_plan_begins_once(tmp_path: Path) -> None:
    prepared(tmp_path)
    sampling = offline_sampling(OfflineBatches(str(tmp_path), unpack))
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-3), sampling).with_noise(2.0)
    refused, given = FORKED.Queue(), pickle.dumps(plan)
    for _ in range(2):
        process = FORKED.Process(target=begin, args=(given, tmp_path, refused))
        process.start()
        process.join(HANG)
    assert refused.get(timeout=HANG) == ""
    assert "with which one began at step 0" in refused.get(timeout=HANG)


@pytest.mark.parametrize("content", ["", '{"pl', "[]", json.dumps({"plan": 7})])
def test_a_claim_that_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(poisson, "_PATIENCE", 0.1)
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(PrivacyError, match=r"plan.json is damaged .*\nPrepare the batches again"):
        poisson.claim_draw(str(tmp_path), 7, "a run", begins=True)
