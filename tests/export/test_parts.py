"""Exports of a model that trained on several parts of the data: the statement is that of all."""

import pathlib

import keras
import pytest

import dp_sparse
from tests.export import exported
from tests.training_cases import clicks, plan_for


def part(model: keras.Model, steps: int, taken: int | None = None) -> dp_sparse.PrivacyPlan:
    """Trains the model under a plan of its own."""
    plan = plan_for(8, steps=steps, noise_multiplier=2.0)
    model.compile(dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0), loss="mse")
    model.fit(plan.sampling.batches(clicks(8)), steps_per_epoch=taken or steps, verbose=0)
    return plan


def test_the_statement_is_that_of_all_parts(tmp_path: pathlib.Path) -> None:
    model = exported.MODELS["clicks"]()
    monday = dp_sparse.DisjointPlans({"Monday": part(model, 5)})
    first = dp_sparse.export_model(model, tmp_path / "first", plans=monday)
    assert first.statement == monday.statement()
    both = dp_sparse.DisjointPlans({**monday.plans, "Tuesday": part(model, 9, taken=2)})
    expected = both.statement({"Monday": 5, "Tuesday": 2})
    assert "2 disjoint parts" in expected and expected != both.statement()
    delta = dp_sparse.export_delta(model, tmp_path / "delta", tmp_path / "first", plans=both)
    last = dp_sparse.export_model(model, tmp_path / "last", plans=both)
    made = dp_sparse.apply_deltas(tmp_path / "first", [tmp_path / "delta"], tmp_path / "made")
    assert delta.statement == last.statement == made.statement == expected
    assert delta.steps == last.steps == 2
    assert dp_sparse.check_export(tmp_path / "made") == made
    alone = dp_sparse.export_model(model, tmp_path / "alone")
    assert "disjoint" not in alone.statement


def test_plans_without_the_optimizers_own(tmp_path: pathlib.Path) -> None:
    """Plans of the same numbers are others all the same."""
    model = exported.MODELS["clicks"]()
    others = dp_sparse.DisjointPlans({"Monday": part(model, 1)})
    part(model, 1)
    with pytest.raises(ValueError, match=r"among plans, got those of \['Monday'\]"):
        dp_sparse.export_model(model, tmp_path / "a", plans=others)
    dp_sparse.export_model(model, tmp_path / "a")
    with pytest.raises(ValueError, match=r"among plans, got those of \['Monday'\]"):
        dp_sparse.export_delta(model, tmp_path / "b", tmp_path / "a", plans=others)
    assert not (tmp_path / "b").exists()
