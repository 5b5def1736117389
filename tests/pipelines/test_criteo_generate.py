"""The generator: the same bytes from the same seed, Criteo's shape, a model that can be learnt."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from pipelines.criteo import generate as module
from pipelines.criteo import parse, planted_rows, schema
from pipelines.criteo.generate import generate, generate_days
from pipelines.criteo.planted_rows import Drift, GeneratedRows, generated_rows

SMALL = [40] * 26


def all_rows(rows: int, seed: int = 0, vocabularies: list[int] | None = None) -> GeneratedRows:
    """The generated rows as one chunk."""
    chunks = list(generated_rows(rows, seed, vocabularies or schema.TABLE3_VOCABULARIES))
    names = ("labels", "counts", "count_missing", "ranks", "codes", "probabilities")
    return GeneratedRows(
        **{name: np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in names}
    )


@pytest.fixture(scope="module")
def rows() -> GeneratedRows:
    """A hundred thousand rows with the default vocabularies."""
    return all_rows(100_000)


def auc(labels: npt.NDArray[np.bool_], scores: npt.NDArray[np.float64]) -> float:
    """The probability that a positive ranks above a negative, ties counted half."""
    ranks = stats.rankdata(scores)
    positives = int(labels.sum())
    above = ranks[labels].sum() - positives * (positives + 1) / 2
    return float(above / (positives * (len(labels) - positives)))


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.tsv.gz", "b.tsv.gz", "c.tsv", "d.tsv")]
    for path, seed in zip(paths, (3, 3, 3, 4), strict=True):
        generate(2000, path, seed, SMALL, progress=False)
    first, again, plain, other = [path.read_bytes() for path in paths]
    assert first == again
    assert gzip.decompress(first) == plain
    assert plain != other
    assert sorted(tmp_path.iterdir()) == paths


def test_bytes_do_not_change_between_versions(tmp_path: Path) -> None:
    generate(1000, tmp_path / "a.tsv", 7, progress=False)
    digest = hashlib.sha256((tmp_path / "a.tsv").read_bytes()).hexdigest()
    assert digest == "9b247e4a501ca325faf391dcebf61b13e68c1c671cfd38bbdb2ec196c68f8cb3"


@pytest.mark.parametrize("fewer", [1, 500, 16_384, 16_385])
def test_longer_file_begins_with_the_shorter(fewer: int) -> None:
    longer = module.encode(all_rows(20_000, vocabularies=SMALL))
    shorter = module.encode(all_rows(fewer, vocabularies=SMALL))
    assert shorter.count(b"\n") == fewer
    assert longer.startswith(shorter)


def test_every_row_is_well_formed_criteo(rows: GeneratedRows) -> None:
    parsed = parse.parse_lines(module.encode(rows), schema.TABLE3_VOCABULARIES)
    assert (parsed.reasons == parse.WELL_FORMED).all()
    np.testing.assert_array_equal(parsed.records["label"] == 1, rows.labels)
    seen = np.where(rows.count_missing, 0, rows.counts)
    np.testing.assert_array_equal(parsed.records["integers"], schema.log_transform(seen))


def test_text_of_rows(rows: GeneratedRows) -> None:
    lines = module.encode(rows).decode().splitlines()[:2000]
    for line, label, counts, missing, ranks in zip(
        lines, rows.labels, rows.counts, rows.count_missing, rows.ranks, strict=False
    ):
        fields = line.split("\t")
        assert fields[0] == str(int(label))
        expected = ["" if gone else str(n) for n, gone in zip(counts, missing, strict=True)]
        assert fields[1:14] == expected
        assert [len(field) for field in fields[14:]] == [0 if r < 0 else 8 for r in ranks]


def test_categories_are_injective(rows: GeneratedRows) -> None:
    lines = module.encode(rows).decode().splitlines()[:20_000]
    categories = np.array([line.split("\t")[14:] for line in lines])
    present = rows.ranks[:20_000] >= 0
    keys = np.argwhere(present)[:, 1] * 2**32 + rows.ranks[:20_000][present]
    pairs = set(zip(keys.tolist(), categories[present].tolist(), strict=True))
    assert len(pairs) == len({key for key, _ in pairs}) == len({text for _, text in pairs})


@pytest.mark.parametrize("exponent", [0.0, 1.1, 2.0])
def test_zipf_frequencies(exponent: float) -> None:
    chunks = generated_rows(60_000, 1, SMALL, exponent)
    ranks = np.concatenate([chunk.ranks for chunk in chunks])
    law = np.arange(1.0, 41.0) ** -exponent
    for feature in (0, 3, 25):
        present = ranks[:, feature][ranks[:, feature] >= 0]
        observed = np.bincount(present, minlength=40)
        assert stats.chisquare(observed, law / law.sum() * observed.sum()).pvalue > 1e-4
        wrong = np.arange(1.0, 41.0) ** -(exponent + 0.1)
        assert stats.chisquare(observed, wrong / wrong.sum() * observed.sum()).pvalue < 1e-4


def test_vocabularies_bound_the_ranks(rows: GeneratedRows) -> None:
    assert (rows.ranks < schema.TABLE3_VOCABULARIES).all()
    assert len(np.unique(rows.ranks[:, 8])) == 3
    assert rows.ranks[:, 2].max() > 70_000


def test_missing_values_and_tails(rows: GeneratedRows) -> None:
    missing = (rows.ranks == -1).mean(axis=0)
    assert missing[21] == pytest.approx(0.76, abs=0.01)
    assert missing[0] == 0
    assert rows.count_missing.mean(axis=0)[11] == pytest.approx(0.77, abs=0.01)
    assert rows.counts[:, 4].max() > 10**6
    assert rows.counts.max() < 10**8
    assert rows.counts.min() == -1
    assert (rows.counts.min(axis=0) == -1).sum() == 1


@pytest.mark.parametrize("seed", [0, 1, 2, 12345])
def test_labels_follow_the_planted_model(seed: int) -> None:
    drawn = all_rows(50_000, seed)
    assert drawn.labels.mean() == pytest.approx(planted_rows.POSITIVE_RATE, abs=0.02)
    assert 0.78 < auc(drawn.labels, drawn.probabilities) < 0.82
    variance = (drawn.probabilities * (1 - drawn.probabilities)).sum()
    excess = (drawn.labels - drawn.probabilities).sum()
    assert abs(excess) < 4.5 * np.sqrt(variance)


def test_planted_probabilities_are_those_of_the_rows(rows: GeneratedRows) -> None:
    probabilities = planted_rows.planted_probabilities(100_000)
    np.testing.assert_array_equal(probabilities, rows.probabilities)


@pytest.mark.slow
def test_hashed_logistic_regression_learns_most_of_it(rows: GeneratedRows) -> None:
    """300 Adagrad steps of 2,048 rows on what `prepare` keeps of a row."""
    parsed = parse.parse_lines(module.encode(rows), schema.TABLE3_VOCABULARIES)
    inputs, labels = schema.examples_from_records(parsed.records)
    offsets = np.concatenate([[0], np.cumsum(schema.TABLE3_VOCABULARIES)[:-1]])
    row_ids = inputs["categories"] + offsets
    counts = np.pad(inputs["integers"], ((0, 0), (0, 1)), constant_values=1)
    table, slots = np.zeros(sum(schema.TABLE3_VOCABULARIES)), np.full(338_782, 0.1)
    slopes, slope_slots = np.zeros(14), np.full(14, 0.1)
    rng = np.random.default_rng(0)
    for _ in range(300):
        batch = rng.integers(0, 80_000, 2048)
        logits = counts[batch] @ slopes + table[row_ids[batch]].sum(axis=1)
        errors = (1 / (1 + np.exp(-logits)) - labels[batch]) / 2048
        unique, inverse = np.unique(row_ids[batch], return_inverse=True)
        gradient = np.bincount(inverse.ravel(), np.repeat(errors, 26))
        slots[unique] += gradient**2
        table[unique] -= 0.5 * gradient / np.sqrt(slots[unique])
        slope_gradient = counts[batch].T @ errors
        slope_slots += slope_gradient**2
        slopes -= 0.1 * slope_gradient / np.sqrt(slope_slots)
    held_out = slice(80_000, None)
    scores = counts[held_out] @ slopes + table[row_ids[held_out]].sum(axis=1)
    assert auc(rows.labels[held_out], scores) > 0.75


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "Expected rows >= 1, got rows=0"),
        ({"rows": 10, "seed": -1}, "Expected seed >= 0, got seed=-1"),
        ({"rows": 10, "zipf_exponent": float("nan")}, "zipf_exponent=nan"),
        ({"rows": 10, "vocabularies": [5]}, "Expected 26 vocabularies"),
        ({"rows": 10, "vocabularies": [2**28] * 26}, "Expected vocabularies <= 134217728"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(out=tmp_path / "a.tsv", progress=False, **arguments)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a.tsv.gz"
    out.write_bytes(b"old")

    def fail(_: GeneratedRows) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "encode", fail)
    with pytest.raises(KeyboardInterrupt):
        generate(10, out, vocabularies=SMALL, progress=False)
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_bytes() == b"old"


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "a.tsv"
    assert module.main(["--rows", "20", "--out", str(out), "--seed", "5"]) == 0
    assert out.read_bytes() == module.encode(all_rows(20, 5))
    assert "100%" in capsys.readouterr().err
    assert module.main(["--rows", "-3", "--out", str(out)]) == 1
    assert "error: Expected rows >= 1, got rows=-3." in capsys.readouterr().err


class TestDrift:
    """Days differ from each other as `Drift` says."""

    def test_every_day_has_a_file_with_rows_of_its_own(self, tmp_path: Path) -> None:
        paths = generate_days(3, 300, tmp_path, vocabularies=SMALL, progress=False)
        assert [path.name for path in paths] == ["day_00.tsv.gz", "day_01.tsv.gz", "day_02.tsv.gz"]
        generate(300, tmp_path / "alone.tsv.gz", vocabularies=SMALL, progress=False)
        days = [path.read_bytes() for path in paths]
        assert days[0] == (tmp_path / "alone.tsv.gz").read_bytes()
        assert len(set(days)) == 3

    @pytest.mark.parametrize("day", [1, 8])
    def test_popular_categories_are_replaced_at_the_rate(self, day: int) -> None:
        drift = Drift(day, renewal=0.05, turn=0.0)
        first, later = (
            next(generated_rows(16_384, 0, [200] * 26, drift=d)) for d in (Drift(), drift)
        )
        kept = [
            set(first.codes[:, feature]) & set(later.codes[:, feature])
            for feature in range(26)
            if not np.any(first.ranks[:, feature] < 0)
        ]
        share = np.mean([len(codes) / 200 for codes in kept])
        assert share == pytest.approx(1 - 0.05 * day, abs=0.03)
        pairs = {(r, c) for r, c in zip(later.ranks[:, 0], later.codes[:, 0], strict=True)}
        assert len({code for _, code in pairs}) == len(pairs)

    def test_what_values_mean_turns_by_the_angle(self) -> None:
        """Of the planted logits, over what the same categories have on day 0."""
        angle = 0.6
        whole = next(generated_rows(16_384, 0, drift=Drift(1, 0.0, 1e-9)))
        turned = next(generated_rows(16_384, 0, drift=Drift(1, 0.0, angle)))
        np.testing.assert_array_equal(whole.codes, turned.codes)
        logits = [np.log(p / (1 - p)) for p in (whole.probabilities, turned.probabilities)]
        assert np.corrcoef(logits)[0, 1] == pytest.approx(np.cos(angle), abs=0.06)
        assert auc(turned.labels, turned.probabilities) > auc(turned.labels, whole.probabilities)

    def test_command_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["--rows", "20", "--out", str(tmp_path), "--days"]
        assert module.main([*arguments, "2"]) == 0
        assert len(list(tmp_path.iterdir())) == 2
        assert module.main([*arguments, "0"]) == 1
        assert "error: Expected days >= 1, got days=0." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rows.tsv", "rows.tsv.gz"])
def test_no_room_is_told_before_anything_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert module.main(["--rows=100000000000000", f"--out={tmp_path / 'new' / name}"]) == 1
    assert "GB free for 100,000,000,000,000 rows" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
