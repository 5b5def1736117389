"""A file is written whole or not at all, whatever fails and whoever else writes it."""

import os
from pathlib import Path

import pytest

from dp_sparse.core import PrivacyError, StateFile, require_room, whole_file, whole_folder
from pipelines import files


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_in_mid_write_leaves_the_old_file_and_no_litter(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fail() -> None:
        with whole_file(path) as file:
            file.write(b"half")
            file.flush()
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_bytes() == b"old" and names(tmp_path) == ["a"]


def test_nothing_stands_at_its_place_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with whole_file(str(path)) as file:
        file.write(b"half ")
        file.flush()
        assert not path.exists()
        file.write(b"and half")
    assert path.read_bytes() == b"half and half" and names(tmp_path) == ["a"]


def test_a_file_that_cannot_be_put_in_its_place_leaves_no_litter(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError), whole_file(tmp_path / "a") as file:
        file.write(b"new")
    assert names(tmp_path) == ["a"]


def test_processes_that_write_one_file_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    with whole_file(path) as first:
        first.write(b"first")
        monkeypatch.setattr(os, "getpid", lambda: 1)  # another process
        with whole_file(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first" and names(tmp_path) == ["a"]


def test_a_folder_that_is_missing_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a"
    with whole_file(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new" and names(path.parent) == ["a"]


@pytest.fixture
def waited_for(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was waited for until it is on the disk: a path, and its size then."""
    fsync, found = os.fsync, []

    def noted(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        found.append((path, os.path.getsize(path)))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return found


def test_a_file_is_on_the_disk_before_its_name_and_the_name_before_the_end(
    tmp_path: Path, waited_for: list[tuple[str, int]]
) -> None:
    with whole_file(tmp_path / "a") as file:
        file.write(b"all of it")
    (content, size), (folder, _) = waited_for
    assert Path(content).name.startswith(".a.") and size == len(b"all of it")
    assert folder == str(tmp_path)


def test_jobs_write_files_as_the_library_does() -> None:
    assert files.whole_file is whole_file


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "above" / "a"
    with whole_folder(path) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_bytes(b"new")
        assert not path.exists() and names(tmp_path / "above") == [folder.name]
        assert folder.name.startswith(".a.")
    assert (path / "inner" / "file").read_bytes() == b"new" and names(tmp_path / "above") == ["a"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_no_folder(tmp_path: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with whole_folder(tmp_path / "a") as folder:
            (folder / "file").touch()
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == []


def test_a_folder_replaces_nothing(tmp_path: Path) -> None:
    """Not even what appears while it is written."""

    def write() -> None:
        with whole_folder(tmp_path / "a"):
            (tmp_path / "a").mkdir(exist_ok=False)

    for _ in range(2):
        with pytest.raises(FileExistsError, match="Expected a path where nothing is yet, got"):
            write()
        assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"step": "x"}', "{}"])
def test_a_damaged_state_is_one_sentence_and_what_to_do(tmp_path: Path, content: str) -> None:
    state = StateFile(tmp_path / "state.json", "Use another folder.")
    assert not state.exists()
    state.write({"step": 3})
    assert state.exists() and state.read(lambda found: int(found["step"])) == 3
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(
        PrivacyError, match=r"state.json is damaged \(\w+: .*\).\nUse another folder"
    ):
        state.read(lambda found: int(found["step"]))


def test_room_for_weights_is_there_before_they_are_written(tmp_path: Path) -> None:
    require_room(tmp_path, [8, 16])
    with pytest.raises(OSError, match=r"No space left for 1,0\d\d,.* bytes of weights"):
        require_room(tmp_path, [8, 10**18])
