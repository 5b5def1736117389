"""The Beam pipeline of a preparation, and how it begins, ends and goes on after it was stopped.

Shards are spread, then buckets collected: only numbers of shards and buckets pass through the
shuffle, so memory is that of one bucket a worker. Whatever was finished stays finished: the same
command goes on. The key is made first, outside the output, readable by its owner alone, and deleted
once the manifest is there.
"""

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import apache_beam as beam
import numpy as np
import tensorflow as tf
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions

import dp_sparse
from dp_sparse import offline
from pipelines.criteo.histograms import LookupCounts, saved
from pipelines.criteo.prepare.collect import collect
from pipelines.criteo.prepare.job import HISTOGRAM, Job, read_json, write_json, write_whole
from pipelines.criteo.prepare.spread import spread, summary_of
from pipelines.criteo.records import PrepareError
from pipelines.files import lock


def prepare(
    job: Job, beam_options: Sequence[str] = (), seed: int | None = None
) -> offline.Manifest:
    """Runs the job, or the rest of it, on the runner that `beam_options` name.

    Args:
        job: What to prepare.
        beam_options: Beam's own, such as `--runner=DirectRunner`.
        seed: For tests alone: private training refuses batches of a seed.

    Raises:
        PrepareError: The output holds other data, or is being prepared by another process; an input
            is damaged, N is not what was found, a batch is larger than the capacity, Beam does not
            know an option, or a seed is given for a job that does not say so.
    """
    options = _options(beam_options)
    if job.seeded != (seed is not None):
        raise PrepareError(
            f"Expected a seed with new_job(..., seeded=True) alone, got seed={seed} and seeded="
            f"{job.seeded}: the manifest would not say what private training must refuse."
        )
    with _alone(job):
        ended = _ended(job)
        if ended is not None:
            return ended
        draw_id = _begin(job, seed)
        with _told():
            _run(job, options)
        return _end(job, draw_id)


@contextlib.contextmanager
def _alone(job: Job) -> Iterator[None]:
    """Keeps others out of a local output; nothing but its owner's care does in a remote one.

    Raises:
        PrepareError: Another process prepares it, or another thread.
    """
    if "://" in job.output:
        yield
        return
    path = Path(job.output) / ".lock"
    held = lock(path)
    if held is None:
        raise PrepareError(
            f"Expected nobody else to prepare {job.output}, got a preparation that is running: "
            "wait until it ends, or name another output."
        )
    with held:
        yield
        path.unlink()  # what is prepared needs none


def _run(job: Job, options: PipelineOptions) -> None:
    with beam.Pipeline(options=options) as pipeline:
        _ = (
            pipeline
            | "Shards" >> beam.Create(range(len(job.inputs)))
            | "Balance" >> beam.Reshuffle()
            | "Spread" >> beam.FlatMap(_spread, job=job)
            | "All shards" >> beam.GroupByKey()
            | "Collect" >> beam.Map(_collected, job=job)
        )


def _options(given: Sequence[str]) -> PipelineOptions:
    """Beam's options; DirectRunner is its engine in this process.

    By itself it would first fetch another engine from the network.

    Raises:
        PrepareError: Beam does not know one of them, and would leave it out.
    """
    options = PipelineOptions(list(given))
    every, known = options.get_all_options(retain_unknown_options=True), options.get_all_options()
    unknown = [f"--{name}" for name in every if name not in known]
    for before, word in itertools.pairwise(["", *given]):
        if not word.startswith("-") and ("=" in before or not before.startswith("-")):
            unknown.append(word)
    if unknown:
        raise PrepareError(
            f"Expected options of this command (--help) and of Apache Beam, got {unknown[0]}."
        )
    standard = options.view_as(StandardOptions)
    if standard.runner in (None, "DirectRunner"):
        standard.runner = "FnApiRunner"
    return options


def _spread(shard: int, job: Job) -> Iterator[tuple[int, int]]:
    """The shard for each bucket, once it is spread."""
    spread(job, shard)
    for bucket in range(job.buckets):
        yield bucket, shard


def _collected(found: tuple[int, Iterable[int]], job: Job) -> int:
    bucket, shards = found
    return collect(job, bucket, shards)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Raises what a worker refused with its own words, without Beam's around them."""
    try:
        yield
    except (PrepareError, dp_sparse.PrivacyError, RuntimeError) as error:
        words = str(error)
        kind = next((k for k in ("PrepareError: ", "PrivacyError: ") if k in words), None)
        if kind is not None:  # of another process: a traceback as text
            words = words.rpartition(kind)[2]
        elif not isinstance(error, PrepareError | dp_sparse.PrivacyError):
            raise
        raise PrepareError(words.partition(" [while running")[0].strip()) from error


def _begin(job: Job, seed: int | None) -> str:
    """Makes the key, or finds that of the job that is resumed; returns the name of the draw.

    What is begun is written before the key is made, so that a key which is there without it belongs
    to something else.
    """
    before = read_json(job.work("job.json"))
    has_key = tf.io.gfile.exists(job.key_file)
    if before is None:
        if has_key:
            raise PrepareError(
                f"Expected no file at key_file={job.key_file}, got one: a key serves one "
                "preparation. Remove it if none is running."
            )
        before = {"fingerprint": job.fingerprint, "draw_id": None}
        write_json(job.work("job.json"), before)
    if before["fingerprint"] != job.fingerprint:
        raise PrepareError(
            f"Expected the inputs and numbers with which {job.output} was begun, got others: use "
            "those, or remove the folder and its key to begin anew."
        )
    if before["draw_id"] is None:  # nothing was drawn yet
        before["draw_id"] = offline.draw_id(_own_key(job, seed))
        write_json(job.work("job.json"), before)
    elif not has_key or offline.draw_id(job.key()) != before["draw_id"]:
        raise PrepareError(
            f"Expected the key with which {job.output} was begun in {job.key_file}, got "
            f"{'another one' if has_key else 'none'}: remove the folder to begin anew."
        )
    return str(before["draw_id"])


def _own_key(job: Job, seed: int | None) -> bytes:
    """A new key in a file that says whose it is, or the one that this job wrote before it stopped.

    Raises:
        PrepareError: The file has the key of another job.
    """
    key = offline.new_key() if seed is None else seed.to_bytes(32, "little")
    content, path = f"{key.hex()}\n{job.fingerprint}\n".encode(), job.key_file
    if "://" in path:  # no modes there, and no file that is made once: its folder's rules hold
        with tf.io.gfile.GFile(path, "wb") as remote:
            remote.write(content)
        return key
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if job.owns_key():
            return job.key()
        raise PrepareError(
            f"Expected no file at key_file={path}, got that of another preparation, which it "
            "serves alone: name another file. If none is running, remove it."
        ) from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    return key


def _end(job: Job, draw_id: str) -> offline.Manifest:
    """Checks what was found against what was declared, writes the manifest, deletes the key."""
    shards = [summary_of(job, shard) for shard in range(len(job.inputs))]
    collected = [read_json(job.work(f"bucket-{k:05d}.json"))["pairs"] for k in range(job.buckets)]
    if sum(collected) != sum(shard["pairs"] for shard in shards):
        raise PrepareError(
            f"Expected {sum(shard['pairs'] for shard in shards)} pairs of example and step in "
            f"{job.output}, got {sum(collected)}: remove the folder and its key, and begin anew."
        )
    digests = [shard["digest"] for shard in shards]
    twice = [k for k, digest in enumerate(digests) if digest in digests[:k]]
    if twice:
        first = digests.index(digests[twice[0]])
        raise PrepareError(
            f"Expected each shard once, got the same rows in {job.inputs[first]} and "
            f"{job.inputs[twice[0]]}: leave one out, remove {job.output} and {job.key_file}, and "
            "begin anew."
        )
    records = sum(shard["records"] for shard in shards)
    if records != job.num_examples:
        raise PrepareError(
            f"Expected num_examples={job.num_examples} well-formed rows, got {records}: the "
            f"sampling probability depends on it. Remove {job.output} and {job.key_file}, and "
            f"begin anew with --num_examples={records}."
        )
    quarantined: Counter[str] = Counter()
    for shard in shards:
        quarantined.update({reason: of["rows"] for reason, of in shard["quarantined"].items()})
    if offline.draw_id(job.key()) != draw_id:
        raise PrepareError(
            f"Expected the key with which {job.output} was begun in {job.key_file}, got another "
            "one: remove the folder to begin anew."
        )
    about = {"quarantined": dict(quarantined), "digests": digests, "job": job.fingerprint}
    _write_histogram(job)
    manifest = job.manifest(draw_id, about)
    manifest.write(job.output)
    _clear(job, draw_id)
    return manifest


def _write_histogram(job: Job) -> None:
    """Draws the noise once: a job that was stopped after this finds what it drew."""
    path = f"{job.output}/{HISTOGRAM}"
    if job.histogram_noise is None or tf.io.gfile.exists(path):
        return
    counts = LookupCounts(job.vocabularies)
    for shard in filter(job.counts, range(len(job.inputs))):
        with tf.io.gfile.GFile(job.work(f"counts-{shard:05d}"), "rb") as file:
            counts.values += np.frombuffer(file.read(), np.int64)
    name = Path(job.output).name
    write_whole(path, saved(counts.histogram(job.histogram_noise, name)))


def _clear(job: Job, draw_id: str) -> None:
    """Deletes the key, then what was kept until the end."""
    if tf.io.gfile.exists(job.key_file) and offline.draw_id(job.key()) == draw_id:
        tf.io.gfile.remove(job.key_file)
    if tf.io.gfile.exists(f"{job.output}/.work"):
        tf.io.gfile.rmtree(f"{job.output}/.work")


def _ended(job: Job) -> offline.Manifest | None:
    """The manifest of this very job, with nothing left to clear, or None if it has not ended.

    Raises:
        PrepareError: The folder was prepared by another job.
    """
    if not tf.io.gfile.exists(f"{job.output}/manifest.json"):
        return None
    manifest = offline.read_manifest(job.output)
    if manifest.about.get("job") != job.fingerprint:
        raise PrepareError(
            f"Expected a new folder as output, got {job.output}, which is prepared already. Name "
            "another one, or remove it."
        )
    _clear(job, manifest.draw_id)
    return manifest
