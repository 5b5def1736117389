"""The measurements of docs/results/benchmarks.md: `python -m benchmarks.NAME [--quick]`."""
