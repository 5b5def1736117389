"""What the README claims, each re-run by one command: `python -m benchmarks.NAME [--quick]`."""
