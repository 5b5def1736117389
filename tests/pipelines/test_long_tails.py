"""The picture of how unequal items are."""

from pathlib import Path

import pytest

from pipelines.movielens import long_tails


def test_it_counts_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [(user, item) for user in range(1, 9) for item in range(1, 6) if item < 2 or user < 3]
    rows, picture = tmp_path / "rows.txt", tmp_path / "out" / "tails.png"
    rows.write_text("".join(f"{user} {item}\n" for user, item in pairs))
    assert long_tails.counts_of(rows).tolist() == [8, 2, 2, 2, 2]
    assert long_tails.main(["--data", f"made up={rows}", f"--out={picture}"]) == 0
    said = "made up: 16 interactions with 5 items; the most popular 20% have 50.0%, the median"
    assert said in capsys.readouterr().out and picture.stat().st_size > 1_000
    assert long_tails.main(["--data", f"x={tmp_path / 'none.txt'}", f"--out={picture}"]) == 1
    assert "none.txt" in capsys.readouterr().err
