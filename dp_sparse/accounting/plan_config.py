"""A plan as a description for JSON, and back."""

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from dp_sparse.accounting.budget import PrivacyBudget
from dp_sparse.accounting.mechanisms import Mechanism
from dp_sparse.accounting.releases import Release
from dp_sparse.accounting.stopping import FIXED
from dp_sparse.sampling import Sampling


def identified(plan: Any, sampling: Sampling, noise_multiplier: float) -> Any:
    """The plan with a new name, and a sampler that serves it."""
    new = dataclasses.replace(
        plan,
        sampling=sampling.for_plan(None),
        noise_multiplier=noise_multiplier,
        plan_id=secrets.token_hex(16),
    )
    return dataclasses.replace(new, sampling=new.sampling.for_plan(new.fingerprint))


def described(plan: Any) -> dict[str, Any]:
    """The fields of a `PrivacyPlan`, from which `fields_of` makes them again.

    The default of `stopping` is left out, so plans that were saved before it have their names.
    """
    return {
        "budget": dataclasses.asdict(plan.budget),
        "sampling": plan.sampling.get_config(),
        "mechanism": plan.mechanism.get_config(),
        "releases": [release.get_config() for release in plan.releases],
        "noise_multiplier": plan.noise_multiplier,
        "plan_id": plan.plan_id,
        **({} if plan.stopping == FIXED else {"stopping": plan.stopping}),
    }


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `PrivacyPlan` that were described."""
    return {
        "budget": PrivacyBudget(**config["budget"]),
        "sampling": Sampling.from_config(config["sampling"]),
        "mechanism": Mechanism.from_config(config["mechanism"]),
        "releases": tuple(map(Release.from_config, config["releases"])),
        "noise_multiplier": config["noise_multiplier"],
        "plan_id": config["plan_id"],
        "stopping": config.get("stopping", FIXED),
    }
