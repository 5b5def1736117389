"""Layers made from a release of private data, which the plan that trains them must have."""

from collections.abc import Callable, Collection

from dp_sparse.accounting import Release
from dp_sparse.core import PrivacyError


class PaidByPlan:
    """What a Keras layer that was made from a release adds to it.

    Attributes:
        release: The release; None if the layer was made from public numbers.
        path: Of the layer.
    """

    release: Release | None = None
    path: str
    _steps_paid: Callable[[], int] = int  # none

    @property
    def is_paid(self) -> bool:
        """Whether a plan that has the release has trained the layer."""
        return self.release is None or self._steps_paid() > 0

    def pay(self, steps: Callable[[], int]) -> None:
        """A plan that has the release begins to train the layer; `steps` counts its steps."""
        self._steps_paid = steps

    def require_paid(self, releases: Collection[Release], fix: str) -> None:
        """Checks that a plan with these releases pays for what the layer was made from.

        Args:
            releases: Of the plan.
            fix: What to do otherwise, for the error.

        Raises:
            PrivacyError: It does not, and no other plan has.
        """
        if self.release is not None and not self.is_paid and self.release not in releases:
            raise PrivacyError(
                f"Expected a plan that pays for {self.release.name!r}, with which {self.path} was "
                f"made, got releases={[each.name for each in releases]}: {fix}."
            )
