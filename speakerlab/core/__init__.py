"""What every package may import: batches, atomic files, faults, processes, registries, windows."""
