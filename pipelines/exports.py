"""Whether a run can end with an export, found out before it begins."""

from pathlib import Path

from pipelines.methods import NON_PRIVATE


def require_free(path: str) -> None:
    """Raises ValueError if there is something where an export is to go."""
    if Path(path).exists():
        raise ValueError(
            f"Expected a path where nothing is yet, got export={path!r}: name another."
        )


def require_private(method: str) -> None:
    """Raises ValueError for training without privacy."""
    if method == NON_PRIVATE:
        raise ValueError(
            "Expected a private method with export, which carries a statement of privacy, got "
            f"method={method!r}."
        )
