"""Measurements and fault injection: `python -m benchmarks NAME …`. Each prints JSON with `--json`."""
