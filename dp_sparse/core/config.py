"""Families of frozen dataclasses, saved by the name of their class; digests of configurations."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self


class Family:
    """The root of a family inherits from this; its subclasses are the members."""

    _members: ClassVar[dict[str, type]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if Family in cls.__bases__:
            cls._members = {}
        else:
            cls._members[cls.__name__] = cls

    def get_config(self) -> dict[str, Any]:
        """A JSON-ready description from which `from_config` makes an equal object."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # every member is a dataclass
        return {"class": type(self).__name__, **{f.name: getattr(self, f.name) for f in fields}}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The member that `get_config` described.

        Raises:
            ValueError: There is no member of that name, or a field is out of its range.
        """
        fields = dict(config)
        member = cls._members.get(fields.pop("class"))
        if member is None:
            raise ValueError(
                f"Expected a {cls.__name__} among {sorted(cls._members)}, got {config['class']!r}."
            )
        return member(**fields)


def fingerprint(config: dict[str, Any]) -> int:
    """A 63-bit digest of a sampler's public configuration."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
