"""Recordings -> embeddings: batches of equal length, chunks of work, processes and hosts."""
