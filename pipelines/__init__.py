"""Whole jobs, from raw data to a report, each a `python -m pipelines.NAME`."""
