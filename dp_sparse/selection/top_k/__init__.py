"""Rows selected before training: counts, noise, the top k, and what all of it costs."""
