"""The account of a dataset: sums, refusals, files, and two processes at a time."""

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import secrets
from pathlib import Path

import dp_accounting
import pytest

from dp_sparse.accounting import BudgetAccount, PrivacyBudget, PrivacyPlan
from dp_sparse.accounting.accountant import epsilon_of
from dp_sparse.core import PrivacyError
from dp_sparse.sampling import PoissonSampling, Sampling, StreamSampling
from dp_sparse.sampling.offline import OfflinePoissonSampling

POISSON = PoissonSampling(1000, 100, steps=3)
SHARED = OfflinePoissonSampling(10_000, 10, steps=3, draw_id=64 * "0", shared=True)


def plan(epsilon: float, delta: float = 1e-6, sampling: Sampling = POISSON) -> PrivacyPlan:
    """So much noise that any budget is enough: the account takes the budget."""
    made = PrivacyPlan(PrivacyBudget(epsilon, delta), sampling)
    return dataclasses.replace(made, noise_multiplier=1e4, plan_id=secrets.token_hex(16))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "clicks.budget.json"


def test_plans_add_up_to_the_budget_and_no_further(path: Path) -> None:
    account = BudgetAccount(path, PrivacyBudget(0.3, 1e-5))
    left = [account.charge(plan(0.1), note=f"day {day}") for day in range(3)]
    assert left[0] == PrivacyBudget(0.2, 9e-6)
    assert left[2] is None  # 0.1 three times is 0.3, whatever float64 says
    with pytest.raises(
        PrivacyError, match=r"left, epsilon=0 and delta=7e-06 .*got one of.*earlier plans in"
    ):
        account.charge(plan(0.001))
    assert [charge.note for charge in account.charges] == ["day 0", "day 1", "day 2"]
    assert "epsilon=0 and delta=7e-06 are left of epsilon=0.3" in str(account)
    assert str(account).count("\n") == 3


@pytest.mark.parametrize(("epsilon", "delta"), [(1.001, 1e-6), (0.5, 1.1e-5)])
def test_a_plan_beyond_either_is_refused_and_not_charged(
    path: Path, epsilon: float, delta: float
) -> None:
    account = BudgetAccount(path, PrivacyBudget(1.0, 1e-5))
    before = path.read_bytes()
    with pytest.raises(PrivacyError, match="Expected a plan within what is left"):
        account.charge(plan(epsilon, delta))
    assert path.read_bytes() == before
    assert account.charge(plan(1.0, 1e-5)) is None


def test_a_changed_copy_of_a_plan_is_charged(path: Path) -> None:
    account, first = BudgetAccount(path, PrivacyBudget(1.0, 1e-5)), plan(0.5)
    account.charge(first)
    longer = dataclasses.replace(first, sampling=PoissonSampling(1000, 100, steps=9))
    assert longer.plan_id == first.plan_id
    assert account.charge(longer) is None  # all is spent


def test_a_plan_is_charged_once(path: Path) -> None:
    account, own = BudgetAccount(path, PrivacyBudget(1.0, 1e-5)), plan(0.7)
    assert account.charge(own) == account.charge(own)
    assert len(account.charges) == 1


def test_one_name_is_one_budget(path: Path) -> None:
    """Else a plan of the same name, made by hand, would spend without a charge."""
    account, own = BudgetAccount(path, PrivacyBudget(1.0, 1e-5)), plan(0.2)
    account.charge(own)
    larger = dataclasses.replace(own, budget=PrivacyBudget(0.9, 1e-6))
    with pytest.raises(PrivacyError, match="of the same name with epsilon=0.9"):
        account.charge(larger)
    assert len(account.charges) == 1


def test_a_plan_that_spends_more_than_it_says_is_refused(path: Path) -> None:
    account, own = BudgetAccount(path, PrivacyBudget(1.0, 1e-5)), plan(0.1)
    dearer = dataclasses.replace(own, noise_multiplier=1.0)
    with pytest.raises(PrivacyError, match=r"whose 3 steps spend epsilon=2\.6"):
        account.charge(dearer)
    assert not account.charges


def cost_of_runs_on_one_draw(runs: int, noise_multiplier: float, delta: float) -> float:
    """All of them see one sample at each step: one mechanism of less noise, sampled once."""
    together = dp_accounting.GaussianDpEvent(noise_multiplier / runs**0.5)
    return epsilon_of(SHARED.event(together, SHARED.steps), delta, 1e-3)


def test_runs_on_one_draw_cost_more_than_their_sum_and_are_refused(path: Path) -> None:
    one = cost_of_runs_on_one_draw(1, 0.8, 1e-6)
    assert cost_of_runs_on_one_draw(4, 0.8, 4e-6) > 1.5 * 4 * one
    account = BudgetAccount(path, PrivacyBudget(1.0, 1e-5))
    with pytest.raises(PrivacyError, match="got one on a draw that other runs share"):
        account.charge(plan(0.1, sampling=SHARED))
    account.charge(plan(0.1, sampling=dataclasses.replace(SHARED, shared=False)))
    assert len(account.charges) == 1


def test_another_process_sees_the_same_account(path: Path) -> None:
    BudgetAccount(path, PrivacyBudget(1.0, 1e-5)).charge(plan(0.75))
    again = BudgetAccount(path)
    assert again.budget == PrivacyBudget(1.0, 1e-5)
    with pytest.raises(PrivacyError):
        again.charge(plan(0.3))


def charge_many(path: Path) -> int:
    account, charged = BudgetAccount(path), 0
    for _ in range(20):
        try:
            account.charge(plan(0.01))
        except PrivacyError:
            continue
        charged += 1
    return charged


def test_processes_at_the_same_time_lose_no_charge(path: Path) -> None:
    BudgetAccount(path, PrivacyBudget(0.3, 1e-3))
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(3, mp_context=context) as pool:
        counts = list(pool.map(charge_many, [path] * 3))
    assert sum(counts) == 30 == len(BudgetAccount(path).charges)


def test_a_link_stands_for_the_account(path: Path, tmp_path: Path) -> None:
    """Else the first charge would put a file of its own in the place of the link."""
    BudgetAccount(path, PrivacyBudget(1.0, 1e-5))
    link = tmp_path / "elsewhere.json"
    link.symlink_to(path)
    BudgetAccount(link).charge(plan(0.75))
    assert link.is_symlink()
    with pytest.raises(PrivacyError, match="within what is left"):
        BudgetAccount(path).charge(plan(0.5))


def test_an_account_that_was_set_back_or_lost_is_refused(path: Path) -> None:
    account = BudgetAccount(path, PrivacyBudget(1.0, 1e-5))
    account.charge(plan(0.4))
    before = path.read_bytes()
    account.charge(plan(0.4))
    after = path.read_bytes()
    path.write_bytes(before)
    with pytest.raises(ValueError, match=r"at least 2 charges in .* got one of 1: it was lost or"):
        account.charge(plan(0.4))
    path.unlink()
    with pytest.raises(ValueError, match="at least 2 charges in .* got no file"):
        BudgetAccount(path, PrivacyBudget(1.0, 1e-5))
    path.write_bytes(after)
    assert account.charge(plan(0.2)) is None


def charge_in_child(path: Path, own: PrivacyPlan, resumed: bool) -> str:
    try:
        BudgetAccount(path).charge(own, resumed=resumed)
    except PrivacyError as error:
        return str(error)
    return ""


def test_a_charged_plan_pays_for_no_second_run_of_another_process(path: Path) -> None:
    """As of a job that loads one plan each day."""
    account, own = BudgetAccount(path, PrivacyBudget(1.0, 1e-5)), plan(0.4)
    account.charge(own)
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        refused = pool.submit(charge_in_child, path, own, False).result()
        assert "Expected a plan that no other process has charged, got one" in refused
        assert pool.submit(charge_in_child, path, own, True).result() == ""
    account.charge(own)  # free where it was charged
    assert len(account.charges) == 1


def test_two_plans_on_one_draw_are_refused(path: Path) -> None:
    """A copied folder is the same draw, though each copy has a plan.json of its own."""
    account = BudgetAccount(path, PrivacyBudget(1.0, 1e-5))
    drawn = dataclasses.replace(SHARED, shared=False)
    account.charge(plan(0.1, sampling=drawn))
    with pytest.raises(PrivacyError, match="got one on the draw 000000000000, on which a charged"):
        account.charge(plan(0.1, sampling=dataclasses.replace(drawn)))
    account.charge(plan(0.1, sampling=dataclasses.replace(drawn, draw_id=64 * "1")))
    assert len(BudgetAccount(path).charges) == 2


def test_a_charge_is_on_the_disk_before_it_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = BudgetAccount(path, PrivacyBudget(1.0, 1e-5))
    fsync, synced = os.fsync, []

    def noted_fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    account.charge(plan(0.1))
    file, folder, number = synced
    assert Path(file).name.startswith(f".{path.name}.") and Path(folder) == path.parent
    assert number.endswith(".lock")


def test_relations_do_not_mix(path: Path) -> None:
    account = BudgetAccount(path, PrivacyBudget(1.0, 1e-5))
    account.charge(plan(0.1))
    with pytest.raises(ValueError, match="budgets of different relations do not add up"):
        account.charge(plan(0.1, sampling=StreamSampling(100, 10)))


def test_what_is_no_account(path: Path) -> None:
    with pytest.raises(ValueError, match="Expected budget=PrivacyBudget"):
        BudgetAccount(path)
    assert not path.exists()
    with pytest.raises(ValueError, match=r"Expected a file in a folder that exists, got path='/"):
        BudgetAccount(path.parent / "none" / "clicks.json", PrivacyBudget(1.0, 1e-5))
    account = BudgetAccount(path, PrivacyBudget(1.0, 1e-5))
    with pytest.raises(ValueError, match="Expected the budget of .*got budget="):
        BudgetAccount(path, PrivacyBudget(2.0, 1e-5))
    with pytest.raises(ValueError, match="Expected a calibrated plan"):
        account.charge(PrivacyPlan(PrivacyBudget(0.1, 1e-6), POISSON))
    for wrong in ("", "{}", json.dumps({"format": "other"}), "[1]", path.read_text()[:50]):
        path.write_text(wrong)
        with pytest.raises(PrivacyError, match="is damaged"):
            BudgetAccount(path)
