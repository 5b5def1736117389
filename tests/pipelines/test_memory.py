"""Jobs keep the memory that TensorFlow frees, as `benchmarks.freed_memory` measures it."""

import os
from pathlib import Path

import pytest
from absl import flags

from pipelines import command
from pipelines.memory import keep_freed_memory
from pipelines.own_process import in_own_process
from tests.subprocesses import run_python

NAMES = ("TF_CPU_ALLOCATOR_USE_BFC", "TF_CPU_BFC_MEM_LIMIT_IN_MB")
MEASURED = """
import tensorflow as tf
from pipelines.memory import keep_freed_memory
{first}
keep_freed_memory()
tf.ones(1000) + 1
print(tf.config.experimental.get_memory_info("CPU:0")["peak"] > 4000)  # TensorFlow's own counts
"""

FILLED = """
import os
import tensorflow as tf
from pipelines.memory import keep_freed_memory
os.sysconf = dict(SC_PAGE_SIZE=1 << 20, SC_PHYS_PAGES=960).get  # a machine of 960 MiB
keep_freed_memory()
table, slots = tf.zeros((300, 1 << 18)), tf.zeros((460, 1 << 18))
print("fits", os.environ["TF_CPU_BFC_MEM_LIMIT_IN_MB"])
"""


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # which pytest restores
        monkeypatch.delenv(name)


def test_tensorflow_keeps_it_and_what_the_environment_says_stays() -> None:
    assert run_python(MEASURED.format(first="")).split()[-1] == "True"
    refused = f"import os; os.environ['{NAMES[0]}'] = 'false'"
    assert run_python(MEASURED.format(first=refused)).split()[-1] == "False"


def test_tensors_that_fit_in_memory_are_not_refused() -> None:
    """TensorFlow reserves 512 MiB for the first one, and as much again for the second."""
    assert run_python(FILLED).splitlines()[-1] == "fits 3840"


def test_the_limit_is_four_times_the_memory_of_the_machine() -> None:
    keep_freed_memory()
    total = next(x for x in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in x)
    assert int(os.environ[NAMES[1]]) == pytest.approx(4 * int(total.split()[1]) / 1024, rel=0.05)


def test_jobs_and_their_processes_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given = flags.FlagValues()
    command.config_flag("configs/movielens_small.py", "A job's.", given)
    monkeypatch.setattr("sys.argv", ["job"])
    with pytest.raises(SystemExit):
        command.run(lambda arguments: print(arguments) or 0, given)
    assert os.environ[NAMES[0]] == "true"
    monkeypatch.delenv(NAMES[0])
    assert in_own_process(os.getenv, NAMES[0]) == "true"
