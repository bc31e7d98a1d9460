"""The loop: schedules, precision, batch arithmetic, ranks, checkpoints, guard, monitor, trainer."""
