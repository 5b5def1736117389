"""Makes `jax_privacy.json`: what JAX Privacy's estimators say of some scores.

It needs `pip install jax-privacy` (2.0.0 made the numbers) in an environment of its own:
`python tests/auditing/jax_privacy_numbers.py`. The scores follow from a formula, so that
`test_jax_privacy.py` can make them without that package.
"""

import itertools
import json
from pathlib import Path

from jax_privacy.auditing import CanaryScoreAuditor, Explicit
from scores_by_formula import held_in_and_out

CASES = ((500, 500, 1.0), (2000, 1900, 0.5), (300, 350, 2.0), (1000, 1000, 4.0))
NUMBERS = Path(__file__).with_name("jax_privacy.json")


def numbers(held_in, held_out, threshold, significance, delta):
    auditor, at = CanaryScoreAuditor(held_in, held_out), Explicit(threshold)
    # Its Gaussian conversion corrects for all of its thresholds; with these scores there are three.
    guesses = CanaryScoreAuditor(*(1.0 * (each >= threshold) for each in (held_in, held_out)))
    return {
        "one_run": auditor.epsilon_one_run(significance, delta, threshold_strategy=at),
        "one_run_fdp": auditor.epsilon_one_run_fdp(significance, delta, threshold_strategy=at),
        "clopper_pearson": auditor.epsilon_clopper_pearson(
            significance, delta, one_sided=False, threshold_strategy=at
        ),
        "gaussian": guesses.epsilon_from_gdp(3 * significance, delta),
    }


def main():
    found = []
    settings = itertools.product(CASES, (0.5, 1.5, 2.2), (0.05, 0.001), (1e-5, 1e-3))
    for (count_in, count_out, shift), threshold, significance, delta in settings:
        of = numbers(*held_in_and_out(count_in, count_out, shift), threshold, significance, delta)
        case = {"in": count_in, "out": count_out, "shift": shift, "threshold": threshold}
        case |= {"significance": significance, "delta": delta}
        found.append(case | {name: float(value) for name, value in of.items()})
    lines = ",\n".join(map(json.dumps, found))
    NUMBERS.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
