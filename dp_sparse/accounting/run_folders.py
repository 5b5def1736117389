"""Which plans belong to a run with a folder, which keeps what a plan pays for."""

_PLANS: set[str] = set()  # by their `run_id`


def note_folder(run_id: str) -> None:
    """From now on the plan takes no step, and pays for no release, beside the folder of its run."""
    _PLANS.add(run_id)


def has_folder(run_id: str) -> bool:
    """Whether the run of a plan has a folder."""
    return run_id in _PLANS
