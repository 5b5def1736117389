"""Frozen dataclasses that are saved by the name of their class; fingerprints of configurations."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self


class Registered:
    """A base class that inherits from this registers each of its subclasses by name.

    The subclasses are frozen dataclasses.
    """

    _registered: ClassVar[dict[str, type]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if Registered in cls.__bases__:
            cls._registered = {}
        else:
            cls._registered[cls.__name__] = cls

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description from which `from_config` makes an equal object."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # every subclass is one
        return {"class": type(self).__name__, **{f.name: getattr(self, f.name) for f in fields}}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The object that `get_config` described.

        Raises:
            ValueError: No class of that name is registered, or a field is out of its range.
        """
        fields = dict(config)
        registered = cls._registered.get(fields.pop("class"))
        if registered is None:
            raise ValueError(
                f"Expected a {cls.__name__} among {sorted(cls._registered)}, got "
                f"{config['class']!r}."
            )
        return registered(**fields)


def fingerprint(config: dict[str, Any]) -> int:
    """The name of a configuration: 63 bits of its SHA-256, the same in every process."""
    hashed = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).digest()
    return int.from_bytes(hashed[:8], "little") >> 1
