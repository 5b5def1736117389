"""Prepares Criteo rows for offline Poisson sampling, on Apache Beam.

`job.py` says what is prepared and where; `spread.py` parses a shard, throws its coins and writes
its pairs of example and step; `collect.py` writes the batches of a bucket of steps; `run.py` joins
them in one Beam pipeline, and begins, ends and resumes it.
"""
