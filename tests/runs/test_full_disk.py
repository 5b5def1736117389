"""A run whose disk gets full at any of its writes is resumed by the same lines, and pays once."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tensorflow as tf

import dp_sparse
from dp_sparse.runs import run as run_module
from tests.full_disk import SmallDisk, small_disk
from tests.runs.test_run import ROWS, compiled, data, plan_of

PAGE, ROOM = 4096, 1 << 26
STEPS = 6


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", ROOM) as made:
        yield made


def trained(folder: Path, account: Path) -> dp_sparse.Run:
    """The lines of a script that selects rows and trains."""
    x, y = data()
    run = dp_sparse.Run(folder, plan_of(), account=account, every_seconds=1e-9, log_every=2)
    run.select_top_k(({"items": x[:, 0]}, y), {"items": ROWS}, 5, share=0.1)
    model = compiled(run)
    model.fit(run.batches((x, y)), callbacks=run.callbacks(), verbose=0)
    return run


def killed() -> None:
    """As when the process ends: locks are gone, and nothing more is written."""
    for run in list(run_module._OPEN.values()):
        run._lock.close()
        run._checkpoint._folder.unlock()
    run_module._OPEN.clear()


# The first writes take a page each, weights a dozen.
_SLOW = (1, 3, 4, 6, 7, 8, 12, 20, 40)
PAGES = [2, 5, 9, *(pytest.param(pages, marks=pytest.mark.slow) for pages in _SLOW)]


@pytest.mark.parametrize("pages", PAGES)
def test_a_run_on_a_full_disk_goes_on(
    disk: SmallDisk, tmp_path: Path, new_process: Callable[[], None], pages: int
) -> None:
    account = tmp_path / "budget.json"
    dp_sparse.BudgetAccount(account, dp_sparse.PrivacyBudget(2.0, 1e-3))
    folder, rows = disk.path / "run", disk.path / "run" / "rows.npz"
    disk.resize(pages * PAGE)
    with contextlib.suppress(OSError, tf.errors.OpError):
        trained(folder, account)
        assert pages == 40, "nothing was full"
    selected = rows.read_bytes() if rows.exists() else None
    killed()
    new_process()
    disk.resize(ROOM)
    run = trained(folder, account)
    assert run.steps_spent == STEPS and run.log[-1]["step"] == STEPS
    assert selected in (None, rows.read_bytes())
    charges = dp_sparse.BudgetAccount(account).charges
    assert [charge.run_id for charge in charges] == [run.plan.run_id]
    assert not [name for name in disk.names_of("run") if name.endswith(".tmp")]
    run.close()
