"""Batches drawn before training: whose they are, what they hold, and what is refused."""

import json
import pickle
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import dp_sparse
from dp_sparse import OfflineBatches, PrivacyError, offline, offline_sampling
from dp_sparse.core import translated
from dp_sparse.sampling import OWN_ORDER, SEEDED, BatchPart
from tests.sampling.offline_folders import RECORD, examples, prepared, unpack

KEY = bytes(range(32))


def calibrated(folder: Path, **options: Any) -> dp_sparse.PrivacyPlan:
    sampling = offline_sampling(OfflineBatches(str(folder), unpack), **options)
    return dp_sparse.PrivacyPlan(dp_sparse.PrivacyBudget(1.0, 1e-3), sampling).with_noise(2.0)


class TestDraw:
    def test_depends_on_key_shard_and_chunk_alone(self) -> None:
        draw = offline.OfflineDraw(KEY, 1e-4, 20)
        first = draw.of_chunk("day_0", 3)
        np.testing.assert_array_equal(first, draw.of_chunk("day_0", 3))
        others = [
            offline.OfflineDraw(KEY[::-1], 1e-4, 20).of_chunk("day_0", 3),
            draw.of_chunk("day_1", 3),
            draw.of_chunk("day_0", 2),
        ]
        for other in others:
            assert not np.array_equal(first, other)

    def test_each_pair_once_and_sorted(self) -> None:
        places, joined = offline.OfflineDraw(KEY, 0.3, 5).of_chunk("a", 0)
        pairs = places * 5 + joined
        assert np.all(np.diff(pairs) > 0)
        assert 0 <= places.min() < 99 and offline.CHUNK - 99 < places.max() < offline.CHUNK
        assert joined.min() == 0 and joined.max() == 4

    def test_every_step_joins_with_its_probability(self) -> None:
        """Of each step and of pairs of steps; a probability 15 % off is noticed."""
        draw = offline.OfflineDraw(offline.new_key(), 0.2, 4)
        there = np.zeros((4 * offline.CHUNK, 4), bool)
        for chunk in range(4):
            places, joined = draw.of_chunk("a", chunk)
            there[places + chunk * offline.CHUNK, joined] = True
        for hits, q in [(there[:, t], 0.2) for t in range(4)] + [
            (there[:, s] & there[:, t], 0.04) for s in range(4) for t in range(s)
        ]:
            count = int(hits.sum())
            assert stats.binomtest(count, len(there), q).pvalue > 1e-6
            assert stats.binomtest(count, len(there), 1.15 * q).pvalue < 1e-6
        neighbours = there[1:] & there[:-1]
        assert stats.binomtest(int(neighbours.sum()), neighbours.size, 0.04).pvalue > 1e-6

    def test_all_join_at_probability_1(self) -> None:
        places, joined = offline.OfflineDraw(KEY, 1.0, 2).of_chunk("a", 0)
        assert len(places) == 2 * offline.CHUNK
        np.testing.assert_array_equal(joined[:4], [0, 1, 0, 1])

    def test_never_in_a_pickle_or_a_log(self) -> None:
        draw = offline.OfflineDraw(KEY, 0.2, 4)
        assert repr(KEY) not in repr(draw)
        with pytest.raises(PrivacyError, match="to stay in its process"):
            pickle.dumps(draw)

    @pytest.mark.parametrize(
        ("key", "probability", "steps", "message"),
        [
            (b"short", 0.1, 3, "a key of 32 bytes"),
            ("x" * 32, 0.1, 3, "a key of 32 bytes"),
            (KEY, 0.0, 3, "sampling_probability"),
            (KEY, 1.5, 3, "Expected sampling_probability <= 1"),
            (KEY, 0.1, 0, "steps"),
        ],
    )
    def test_what_is_refused(self, key: Any, probability: float, steps: int, message: str) -> None:
        with pytest.raises(ValueError, match=message) as error:
            offline.OfflineDraw(key, probability, steps)
        assert "short" not in str(error.value)

    def test_keys_are_new(self) -> None:
        assert len({offline.new_key() for _ in range(5)}) == 5
        assert offline.draw_id(KEY) == (
            "630dcd2966c4336691125448bbb25b4ff412a49c732db2c8abc1b8581bd710dd"
        )


@settings(max_examples=15, deadline=None)
@given(
    num_examples=st.integers(1, 60),
    share=st.floats(0.01, 1.0),
    steps=st.integers(1, 9),
    bucket_steps=st.integers(1, 10),
    stripes=st.integers(1, 4),
    first=st.floats(0, 0.99),
)
def test_batches_hold_what_was_drawn(
    num_examples: int,
    share: float,
    steps: int,
    bucket_steps: int,
    stripes: int,
    first: float,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("drawn")
    capacity = num_examples + 1
    ids = prepared(
        folder,
        num_examples=num_examples,
        batch_size=share * num_examples,
        steps=steps,
        capacity=capacity,
        bucket_steps=bucket_steps,
        stripes=stripes,
    )
    plan = calibrated(folder)
    begin = int(first * steps)
    source = OfflineBatches(str(folder), unpack)
    batches = plan.sampling.batches(source, first_step=begin)
    assert int(batches.cardinality()) == steps - begin
    records = examples(num_examples)
    for step, (x, y, weights) in enumerate(batches, start=begin):
        own, padding = records[ids[step]], capacity - len(ids[step])
        for name, got in [("y", y), *x.items()]:
            assert got.dtype == RECORD[name].base
            np.testing.assert_array_equal(got[: len(own)], own[name])
            assert not np.any(got[len(own) :])
        present = [1.0] * len(own) + [0.0] * padding
        np.testing.assert_array_equal(weights["present"], present)
        np.testing.assert_array_equal(weights["sample_weight"], present)
        fields = plan.sampling.fingerprint, OWN_ORDER, step
        np.testing.assert_array_equal(
            weights["marker"], [[*fields, place] for place in range(capacity)]
        )


def test_what_is_padding_counts_nothing(tmp_path: Path) -> None:
    """A weight of the user's, however it is computed from zeros, does not make it an example."""
    prepared(tmp_path)
    weighted = OfflineBatches(
        str(tmp_path), lambda fields: (fields["x"], fields["y"], 1 + fields["y"])
    )
    for _, _, weights in calibrated(tmp_path).sampling.batches(weighted):
        assert np.all(weights["sample_weight"] >= 1) and np.any(weights["present"] == 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -2.0])
def test_negative_or_infinite_weights_are_refused(tmp_path: Path, value: float) -> None:
    """Those of examples: what stands at padding counts nothing."""
    last = int(prepared(tmp_path / "own")[0][-1])
    own = OfflineBatches(
        str(tmp_path / "own"), lambda f: (f["x"], f["y"], tf.where(f["id"] == last, value, 1.0))
    )
    with pytest.raises(ValueError, match=f"finite, got .*{value:g}.* in batch 0"), translated():
        next(iter(calibrated(tmp_path / "own").sampling.batches(own)))
    prepared(tmp_path / "padding")
    padding = OfflineBatches(
        str(tmp_path / "padding"),
        lambda f: (f["x"], f["y"], tf.where(f["x"][:, 2] == 0, value, 1.0)),
    )
    assert len(list(calibrated(tmp_path / "padding").sampling.batches(padding))) == 7


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda x: tf.reshape(x, [-1]), r"shape \(120,\)"),
        (lambda x: tf.reduce_sum(x), r"shape \(\)"),
        (lambda x: tf.boolean_mask(x, x[:, 0] > 0), r"\d+"),
    ],
)
def test_rows_that_unpack_adds_or_drops_are_refused(
    tmp_path: Path, change: Any, found: str
) -> None:
    prepared(tmp_path)
    source = OfflineBatches(str(tmp_path), lambda fields: (change(fields["x"]), fields["y"]))
    with pytest.raises(ValueError, match=f"keep the 40 rows .* got {found} in"), translated():
        next(iter(calibrated(tmp_path).sampling.batches(source)))


def test_weights_of_another_length_are_refused(tmp_path: Path) -> None:
    prepared(tmp_path)
    source = OfflineBatches(str(tmp_path), lambda f: (f["x"], f["y"], tf.ones([39])))
    with pytest.raises(ValueError, match=r"keep the 40 rows .* got shape \(39,\) in"):
        next(iter(calibrated(tmp_path).sampling.batches(source)))


class TestTraining:
    def model(self, plan: dp_sparse.PrivacyPlan) -> keras.Model:
        x = keras.Input((3,), dtype="int32", name="x")
        rows = keras.layers.Embedding(3000, 2)(x)
        outputs = keras.layers.Dense(1)(keras.layers.Flatten()(rows))
        model = keras.Model({"x": x}, outputs)
        adafest = dp_sparse.DPAdaFESTOptimizer(
            keras.optimizers.SGD(0.1), plan, 1.0, expected_false_rows=2
        )
        model.compile(optimizer=adafest, loss="mse")
        return model

    def source(self, folder: Path) -> OfflineBatches:
        return OfflineBatches(str(folder), lambda fields: ({"x": fields["x"]}, fields["y"]))

    def test_trains_stops_and_goes_on(self, tmp_path: Path) -> None:
        prepared(tmp_path / "drawn")
        plan = calibrated(tmp_path / "drawn")
        model, source = self.model(plan), self.source(tmp_path / "drawn")
        model.fit(plan.sampling.batches(source), steps_per_epoch=4, verbose=0)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        spent = int(loaded.optimizer.steps_spent.numpy())
        assert spent == 4
        plan = loaded.optimizer.plan
        loaded.fit(plan.sampling.batches(source, first_step=spent), verbose=0)
        assert loaded.optimizer.steps_left == 0

    def test_no_batch_twice(self, tmp_path: Path) -> None:
        prepared(tmp_path)
        plan = calibrated(tmp_path)
        model, source = self.model(plan), self.source(tmp_path)
        model.fit(plan.sampling.batches(source), steps_per_epoch=2, verbose=0)
        with pytest.raises(PrivacyError, match="first_step"):
            model.fit(plan.sampling.batches(source), steps_per_epoch=2, verbose=0)

    def test_a_draw_of_a_seed_is_refused(self, tmp_path: Path) -> None:
        prepared(tmp_path, seeded=True)
        plan = calibrated(tmp_path)
        _, _, weights = next(iter(plan.sampling.batches(self.source(tmp_path))))
        assert np.all(weights["marker"][:, 1] == SEEDED)
        with pytest.raises(PrivacyError, match="seed"):
            self.model(plan).fit(plan.sampling.batches(self.source(tmp_path)), verbose=0)


class TestOnePlan:
    def test_another_plan_is_refused(self, tmp_path: Path) -> None:
        prepared(tmp_path)
        source = OfflineBatches(str(tmp_path), unpack)
        calibrated(tmp_path).sampling.batches(source)
        other = dp_sparse.PrivacyPlan(
            dp_sparse.PrivacyBudget(1.0, 1e-3), offline_sampling(source)
        ).with_noise(3.0)
        with pytest.raises(PrivacyError, match="serves another one"):
            other.sampling.batches(source)

    def test_a_second_run_of_the_same_plan_goes_on_but_does_not_begin(self, tmp_path: Path) -> None:
        prepared(tmp_path)
        source = OfflineBatches(str(tmp_path), unpack)
        first, second = calibrated(tmp_path), calibrated(tmp_path)  # as of two processes
        first.sampling.batches(source)
        first.sampling.batches(source)  # the ledger counts what one process reads
        second.sampling.batches(source, first_step=3)
        with pytest.raises(PrivacyError, match="with which one began at step 0"):
            second.sampling.batches(source)
        (tmp_path / "plan.json").unlink()
        second.sampling.batches(source)

    def test_workers_of_one_run(self, tmp_path: Path) -> None:
        prepared(tmp_path)
        source = OfflineBatches(str(tmp_path), unpack)
        plans = [calibrated(tmp_path), calibrated(tmp_path)]
        whole = list(plans[0].sampling.batches_of(source, BatchPart(0, 40, 0, 9), first_step=0))
        for plan, begin, end in zip(plans, (0, 25), (25, 40), strict=True):
            part = BatchPart(begin, end, 0, 9)
            for own, of_all in zip(
                plan.sampling.batches_of(source, part, first_step=0), whole, strict=True
            ):
                for got, wanted in zip(tf.nest.flatten(own), tf.nest.flatten(of_all), strict=True):
                    np.testing.assert_array_equal(got, wanted[begin:end])

    def test_unless_it_says_so(self, tmp_path: Path) -> None:
        prepared(tmp_path)
        source = OfflineBatches(str(tmp_path), unpack)
        alone, shared = calibrated(tmp_path), calibrated(tmp_path, shared=True)
        alone.sampling.batches(source)
        shared.sampling.batches(source)
        assert "do not compose as Poisson-sampled runs" in shared.statement().replace("\n", " ")
        assert "do not compose" not in alone.statement()

    def test_without_a_plan(self, tmp_path: Path) -> None:
        prepared(tmp_path)
        source = OfflineBatches(str(tmp_path), unpack)
        with pytest.raises(PrivacyError, match="of a calibrated plan"):
            offline_sampling(source).batches(source)

    def test_a_debug_run_takes_nothing_from_a_private_one(self, tmp_path: Path) -> None:
        prepared(tmp_path)
        source = OfflineBatches(str(tmp_path), unpack)
        plan = calibrated(tmp_path)
        dp_sparse.not_private_plan(plan, 3).sampling.batches(source)
        assert not (tmp_path / "plan.json").exists()
        plan.sampling.batches(source)

    def test_saved_and_calibrated_again(self, tmp_path: Path) -> None:
        prepared(tmp_path)
        plan = calibrated(tmp_path)
        again = dp_sparse.PrivacyPlan.from_config(json.loads(json.dumps(plan.get_config())))
        assert again == plan and again.sampling.plan is not None
        assert again.with_noise(2.0).fingerprint == plan.fingerprint

    def test_the_statement_is_that_of_poisson_and_names_the_draw(self, tmp_path: Path) -> None:
        prepared(tmp_path)
        plan = calibrated(tmp_path)
        online = dp_sparse.PoissonSampling(50, 5.0, 7, capacity=40)
        poisson = dp_sparse.PrivacyPlan(plan.budget, online).with_noise(2.0)
        assert plan.spent(7) == poisson.spent(7)
        assert plan.sampling.draw_id[:12] in plan.statement()


class TestRefused:
    def test_no_manifest(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="their preparation did not end"):
            OfflineBatches(str(tmp_path), unpack)

    @pytest.mark.parametrize("text", ["", "{}", '{"format": "other"}', "[]"])
    def test_a_foreign_manifest(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match="Expected a manifest of format"):
            OfflineBatches(str(tmp_path), unpack)

    def test_fields_that_were_changed(self, tmp_path: Path) -> None:
        prepared(tmp_path)
        path = tmp_path / "manifest.json"
        path.write_text(path.read_text().replace('"code"', '"kode"'))
        with pytest.raises(ValueError, match="Expected a manifest of format"):
            OfflineBatches(str(tmp_path), unpack)

    @pytest.mark.parametrize("how", ["cut", "longer", "missing"])
    def test_a_file_that_is_not_whole(self, tmp_path: Path, how: str) -> None:
        prepared(tmp_path)
        path = tmp_path / "steps-00001-00.tfrecord"
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-1] if how == "cut" else path.read_bytes() + b"0")
        with pytest.raises(ValueError, match=r"steps-00001-00\.tfrecord"):
            OfflineBatches(str(tmp_path), unpack)

    @pytest.mark.parametrize("how", ["another draw", "twice", "order"])
    def test_files_of_the_right_size_with_wrong_blocks(self, tmp_path: Path, how: str) -> None:
        prepared(tmp_path / "a")
        prepared(tmp_path / "b", key=KEY[::-1])
        files = [tmp_path / "a" / f"steps-0000{bucket}-01.tfrecord" for bucket in (0, 1)]
        if how == "another draw":
            files[1].write_bytes((tmp_path / "b" / files[1].name).read_bytes())
        else:
            first, second = (file.read_bytes() for file in files)
            files[1].write_bytes(first)
            if how == "order":
                files[0].write_bytes(second)
        plan = calibrated(tmp_path / "a")
        batches = plan.sampling.batches(OfflineBatches(str(tmp_path / "a"), unpack))
        with pytest.raises(Exception, match="Expected the blocks? of"):
            list(batches)

    def test_bytes_that_were_changed(self, tmp_path: Path) -> None:
        prepared(tmp_path)
        path = tmp_path / "steps-00001-00.tfrecord"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        batches = calibrated(tmp_path).sampling.batches(OfflineBatches(str(tmp_path), unpack))
        with pytest.raises(Exception, match="corrupted record"):
            list(batches)

    def test_more_examples_than_the_capacity(self, tmp_path: Path) -> None:
        with pytest.raises(PrivacyError, match="the preparation stops here"):
            prepared(tmp_path, batch_size=25.0, capacity=3)
        assert not (tmp_path / "manifest.json").exists()

    @pytest.mark.parametrize(
        ("steps", "got"), [([3, 6], "one of step 6"), ([2, 3], "one of step 2"), ([3], "1 steps")]
    )
    def test_examples_that_would_be_lost(self, tmp_path: Path, steps: list[int], got: str) -> None:
        prepared(tmp_path)
        manifest = offline.read_manifest(str(tmp_path))
        with pytest.raises(ValueError, match=f"the steps 3 to 5, those of bucket 1, got {got}"):
            offline.write_bucket(str(tmp_path), manifest, 1, np.array(steps), examples(2))

    def test_records_of_another_dtype(self, tmp_path: Path) -> None:
        """Of which one would be read as parts of two examples."""
        prepared(tmp_path)
        manifest = offline.read_manifest(str(tmp_path))
        wider = np.zeros(2, [*examples(2).dtype.descr, ("more", "<i8")])
        with pytest.raises(ValueError, match="Expected records of the manifest's dtype"):
            offline.write_bucket(str(tmp_path), manifest, 1, np.array([3, 4]), wider)

    def test_a_plan_of_other_numbers(self, tmp_path: Path) -> None:
        prepared(tmp_path / "a")
        prepared(tmp_path / "b", key=KEY[::-1])
        prepared(tmp_path / "c", num_examples=49)
        plan = calibrated(tmp_path / "a")
        for name, wrong in (("b", "draw_id"), ("c", "num_examples")):
            with pytest.raises(ValueError, match=f"prepared batches of {wrong}"):
                plan.sampling.batches(OfflineBatches(str(tmp_path / name), unpack))
        with pytest.raises(ValueError, match="Expected OfflineBatches"):
            plan.sampling.batches((np.zeros(50), np.zeros(50)))  # type: ignore[arg-type]

    @pytest.mark.parametrize("first_step", [-1, 7])
    def test_a_step_outside_the_run(self, tmp_path: Path, first_step: int) -> None:
        prepared(tmp_path)
        source = OfflineBatches(str(tmp_path), unpack)
        with pytest.raises(ValueError, match="Expected 0 <= first_step < 7"):
            calibrated(tmp_path).sampling.batches(source, first_step=first_step)

    @pytest.mark.parametrize("name", ["", "12", "G" * 64, "A" * 64])
    def test_a_name_that_is_none(self, name: str) -> None:
        with pytest.raises(ValueError, match="Expected draw_id"):
            dp_sparse.OfflinePoissonSampling(50, 5.0, 7, draw_id=name)
