"""The interface of every sampler: an event, a neighbouring relation and fixed-shape batches."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import dp_accounting
import tensorflow as tf

from dp_sparse.sampling import marker


class Sampling(abc.ABC):
    """How the batches of a training run are drawn.

    Fields are public; datasets and seeds are call arguments. A subclass is a frozen dataclass.

    Attributes:
        num_examples: N, public.
        steps: Batches in a whole run.
        expected_batch_size: What a sum over a batch is divided by; public, and never the realised
            size.
    """

    num_examples: int
    steps: int
    expected_batch_size: float

    _registry: ClassVar[dict[str, type["Sampling"]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Sampling._registry[cls.__name__] = cls

    def _set(self, name: str, validator: Callable[[str, Any], Any]) -> None:
        """Validates a field of the frozen dataclass and keeps it as a config's plain number."""
        object.__setattr__(self, name, validator(name, getattr(self, name)))

    @property
    @abc.abstractmethod
    def batch_capacity(self) -> int:
        """The leading dimension of every batch, padding included."""

    @property
    @abc.abstractmethod
    def neighbouring(self) -> str:
        """The neighbouring relation, as a statement prints it."""

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """One line for the statement."""

    @property
    def ordered(self) -> bool:
        """Whether batch t must be used for step t and no other."""
        return False

    @abc.abstractmethod
    def event(self, mechanism: dp_accounting.DpEvent, steps: int) -> dp_accounting.DpEvent:
        """The cost of running `mechanism` on each of `steps` batches."""

    def overflow_delta(self, epsilon: float, steps: int) -> float:
        """What the chance of a batch beyond its capacity adds to δ."""
        del epsilon, steps
        return 0.0

    @abc.abstractmethod
    def batches(self, source: Any) -> tf.data.Dataset:
        """The run's batches, of fixed shape, each with its marker."""

    @property
    def fingerprint(self) -> int:
        """Names this configuration in every batch it makes."""
        return marker.fingerprint(self.get_config())

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description from which `from_config` makes an equal sampler."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
        return {"class": type(self).__name__, **{f.name: getattr(self, f.name) for f in fields}}

    @staticmethod
    def from_config(config: dict[str, Any]) -> "Sampling":
        """The sampler that `get_config` described."""
        fields = dict(config)
        return Sampling._registry[fields.pop("class")](**fields)
