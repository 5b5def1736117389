"""A file of a job is written into a folder that need not be there; `tests/core` tests the rest."""

from pathlib import Path

from pipelines.files import whole_file


def test_a_folder_that_is_missing_is_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a"
    with whole_file(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new" and list(path.parent.iterdir()) == [path]
