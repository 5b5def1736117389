"""Planted faults of the privacy core, each of which some test must catch.

`faults.FAULTS` lists them, `python -m tests.mutations.run` plants one after the other in a copy of
the tree and runs the tests that should catch it. A new guarantee gets a fault here: the wrong line
that somebody is likely to write.
"""
