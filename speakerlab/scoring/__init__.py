"""From embeddings and trials to scores and metrics: back ends, calibration, intervals."""
