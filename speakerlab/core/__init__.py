"""Basics for every package: batches, atomic files, faults, processes, registries, windows."""
