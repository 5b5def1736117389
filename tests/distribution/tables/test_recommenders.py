"""tensorflow_recommenders, in processes of its own: it needs legacy Keras in all of one."""

import pytest

from tests.subprocesses import run_python

CODE = """
    import os
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import sys
    from tests.distribution.tables import of_recommenders
    getattr(of_recommenders, sys.argv[1])()
"""


@pytest.mark.parametrize(
    "name", ["updates", "ranking_update", "ranking_serves", "ranking_refusals"]
)
def test_of_recommenders(name: str) -> None:
    run_python(CODE, name)
