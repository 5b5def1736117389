"""tensorflow_recommenders, in processes of its own: it needs legacy Keras in all of one."""

import json
import os
from pathlib import Path

import pytest

from tests.subprocesses import run_python

CODE = """
    import os
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import sys
    from tests.distribution.embedding_layers import tfrs_checks
    getattr(tfrs_checks, sys.argv[1])(*sys.argv[2:])
"""


@pytest.mark.parametrize(
    "name",
    [
        "ranking_refusals",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("updates", "ranking_update", "ranking_serves")
        ),
    ],
)
def test_of_recommenders(name: str) -> None:
    run_python(CODE, name)


@pytest.mark.slow
@pytest.mark.skipif("DP_SPARSE_DATA" not in os.environ, reason="DP_SPARSE_DATA is not set")
def test_ranking_on_real_rows(tmp_path: Path) -> None:
    """pCTR's AUC, with an embedding layer or without, is about 0.70 after the same pass."""
    found = json.loads(run_python(CODE, "ranking_on_criteo", str(tmp_path)).splitlines()[-1])
    assert found["auc"] > 0.67 and found["epsilon"] <= 8.0, found
