"""The folder of a run: what is made once, since making it again would spend again.

`run.json` has the settings that the run began with, `plan.json` its plan, and each release that was
paid for is a file of its own, named in `released.json`. `begun.json` says that there must be
checkpoints. `lock` keeps other processes out.
"""

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from dp_sparse.accounting import PrivacyPlan
from dp_sparse.core import StateFile, exclusive


class _Saved(Protocol):
    """What a file of the folder can hold."""

    def save(self, path: str | os.PathLike[str]) -> object:
        """Writes it, whole or not at all."""


T = TypeVar("T", bound=_Saved)

_OTHERWISE = "Restore it, or use another folder and plan, which spends again."
_RUN, _PLAN, _BEGUN, _CHARGED = "run.json", "plan.json", "begun.json", "charged.json"
_RELEASED, _RESERVED = "released.json", "reserved.json"


def locked(path: Path) -> IO[str]:
    """A lock on a folder, made if it is missing, that ends when the file is closed.

    Raises:
        ValueError: Another run has it.
    """
    path.mkdir(parents=True, exist_ok=True)
    lock = exclusive(path / "lock")
    if lock is None:
        raise ValueError(
            f"Another run is using {path}.\nWait until its process has ended, or name another "
            "folder."
        )
    return lock


class RunFolder:
    """What a run has in its folder.

    Args:
        path: A local folder, which is `locked`.
        settings: What the run depends on, by names; a run that is there must have the same.

    Raises:
        ValueError: Its run has other settings, or `run.json` is lost.
        PrivacyError: `run.json` is damaged.
    """

    def __init__(self, path: Path, settings: Mapping[str, str]) -> None:
        self.path, self._settings = path, dict(settings)
        self.resumes = (path / _RUN).exists()
        if self.resumes:
            self._compare()
        else:
            self._refuse_remains()

    def release(self, name: str, make: Callable[[], T]) -> T | None:
        """Makes a release and saves it; None if its file is there already, to be loaded.

        Raises:
            ValueError: The run has a plan that may have paid for it, and no such file; or the name
                does not end with ".npz".
        """
        if not name.endswith(".npz"):
            raise ValueError(f'Expected a file name that ends with ".npz", got {name!r}.')
        path = self.path / name
        if path.exists():
            self._note_release(name)
            return None
        if self.has_checkpoints or (self.resumes and (self.path / _PLAN).exists()):
            raise ValueError(
                f"{path} is missing, which the plan of this run paid for.\nRestore the file, or "
                "begin in another folder, which spends again."
            )
        self._refuse_lost(name)
        made = make()
        (self.path / _PLAN).unlink(missing_ok=True)  # of a start that failed before
        self.begin()
        made.save(path)
        self._note_release(name)
        return made

    def paid_release(self, name: str, make: Callable[[], T]) -> T | None:
        """As `release`, of what the plan pays for and the run makes after the plan.

        Raises:
            ValueError: It was made, and its file is lost.
        """
        path = self.path / name
        if path.exists():
            self._note_release(name)
            return None
        self._refuse_lost(name)
        self.begin()
        made = make()
        made.save(path)
        self._note_release(name)
        return made

    def _refuse_lost(self, name: str) -> None:
        """Raises ValueError if a release that has no file was made; removes unfinished ones."""
        if name in self._releases():
            raise ValueError(
                f"{self.path / name} is missing, which this run has released.\nRestore the file, "
                "or begin in another folder, which spends again."
            )
        for unfinished in self.path.glob(f".{name}.*.tmp"):
            unfinished.unlink()  # two noisy versions of one release would reveal more

    def _releases(self) -> list[str]:
        """The names of what was released."""
        file = self._file(_RELEASED)
        return file.read(list) if file.exists() else []

    def _note_release(self, name: str) -> None:
        noted = self._releases()
        if name not in noted:
            self._file(_RELEASED).write([*noted, name])

    def note(self, name: str, asked: dict[str, Any]) -> None:
        """Keeps what a release is made from, before it has a file: until then it may change."""
        self._file(name).write(asked)

    def same(self, name: str, asked: dict[str, Any]) -> None:
        """Keeps what a release was made from; raises ValueError if that was something else."""
        file = self._file(name)
        if not file.exists():
            file.write(asked)
        made = file.read(dict)
        if made != asked:
            raise ValueError(
                f"The run in {self.path} released {name.removesuffix('.json')} for {made}, got "
                f"{asked}.\nResume it with its own arguments, or use another folder."
            )

    def plan(self, make: Callable[[], PrivacyPlan]) -> PrivacyPlan:
        """The plan of the run, made once.

        Raises:
            ValueError: It is lost, and steps were taken under it.
            PrivacyError: It is damaged.
        """
        path = self.path / _PLAN
        if not self.resumes or not path.exists():
            if self.has_checkpoints:
                raise ValueError(
                    f"{path} is missing, under which steps were taken.\nRestore the file, or begin "
                    "in another folder, which spends again."
                )
            self._file(_PLAN).write(make().get_config())
        return self.saved_plan()

    def saved_plan(self) -> PrivacyPlan:
        """The plan of the folder.

        Raises:
            PrivacyError: It is damaged.
        """
        return self._file(_PLAN).read(PrivacyPlan.from_config)

    @property
    def has_plan(self) -> bool:
        """Whether a plan was made."""
        return (self.path / _PLAN).exists()

    def reservation(self) -> str:
        """The name under which an account reserves the budget of this folder's plan."""
        file = self._file(_RESERVED)
        if not file.exists():
            file.write({"name": f"reserved-{secrets.token_hex(16)}"})
        return file.read(lambda found: str(found["name"]))

    def is_charged(self, run_id: str) -> bool:
        """Whether a process has begun to charge the plan for this folder."""
        file = self._file(_CHARGED)
        return file.exists() and bool(file.read(lambda found: found["run_id"] == run_id))

    def note_charge(self, run_id: str) -> None:
        """Notes that the plan is being charged for this folder."""
        self._file(_CHARGED).write({"run_id": run_id})

    def forget(self) -> None:
        """Nothing was charged: another plan may be made."""
        (self.path / _CHARGED).unlink(missing_ok=True)
        (self.path / _PLAN).unlink(missing_ok=True)
        if not [*self.path.glob("*.npz")]:
            (self.path / _RUN).unlink(missing_ok=True)
            self.resumes = False

    def begin(self) -> None:
        """From now on the folder has a run: something of the data may be written."""
        if not self.resumes:
            self._file(_RUN).write(self._settings)
            self.resumes = True

    @property
    def has_checkpoints(self) -> bool:
        """Whether there were some: a folder without them has lost them."""
        return (self.path / _BEGUN).exists()

    def note_checkpoints(self) -> None:
        """There are some from now on."""
        self._file(_BEGUN).write({"begun": True})

    def _file(self, name: str) -> StateFile:
        return StateFile(self.path / name, _OTHERWISE)

    def _compare(self) -> None:
        begun = self._file(_RUN).read(dict)
        for name in sorted({*begun, *self._settings}):
            was, now = begun.get(name), self._settings.get(name)
            if was != now:
                raise ValueError(
                    f"The run in {self.path} began with {name}={was}, got {name}={now}.\nResume it "
                    "with its own settings, or use another folder."
                )

    def _refuse_remains(self) -> None:
        """Raises if files are there that only a run writes, so that `run.json` was lost."""
        remains = [path.name for path in self.path.glob("*.npz")]
        remains += [_BEGUN] if self.has_checkpoints else []
        if remains:
            raise ValueError(
                f"{self.path / _RUN} is missing, but {', '.join(remains)} is there, as a run has.\n"
                "Restore it, or use another folder: a run that begins here would spend again what "
                "was paid. Keep .npz files of your own elsewhere."
            )
