"""From embeddings and trial lists to results and their report: what stage 6 does."""
