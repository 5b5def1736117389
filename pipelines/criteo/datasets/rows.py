"""Rows of one file in Apache Beam: read in order, parsed in parallel, malformed ones kept apart.

A file is read by one worker, since gzip has no other way; its blocks are then parsed by all. What
is written besides the examples has names that follow from the file and the number of the line, so
that a bundle which runs twice writes the same.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import apache_beam as beam
import numpy as np
import tensorflow as tf
from apache_beam import pvalue

from pipelines.criteo.parse import REASONS, WELL_FORMED, parse_raw_lines
from pipelines.criteo.prepare.job import write_whole
from pipelines.criteo.records import PrepareError
from pipelines.criteo.shards import blocks_of, malformed_lines

QUARANTINE = "quarantine"
_REPORT = ".report-"


def examples_of(pipeline: beam.Pipeline, name: str, path: str, folder: str) -> pvalue.PCollection:
    """The rows of a file as (number of the line, example), and a report of it in `folder`.

    Args:
        pipeline: Where to.
        name: Of the split.
        path: Of the file, plain or gzip.
        folder: Of the data set. Malformed lines go to `quarantine/` in it, each with its number
            and reason.
    """
    read = (
        pipeline
        | f"{name} file" >> beam.Create([path])
        | f"{name} read" >> beam.FlatMap(_numbered_blocks).with_outputs("digest", main="blocks")
    )
    parsed = (
        read.blocks
        | f"{name} balance" >> beam.Reshuffle()
        | f"{name} parse"
        >> beam.FlatMap(_parsed, name=name, folder=folder).with_outputs("tally", main="examples")
    )
    counts = parsed.tally | f"{name} count" >> beam.CombineGlobally(_total)
    digest = pvalue.AsSingleton(read.digest)
    counts | f"{name} report" >> beam.Map(_write_report, digest, name=name, folder=folder)
    return parsed.examples


def collected_reports(folder: str) -> dict[str, dict[str, Any]]:
    """What is known of each split, by its name; removes what it is read from."""
    found = {}
    for name in tf.io.gfile.listdir(folder):
        if name.startswith(_REPORT):
            path = f"{folder}/{name}"
            with tf.io.gfile.GFile(path) as file:
                found[name.removeprefix(_REPORT).removesuffix(".json")] = json.loads(file.read())
            tf.io.gfile.remove(path)
    return found


def _numbered_blocks(path: str) -> Iterator[Any]:
    """Blocks of whole lines with the number of their first line, from 0; in the end the digest."""
    digest, lines = hashlib.sha256(), 0
    for block in blocks_of(path, digest=digest):
        yield lines, block
        lines += block.count(b"\n")
    yield pvalue.TaggedOutput("digest", digest.hexdigest())


def _parsed(numbered: tuple[int, bytes], name: str, folder: str) -> Iterator[Any]:
    first, block = numbered
    parsed = parse_raw_lines(block)
    malformed = malformed_lines(block, parsed.reasons, first + 1)
    if malformed:
        write_whole(f"{folder}/{QUARANTINE}/{name}-{first:012d}.tsv", malformed)
    numbers = first + np.flatnonzero(parsed.reasons == WELL_FORMED)
    for number, row in zip(numbers.tolist(), parsed.records, strict=True):
        yield number, {"label": row["label"], "int": row["integers"], "cat": row["categories"]}
    bad = parsed.reasons[parsed.reasons != WELL_FORMED]
    tally = Counter({"": len(numbers)}) + Counter(str(REASONS[index]) for index in bad)
    yield pvalue.TaggedOutput("tally", tally)


def _total(counts: Iterable[Counter[str]]) -> Counter[str]:
    return sum(counts, Counter())


def _write_report(counts: Counter[str], digest: str, name: str, folder: str) -> None:
    well_formed = counts.pop("", 0)
    if not well_formed:
        raise PrepareError(f"No row of {name} is well-formed: {dict(counts)}. Get the file again.")
    report = {"rows": well_formed, "quarantined": dict(counts), "sha256": digest}
    write_whole(f"{folder}/{_REPORT}{name}.json", json.dumps(report).encode())
