"""Benchmarks of this machine: its limits, the speed of models and data, checks for a run."""
