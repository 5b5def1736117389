"""tensorflow_recommenders, in processes of its own: it needs legacy Keras in all of one."""

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
