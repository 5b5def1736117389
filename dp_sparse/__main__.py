"""`python -m dp_sparse plan` says what plans cost before training, `audit` what attacks show."""

import argparse
import sys
from collections.abc import Sequence

from dp_sparse.accounting import plan_table
from dp_sparse.auditing import audit_of
from dp_sparse.core import PrivacyError

_ERROR, _EXCEEDS = 1, 3  # 2 is argparse's


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 1 after an error, and 3 if an audit finds a claim to be wrong."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, ImportError, OSError, PrivacyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _ERROR


def _plan(options: argparse.Namespace) -> int:
    table = plan_table(
        options.examples,
        options.epsilon,
        options.delta,
        batch_sizes=options.batch_size,
        epochs=options.epochs,
    )
    if options.plot:
        table.plot(options.plot)
    print(table.csv() if options.csv else table, end="" if options.csv else "\n")
    return 0


def _audit(options: argparse.Namespace) -> int:
    result = audit_of(options.config).run()
    if options.plot:
        result.plot(options.plot)
    print(result)
    return _EXCEEDS if result.exceeds else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dp_sparse", description=__doc__)
    commands = parser.add_subparsers(required=True)
    plan = commands.add_parser(
        "plan", help="noise, epsilon and signal to noise over batch sizes and epochs"
    )
    plan.set_defaults(run=_plan)
    plan.add_argument("--examples", type=_count, required=True, help="how many there are")
    plan.add_argument("--epsilon", type=float, required=True, help="of the whole run")
    plan.add_argument("--delta", type=float, help="of the whole run; 1 / examples by default")
    plan.add_argument("--batch-size", type=float, nargs="+", help="one or more expected sizes")
    plan.add_argument("--epochs", type=float, nargs="+", default=[1, 3, 10], help="one or more")
    plan.add_argument("--csv", action="store_true", help="print comma-separated values")
    plan.add_argument("--plot", metavar="FILE", help="also draw signal to noise, .png or .svg")
    audit = commands.add_parser(
        "audit", help="trains twice with canaries, and exits with 3 if a claim is wrong"
    )
    audit.set_defaults(run=_audit)
    audit.add_argument(
        "--config", metavar="FILE.py", required=True, help="has get_audit() -> dp_sparse.Audit"
    )
    audit.add_argument("--plot", metavar="FILE", help="also draw what was seen, .png or .svg")
    return parser


def _count(text: str) -> int | float:
    """A number such as 1000000 or 1e6; what is none of examples is left for the plan to refuse."""
    value = float(text)
    return int(value) if value.is_integer() else value


if __name__ == "__main__":
    sys.exit(main())
