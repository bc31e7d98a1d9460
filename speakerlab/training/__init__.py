"""The training loop and its parts: updates, checkpoints, ranks, precision, schedules."""
