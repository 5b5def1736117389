"""The measurements of the README, each one command: `python -m benchmarks.NAME [--quick]`."""
