"""The demo as a user gets it: its AUC, calibrated log loss and time, and the same at ε = 3.

One process makes the demo's rows and trains its runs, and one run of DP-AdaFEST at ε = 3. Numbers
are of held-out rows; a log loss is that of calibrated predictions over a constant's.
"""

import tempfile
import time
from pathlib import Path

from benchmarks import harness
from pipelines.criteo import demo
from pipelines.criteo.report import title
from pipelines.criteo.train import RunResult
from pipelines.scores import constant_log_loss

_QUICK = 6_000
_AT_THREE = ("dp_adafest", 3.0)


def main() -> None:
    """Runs the demo and prints its table."""
    options = harness.arguments(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        rows = _QUICK if options.quick else demo.ROWS
        begun = time.perf_counter()
        results = demo.run(None, Path(folder), rows, demo.RUNS)
        seconds = time.perf_counter() - begun
        more = demo.run(None, Path(folder), rows, (_AT_THREE,))
    headers = ("run", "AUC", "log loss over a constant's", "reduction")
    table = [(title(r), r.auc, _over_constant(r), r.reduction) for r in (*results, *more)]
    free = results[0]
    adafest = next(r for r in results if r.method == "dp_adafest")
    metrics = {
        "demo_adafest_auc": adafest.auc,
        "demo_log_loss_over_constant": _over_constant(adafest),
        "demo_auc_below_no_privacy_eps3": free.auc - more[0].auc,
        "demo_reduction": adafest.reduction,
        "demo_minutes": seconds / 60,
    }
    harness.report("demo", headers, table, metrics, options)


def _over_constant(result: RunResult) -> float:
    return result.calibrated_log_loss / constant_log_loss(result.rate)


if __name__ == "__main__":
    main()
