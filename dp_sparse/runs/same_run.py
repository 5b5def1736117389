"""What a run depends on, and whether it is the same when the run is resumed."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dp_sparse.accounting import BudgetAccount, PrivacyPlan

_LATER = ("noise_multiplier", "plan_id", "releases")  # what a plan gets in its run


def as_text(settings: Mapping[str, Any] | None, account: BudgetAccount | None) -> dict[str, str]:
    """What the folder keeps of the run's settings."""
    own = {name: str(value) for name, value in (settings or {}).items()}
    return own if account is None else {**own, "account": str(account.path)}


def refuse_other(given: PrivacyPlan, own: PrivacyPlan, folder: Path) -> None:
    """Raises ValueError if a plan that was given is not alike that of the folder."""
    was, now = _settings(own), _settings(given)
    for name in sorted({*was, *now}):
        if was.get(name) != now.get(name):
            raise ValueError(
                f"The run in {folder} has a plan with {name}={was.get(name)}, got one with "
                f"{name}={now.get(name)}.\nResume it with its own plan, or use another folder."
            )
    for release in given.releases:
        if release not in own.releases:
            raise ValueError(
                f"The run in {folder} has a plan without the release {release.name!r}.\nResume it "
                "with its own plan, or use another folder."
            )


def _settings(plan: PrivacyPlan) -> dict[str, Any]:
    """What a plan has before its run calibrates it."""
    config = dataclasses.replace(plan, sampling=plan.sampling.for_plan(None)).get_config()
    return {name: value for name, value in config.items() if name not in _LATER}
