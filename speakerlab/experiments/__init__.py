"""Train, evaluate and report an experiment, the folder `exp/<name>`."""
