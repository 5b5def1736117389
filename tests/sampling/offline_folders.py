"""Small folders of batches that were drawn before training, as a preparation would write them."""

from pathlib import Path
from typing import Any

import numpy as np

from dp_sparse import offline

RECORD = np.dtype([("y", "<f4"), ("x", "<i4", (3,)), ("code", "u1"), ("id", "<i8")])


def examples(count: int) -> np.ndarray:
    """Records whose fields all tell which one it is."""
    records = np.zeros(count, RECORD)
    number = np.arange(count)
    records["y"], records["code"], records["id"] = number / 7, number % 251, number
    records["x"] = number[:, None] + [0, 1000, 2000]
    return records


def prepared(
    folder: Path,
    *,
    num_examples: int = 50,
    batch_size: float = 5.0,
    steps: int = 7,
    capacity: int = 40,
    bucket_steps: int = 3,
    stripes: int = 2,
    key: bytes = bytes(range(32)),
    **fields: Any,
) -> list[np.ndarray]:
    """Writes all of it; returns the ids of each step's batch."""
    folder.mkdir(exist_ok=True)
    manifest = offline.Manifest(
        draw_id=offline.draw_id(key),
        num_examples=num_examples,
        expected_batch_size=batch_size,
        steps=steps,
        capacity=capacity,
        record=RECORD.descr,
        bucket_steps=bucket_steps,
        stripes=stripes,
        **fields,
    )
    places, joined = offline.OfflineDraw(key, batch_size / num_examples, steps).of_chunk("a", 0)
    there = places < num_examples
    places, joined = places[there], joined[there]
    records = examples(num_examples)
    for bucket in range(manifest.buckets):
        own = np.isin(joined, manifest.steps_of(bucket))
        offline.write_bucket(str(folder), manifest, bucket, joined[own], records[places[own]])
    manifest.write(str(folder))
    return [places[joined == step] for step in range(steps)]


def unpack(fields: dict[str, Any]) -> Any:
    """All but the label."""
    return {name: fields[name] for name in ("x", "code", "id")}, fields["y"]
