"""Days: their files, their order, their periods, and days cut from one file."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.criteo.days import check_different
from pipelines.criteo.records import PrepareError
from pipelines.criteo.time_series import cut
from pipelines.criteo.time_series.days import cut_into_days, day_files, periods_of


def files(folder: Path, *names: str, content: bytes = b"row\n") -> str:
    for name in names:
        (folder / name).write_bytes(content)
    return str(folder / "*")


class TestFiles:
    def test_they_come_in_the_order_of_their_numbers(self, tmp_path: Path) -> None:
        pattern = files(tmp_path, "day_10.gz", "day_9.gz", "day_8.gz")
        assert [path.name for path in day_files(pattern)] == ["day_8.gz", "day_9.gz", "day_10.gz"]

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            ((), "a file for each day, got none"),
            (("day_0", "day_1", "day_4", "day_5"), "got none for day 2 and 1 more"),
            (("day_0", "day_2"), "got none for day 1 in"),
            (("day_0", "day_00"), "one file for each day"),
            (("day_0", "readme"), "the number of its day in the name"),
        ],
    )
    def test_missing_repeated_or_nameless(
        self, tmp_path: Path, names: tuple[str, ...], message: str
    ) -> None:
        with pytest.raises(PrepareError, match=message):
            day_files(files(tmp_path, *names))

    def test_empty(self, tmp_path: Path) -> None:
        files(tmp_path, "day_0")
        with pytest.raises(PrepareError, match=r"day_1 is empty"):
            day_files(files(tmp_path, "day_1", content=b""))


def test_the_same_rows_are_found_however_they_are_packed(tmp_path: Path) -> None:
    """Their beginnings are longer than what is decompressed at once."""
    content = b"".join(b"%d\t%d\n" % (n, n * n) for n in range(200_000))
    for name, packed in {
        "plain": content,
        "fast.gz": gzip.compress(content, 1),
        "small.gz": gzip.compress(content, 9),
    }.items():
        (tmp_path / name).write_bytes(packed)
    for name in ("fast.gz", "small.gz"):
        with pytest.raises(PrepareError, match="the same rows at the beginning"):
            check_different([str(tmp_path / "plain"), str(tmp_path / name)])
    (tmp_path / "other").write_bytes(b"1\n" + content)
    check_different([str(tmp_path / "plain"), str(tmp_path / "other")])


@given(first=st.integers(0, 9), days=st.integers(1, 30), length=st.integers(1, 30))
def test_periods_are_disjoint_and_hold_every_day(first: int, days: int, length: int) -> None:
    names = [Path(f"day_{day}") for day in range(first, first + days)]
    if length > days:
        with pytest.raises(ValueError, match="1 <= period <="):
            periods_of(names, length)
        return
    periods = periods_of(names, length)
    assert [path for period in periods for path in period.files] == names
    assert [day for period in periods for day in period.days] == [*range(first, first + days)]
    assert {len(period.files) for period in periods[:-1]} <= {length}
    assert [period.number for period in periods] == list(range(len(periods)))


def test_periods_have_names() -> None:
    periods = periods_of([Path(f"day_{day}") for day in range(5)], 2)
    assert [p.name for p in periods] == ["days 0 to 1", "days 2 to 3", "day 4"]


class TestCut:
    @pytest.mark.parametrize("ending", [b"\n", b""])
    def test_every_line_is_in_one_day_in_order(self, tmp_path: Path, ending: bytes) -> None:
        lines = [b"line %d" % n for n in range(11)]
        source = tmp_path / "all.gz"
        source.write_bytes(gzip.compress(b"\r\n".join(lines) + ending))
        paths = cut_into_days(source, tmp_path / "days", 4)
        found = [path.read_bytes().splitlines() for path in paths]
        assert [line for day in found for line in day] == lines
        assert [len(day) for day in found] == [2, 3, 3, 3]

    def test_a_carriage_return_within_a_line_ends_nothing(self, tmp_path: Path) -> None:
        lines = [b"a", b"b\rc", b"", b"d\x0be"]
        (tmp_path / "all").write_bytes(b"\n".join(lines) + b"\n")
        paths = cut_into_days(tmp_path / "all", tmp_path / "days", 2)
        assert b"".join(path.read_bytes() for path in paths) == b"\n".join(lines) + b"\n"

    def test_a_damaged_file(self, tmp_path: Path) -> None:
        content = gzip.compress(b"".join(b"line %d\n" % n for n in range(999)))
        (tmp_path / "all.gz").write_bytes(content[: len(content) // 2])
        with pytest.raises(PrepareError, match=r"all\.gz ends early after"):
            cut_into_days(tmp_path / "all.gz", tmp_path / "days", 3)

    def test_more_days_than_lines(self, tmp_path: Path) -> None:
        (tmp_path / "all").write_bytes(b"one\ntwo\n")
        with pytest.raises(PrepareError, match="1 <= days <= 2, the lines of"):
            cut_into_days(tmp_path / "all", tmp_path / "days", 3)

    def test_command_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "all").write_bytes(b"one\ntwo\n")
        arguments = ["--input", str(tmp_path / "all"), "--output", str(tmp_path / "days")]
        assert cut.main([*arguments, "--days=2"]) == 0
        assert (tmp_path / "days" / "day_01.tsv").read_bytes() == b"two\n"
        assert cut.main([*arguments, "--days=9"]) == 1
        assert "error: Expected 1 <= days <= 2" in capsys.readouterr().err
