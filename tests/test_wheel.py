"""The wheel holds `dp_sparse`, all of it and nothing else, and what it installs trains.

It trains beside what it requires alone, as in an empty environment; what else is installed here
cannot be imported.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.subprocesses import ROOT, run_python
from tests.test_readme import first_model

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
NOT_COPIED = (".*", "__pycache__", "build", "dist", "*.egg-info")

EMPTY = """
    import importlib.abc
    import importlib.metadata as metadata
    import pathlib
    import sys

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    root, here = map(pathlib.Path, sys.argv[1:3])
    sys.path = [path for path in sys.path if pathlib.Path(path).resolve() != root]

    def required(name, extras, found):
        for each in map(Requirement, metadata.requires(name) or ()):
            wanted = [each.marker is None or each.marker.evaluate({"extra": e}) for e in extras]
            key = canonicalize_name(each.name), *sorted(each.extras)
            if any(wanted) and key not in found:
                found.add(key)
                required(each.name, {"", *each.extras}, found)
        return found

    there = {"dp-sparse", *(name for name, *_ in required("dp-sparse", {""}, set()))}
    absent = {
        module
        for module, names in metadata.packages_distributions().items()
        if there.isdisjoint(map(canonicalize_name, names))
    }
    assert {"pytest", "keras_hub", "pandas"} <= absent and not {"keras", "scipy"} & absent

    class Absent(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name in absent:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Absent())
"""

ONE_STEP = """
    import keras
    import numpy as np

    import dp_sparse

    sampling = dp_sparse.PoissonSampling(num_examples=32, expected_batch_size=8, steps=1)
    plan = dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(3.0, 1e-3), sampling).calibrate()
    table = keras.layers.Embedding(20, 2)
    layers = [keras.Input((3,), dtype="int32"), table, keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(dp_sparse.DPAdaFESTOptimizer("sgd", plan, 1.0, threshold=0.0), "mse")
    before = [np.array(weight) for weight in model.weights]
    ids = np.random.default_rng(0).integers(0, 20, (32, 3))
    model.fit(plan.sampling.batches((ids, np.ones(32, np.float32))), verbose=0)
    for old, new in zip(before, model.weights, strict=True):
        assert np.isfinite(new).all() and not np.array_equal(old, new)
    assert int(model.optimizer.steps_spent) == 1

    layers = [keras.Input((1,)), keras.layers.Dense(1, activation="sigmoid")]
    dataset = np.ones((400, 1), np.float32), np.ones(400, np.float32)
    names = {"num_examples": 400, "dataset": dataset, "model": keras.Sequential(layers)}
    exec(sys.argv[3], names)
    assert int(names["model"].optimizer.steps_spent) == 20

    for name, module in sys.modules.items():
        if name.split(".")[0] == "dp_sparse":
            assert here in pathlib.Path(module.__file__).parents, module
    print(dp_sparse.__file__)
"""


def not_copied(folder: str, names: list[str]) -> set[str]:
    """What of a folder is output: `runs` of the root, and not the subpackage of that name."""
    output = {"runs"} if Path(folder) == ROOT else set()
    return {*shutil.ignore_patterns(*NOT_COPIED)(folder, names), *output}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy: what an earlier build left in the sources would be shipped, too."""
    sources, built = tmp_path_factory.mktemp("sources") / "x", tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, sources, ignore=not_copied)
    offline = ("--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([*PIP, "wheel", *offline, "--wheel-dir", built, sources], check=True)
    (found,) = built.iterdir()
    return found


def test_it_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
        described = {Path(name).name for name in archive.namelist()}
    files = [path for path in (ROOT / "dp_sparse").rglob("*") if path.is_file()]
    sources = [path for path in files if path.parent.name != "__pycache__"]
    assert shipped == {str(path.relative_to(ROOT)) for path in sources}
    assert "dp_sparse/py.typed" in shipped and "LICENSE" in described


def test_what_it_installs_trains_as_the_readme_does(wheel: Path, tmp_path: Path) -> None:
    subprocess.run(
        [*PIP, "install", "--no-deps", "--no-index", "--target", tmp_path, wheel], check=True
    )
    arguments = str(ROOT), str(tmp_path), first_model().replace("2048", "200")
    printed = run_python(EMPTY + ONE_STEP, *arguments, packages=tmp_path)
    assert printed.split()[-1] == str(tmp_path / "dp_sparse" / "__init__.py")
