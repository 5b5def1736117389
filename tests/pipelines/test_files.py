"""A file is written whole or not at all, in a folder that need not be there."""

import os
from pathlib import Path

import pytest

from pipelines.files import whole_file


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_in_mid_write_leaves_the_old_file_and_no_litter(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "new" / "a"
    with whole_file(path) as file:
        file.write(b"old")
        assert not path.exists()

    def fail() -> None:
        with whole_file(path) as file:
            file.write(b"half")
            file.flush()
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_bytes() == b"old" and list(path.parent.iterdir()) == [path]


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
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]
