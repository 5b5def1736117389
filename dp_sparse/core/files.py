"""Files and folders written whole or not at all, locks that end with their process, and state."""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import tensorflow as tf

from dp_sparse.core.errors import PrivacyError


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a file to write bytes, which replaces `path` when the block ends and it is on the disk.

    If the block raises, `path` stays as it was, and no other file remains. Several processes may
    write the same path: each writes a file of its own, and the last one to end replaces the others.

    Args:
        path: A local file; folders above are made.

    Raises:
        OSError: It cannot be written there.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        synced(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


_DAMAGED = (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error)


def write_arrays(
    file: IO[bytes], format: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Writes arrays and a JSON header of one format, which `read_arrays` reads, to an open file."""
    text = np.array(json.dumps({"format": format, **header}))
    np.savez_compressed(file, header=text, **arrays)  # type: ignore[arg-type]


def read_arrays(
    path: str | os.PathLike[str] | IO[bytes], format: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header, without its format, and the arrays by name.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It has another format.
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files if name != "header"}
        header = json.loads(str(file["header"]))
    if (found := header.pop("format")) != format:
        raise ValueError(f"format {found!r}")
    return header, arrays


@contextlib.contextmanager
def damage_told(message: str) -> Iterator[None]:
    """Raises ValueError with this message where a file that is read is of another kind, or damaged.

    `{}` in the message stands for what was found.
    """
    try:
        yield
    except _DAMAGED as error:
        raise ValueError(message.replace("{}", str(error))) from None


@contextlib.contextmanager
def whole_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Makes a folder to write in, which becomes `path` when the block ends and all is on the disk.

    If the block raises, nothing remains. A process that is killed leaves a folder whose name begins
    with a dot.

    Args:
        path: Where nothing is yet; folders above are made.

    Raises:
        FileExistsError: Something is at `path`.
        OSError: It cannot be written there.
    """
    path = Path(path).absolute()
    _require_free(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for inside in (*unfinished.rglob("*"), unfinished):
            synced(inside)
        _require_free(path)
        unfinished.rename(path)
        synced(path.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def first_file(path: str | os.PathLike[str], content: bytes) -> bool:
    """Writes a file, on the disk when it returns, unless there is one; of many processes one does.

    A hard link gives a whole file its name, which fails where one is. File systems without hard
    links get an exclusive open instead: there others may find the file before its content, and one
    that is killed in between leaves it cut.

    Args:
        path: A local file, in a folder that exists.
        content: All of it.

    Returns:
        Whether this call wrote it.

    Raises:
        OSError: It cannot be written there.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        _write_new(unfinished, content)
        try:
            os.link(unfinished, path)
        except FileExistsError:
            return False
        except OSError:  # no hard links here
            try:
                _write_new(path, content)
            except FileExistsError:
                return False
    finally:
        unfinished.unlink(missing_ok=True)
    synced(path.parent)
    return True


def _write_new(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def synced(path: str | os.PathLike[str]) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_free(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"Expected a path where nothing is yet, got {path}: use another.")


def require_room(folder: str | os.PathLike[str], sizes: Iterable[int]) -> None:
    """Raises OSError unless arrays of these sizes, in bytes, have room in an HDF5 file there.

    HDF5 ends the process, by a segmentation fault, when it closes a file that could not be written.
    """
    needed = sum(size + 4096 for size in sizes) + 65_536  # of headers
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, f"No space left for {needed:,} bytes of weights", str(folder))


def local_form(path: str | os.PathLike[str]) -> str:
    """A path without `file://`, which some write before a local one; another one as it is."""
    return str(path).removeprefix("file://")


def exclusive(path: str | os.PathLike[str]) -> IO[str] | None:
    """An open file that no other process, and nobody else in this one, has at once.

    Args:
        path: A local file, which is made if it is not there.

    Returns:
        The file, to be closed, or left to the end of the process; None if somebody has it.
    """
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


T = TypeVar("T")


class StateFile:
    """A JSON file that must not be lost: on the disk as a whole, or refused when it is read.

    Args:
        path: A local file, or one of another file system of `tf.io.gfile`.
        otherwise: What to do if it is damaged, as a sentence.
    """

    def __init__(self, path: str | os.PathLike[str], otherwise: str) -> None:
        self.path = local_form(path)
        self._otherwise = otherwise

    def exists(self) -> bool:
        """Whether it was written."""
        return bool(tf.io.gfile.exists(self.path))

    def read(self, parsed: Callable[[Any], T]) -> T:
        """What the file holds.

        Args:
            parsed: From the JSON object; a KeyError, TypeError or ValueError of it is damage.

        Raises:
            PrivacyError: It is damaged.
            OSError: It is missing, or cannot be read from where it is.
        """
        try:
            return parsed(json.loads(self._content()))
        except (KeyError, TypeError, ValueError) as error:
            raise PrivacyError(
                f"{self.path} is damaged ({type(error).__name__}: {error}).\n{self._otherwise}"
            ) from None

    def _content(self) -> bytes:
        if "://" not in self.path:
            return Path(self.path).read_bytes()
        with tf.io.gfile.GFile(self.path, "rb") as file:
            return bytes(file.read())

    def write(self, content: Any) -> None:
        """Replaces it; it is on the disk when this returns.

        Raises:
            OSError: It cannot be written there; it stays as it was.
        """
        encoded = (json.dumps(content, indent=1) + "\n").encode()
        if "://" not in self.path:
            with whole_file(self.path) as local:
                local.write(encoded)
            return
        folder, _, name = self.path.rpartition("/")
        unfinished = f"{folder}/.{name}.tmp"
        with tf.io.gfile.GFile(unfinished, "wb") as file:
            file.write(encoded)
        tf.io.gfile.rename(unfinished, self.path, overwrite=True)
