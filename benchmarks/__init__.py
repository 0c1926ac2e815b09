"""offloadkit and its peers on the same work: `python -m benchmarks.run --help`."""
